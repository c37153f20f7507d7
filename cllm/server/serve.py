"""Run the server: bind first, load, serve, drain, leave nothing behind."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from cllm.config import ServerConfig
from cllm.engine.engine import Engine
from cllm.errors import PortInUse
from cllm.server.app import create_app
from cllm.server.sse import DirectSend

log = logging.getLogger(__name__)


def bind(config: ServerConfig) -> socket.socket:
    """Take the port before anything is loaded. Raises PortInUse."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        # Two listeners may bind the same port with SO_REUSEADDR until one of them listens.
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {config.port} on {config.host} is in use: stop what listens there or choose --port"
            ) from None
        raise PortInUse(f"cannot listen on {config.host}:{config.port}: {error.strerror}") from None
    return listener


class DrainingServer(uvicorn.Server):
    """uvicorn, whose exit signal drains the engine first and ends what is left when the time is up."""

    def __init__(self, config: uvicorn.Config, engine: Engine, drain_s: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_s = drain_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            log.info("draining: up to %.0f s for %d requests", self._drain_s, len(self._engine.tickets))
            self._engine.drain()
            asyncio.get_running_loop().call_later(self._drain_s, self._engine.end_all)
        # Not uvicorn's own handler: that raises the signal again at the end, which would kill the process
        # before the children are gone, and with another exit code than 0.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


async def serve(
    engine: Engine, config: ServerConfig, listener: socket.socket, announce: Callable[[str], None]
) -> None:
    """Load and serve until told to stop. Raises what keeps the model from loading."""
    engine.deliver = asyncio.get_running_loop().call_soon_threadsafe
    engine.start()
    try:
        await asyncio.wrap_future(engine.loaded)
        settings = uvicorn.Config(
            DirectSend(create_app({"default": engine}, config)),
            log_config=None,
            log_level=logging.WARNING,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=int(config.drain_s) + 2,
            h11_max_incomplete_event_size=32 << 10,
        )
        server = DrainingServer(settings, engine, config.drain_s)
        host, port = listener.getsockname()[:2]
        announce(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        await server.serve(sockets=[listener])
    finally:
        await asyncio.get_running_loop().run_in_executor(None, engine.stop)
