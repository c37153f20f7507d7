"""Run the server: bind, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from types import FrameType

import uvicorn

from cllm.config import ServerConfig, split_list
from cllm.errors import ConfigError, PortInUse
from cllm.frontend.engine_registry import EngineRegistry
from cllm.server.app import create_app
from cllm.server.connection import GuardedConnection, ReadTurns, limit_connections
from cllm.server.job_store import JobStore, find_folder
from cllm.server.keys import KeyRing
from cllm.server.middleware import is_loopback
from cllm.types import Health

log = logging.getLogger(__name__)


def make_tls(config: ServerConfig) -> ssl.SSLContext | None:
    """The TLS context of the certificate, or None without one. Raises ConfigError."""
    if not (config.tls_cert or config.tls_key):
        return None
    if not (config.tls_cert and config.tls_key):
        raise ConfigError("--tls-cert and --tls-key belong together: give both")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # An empty password: without one the library would ask the terminal.
        context.load_cert_chain(config.tls_cert, config.tls_key, password="")
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or error.strerror or type(error).__name__
        raise ConfigError(f"--tls-cert and --tls-key cannot be used: {reason}") from None
    return context


def notify(state: str) -> None:
    """Tell the service manager a state, as sd_notify(3) does. Without one, or when it is gone, do nothing."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, suppress(OSError):
            sender.setblocking(False)
            sender.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)


async def feed_watchdog(registry: EngineRegistry) -> None:
    """Notify the watchdog twice within its limit, unless the engine has failed for good.

    A worker that hangs is replaced by its supervisor; this shows that the event loop itself runs.
    """
    limit_s = int(os.environ.get("WATCHDOG_USEC", 0)) / 1e6
    while limit_s:
        if registry.health is not Health.FAILED:
            notify("WATCHDOG=1")
        await asyncio.sleep(limit_s / 2)


class DrainingServer(uvicorn.Server):
    """uvicorn with guarded connections. An exit signal drains the engines, and ends them after `drain_s`."""

    def __init__(
        self,
        config: uvicorn.Config,
        registry: EngineRegistry,
        settings: ServerConfig,
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(config)
        self._registry = registry
        self._tls = tls
        self._limits = limit_connections(settings)
        self._turns = ReadTurns()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's own, with guarded connections and a deadline for the TLS handshake."""
        assert sockets is not None
        await self.lifespan.startup()
        given = (self._limits, self._turns, self.config, self.server_state, self.lifespan.state)
        connection = partial(GuardedConnection, *given)
        handshake_s = self._limits.header_timeout_s if self._tls is not None else None
        self.servers = [
            await asyncio.get_running_loop().create_server(
                connection, sock=listener, ssl=self._tls, backlog=1024, ssl_handshake_timeout=handshake_s
            )
            for listener in sockets
        ]
        self.started = True
        notify("READY=1")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            notify("STOPPING=1")
            drain_s = self._limits.drain_s
            log.info("draining: up to %.0f s for %d requests", drain_s, len(self._registry.requests))
            self._registry.drain()
            asyncio.get_running_loop().call_later(drain_s, self._registry.end_all)
        # Not uvicorn's own handler: that raises the signal again at the end, which would kill the process
        # before the children are gone, and with another exit code than 0.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


class Listeners(list[socket.socket]):
    """The listening sockets of all addresses."""

    def close(self) -> None:
        for listener in self:
            listener.close()


async def serve(
    registry: EngineRegistry, config: ServerConfig, listeners: Listeners, announce: Callable[[str], None]
) -> None:
    """Load and serve until a signal ends it. Raises the error that keeps a model from loading."""
    keys, tls = KeyRing(config.api_keys, config.api_key), make_tls(config)
    if not keys.closed and not is_loopback(config.host):
        reach = "every client that reaches %s can use this server (--api-keys; see SECURITY.md)"
        log.warning(f"no API key is set: {reach}", config.host)
    loop = asyncio.get_running_loop()
    registry.set_tenants(keys.tenants)
    app = create_app(registry, config, keys, find_folder(config))
    jobs: JobStore = app.state.jobs
    tracer = None
    if config.otlp_endpoint:
        from cllm.server.tracing import Tracer

        tracer = Tracer(config.otlp_endpoint)
        app.add_middleware(tracer.wrap)
    try:
        await asyncio.to_thread(jobs.open)
        await registry.start()
        settings = uvicorn.Config(
            app,
            log_config=None,
            log_level=logging.ERROR,  # its warnings are one line for each mistake of a client
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=int(config.drain_s) + 2,
            timeout_keep_alive=config.keep_alive_s,  # type: ignore[arg-type]
        )
        server = DrainingServer(settings, registry, config, tls)
        # A full collection stops every stream, for 0.15 s on a busy machine; a frozen object is skipped.
        gc.collect()
        gc.freeze()
        loop.add_signal_handler(signal.SIGHUP, keys.reload, registry.set_tenants)
        host, port = listeners[0].getsockname()[:2]
        if ip_address(host).is_unspecified:  # all addresses: say one that can be opened
            host = "::1" if ":" in host else "127.0.0.1"
        scheme = "http" if tls is None else "https"
        announce(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")
        state = app.state
        watching = (registry.unload_idle(), state.live.run(), feed_watchdog(registry))
        beside = [loop.create_task(each) for each in watching]
        if jobs.enabled:
            beside += [loop.create_task(each.run()) for each in (state.background, state.batches)]
        await server.serve(sockets=listeners)
        for task in beside:
            task.cancel()
    finally:
        await loop.run_in_executor(None, registry.stop)
        await loop.run_in_executor(None, jobs.close)
        if tracer is not None:
            await loop.run_in_executor(None, tracer.close)


def bind(config: ServerConfig) -> Listeners:
    """Take the port on every address before anything is loaded. Raises PortInUse."""
    listeners = Listeners()
    try:
        for host in split_list(config.host):
            port = listeners[0].getsockname()[1] if listeners else config.port
            listeners.append(_listen(host, port, config))
    except BaseException:
        listeners.close()
        raise
    if not listeners:
        raise ConfigError("--host names no address")
    return listeners


def _listen(host: str, port: int, config: ServerConfig) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if listener.family is socket.AF_INET6 and host != config.host:  # IPv4 has a listener of its own
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Connections inherit it. The kernel buffers megabytes before a write blocks, but knows the reader.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * config.slow_reader_s))
    try:
        listener.bind((host, port))
        # Two listeners may bind the same port with SO_REUSEADDR until one of them listens.
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} on {host} is in use: stop what listens there or choose --port"
            ) from None
        raise PortInUse(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener
