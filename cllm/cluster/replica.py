"""Replica: an engine of a cluster, as a Ray Serve actor: a supervised engine worker and a port for gateways.

Serve decides where replicas run, replaces them and scales them. Requests do not go through it: gateways
connect to the port, so that they know at once when a replica is gone and choose among them by themselves.
This module does not import Ray; `cllm cluster deploy` makes it a deployment.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec

import cllm
from cllm import messages
from cllm.cluster.directory import Directory
from cllm.cluster.link import Draining, Link, ReplicaAddress, ToReplica
from cllm.cluster.placer import BLOCK_TOKENS, ReplicaReport, ReplicaSpeed, hash_blocks
from cllm.config import EngineConfig
from cllm.errors import ConfigError, EngineDied, EngineNotReady, from_code
from cllm.types import Limits, Request, RequestOutput
from cllm.workers.executor import encode
from cllm.workers.supervisor import WORKER_MODULE, Backoff, Supervisor

log = logging.getLogger(__name__)
LOAD_S = 2.0  # between two loads, and between two entries in the directory
HEARTBEAT_S = 1.0
MEMORY = 0.9  # of a mean, at each new value
MIN_PREFILL_TOKENS = 64  # more than rows, in a step that tells how long a token of a prompt takes


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a replica."""

    name: str  # of the model
    engine: EngineConfig
    module: str = WORKER_MODULE
    version: str = cllm.__version__  # of cllm
    digest: str = ""  # of the model's file
    drain_s: float = 30.0  # for its requests, when it is to end
    log_level: str = "info"


class ReplicaLoad:
    """Load of an engine, for the gateways that place there: requests, speed and cache.

    It follows what goes to the engine and what comes back. Times are given by the caller.
    """

    def __init__(self, *, share_across_tenants: bool = False) -> None:
        self._share = share_across_tenants
        self.slots, self.cells = 1, 0
        self.stats = messages.StepStats()
        self.requests: dict[str, int] = {}  # tokens until the first one comes, by request
        # By request: when it came, its tenant, and its tokens if it leaves blocks.
        self._running: dict[str, tuple[float, str, list[int]]] = {}
        self._blocks: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._changed = True  # since the blocks were reported
        self._prefill_token_s = 0.0  # not measured yet
        self._slot_s = 0.0

    @property
    def waiting(self) -> int:
        """Requests beyond its slots."""
        return max(0, len(self.requests) - self.slots)

    def reset(self, limits: Limits) -> None:
        """Follow a new engine, which has no request and no cache."""
        self.slots, self.cells = limits.max_running, limits.cells
        self.stats = messages.StepStats()
        self.requests.clear()
        self._running.clear()
        self.forget_blocks()

    def forget_blocks(self) -> None:
        self._blocks.clear()
        self._changed = True

    def submitted(self, request: Request, now: float) -> None:
        tokens = [*request.prompt.keyed([*request.prompt.items, *request.generated_prefix])]
        tenant = request.prompt.key("" if self._share else request.tenant)
        count, hit = max(1, len(tokens) or request.input_tokens), 0
        if request.reuse and tokens:
            blocks = hash_blocks(tokens, tenant)
            hit = next((i for i, block in enumerate(blocks) if block not in self._blocks), len(blocks))
            self._touch(blocks)
        self.requests[request.id] = max(1, count - hit * BLOCK_TOKENS)
        self._running[request.id] = now, tenant, tokens if request.reuse else []

    def processed(self, outputs: Sequence[RequestOutput], stats: messages.StepStats, now: float) -> None:
        self.stats = stats
        if stats.tokens >= stats.running + MIN_PREFILL_TOKENS:
            token_s = stats.step_s / stats.tokens
            self._prefill_token_s = _mean(self._prefill_token_s or token_s, token_s)
        for output in outputs:
            name = output.request_id
            if name not in self.requests:
                continue
            self.requests[name] = 0
            began, tenant, tokens = self._running[name]
            if tokens:
                tokens += output.tokens
            if output.finish_reason is not None:
                self._slot_s = _mean(self._slot_s or now - began, now - began)
                del self.requests[name], self._running[name]
                self._touch(hash_blocks([*tokens, 0], tenant))

    def _touch(self, blocks: Sequence[int]) -> None:
        """Mark blocks as used last. There are no more of them than the KV memory has room for."""
        for block in reversed(blocks):  # a prefix outlives what follows it
            if block not in self._blocks:
                self._changed = True
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.cells // BLOCK_TOKENS:
            self._blocks.popitem(last=False)
            self._changed = True

    def report(self, gateways: tuple[str, ...] = (), *, all_blocks: bool = False) -> ReplicaReport:
        """Report to all gateways; the blocks of its cache where they have changed, or with `all_blocks`."""
        blocks = [*self._blocks] if all_blocks or self._changed else None
        self._changed = False
        return ReplicaReport(
            speed=ReplicaSpeed(prefill_token_s=self._prefill_token_s, slot_s=self._slot_s, slots=self.slots),
            requests=dict(self.requests),
            blocks=blocks,
            cells=self.cells,
            cells_used=self.stats.cells_used,
            gateways=gateways,
        )


def _mean(mean: float, value: float) -> float:
    return MEMORY * mean + (1 - MEMORY) * value


class ReplicaServer:
    """The engine of this machine behind a port. All but `start` and `stop` runs in a thread with a loop."""

    START_LIMIT_S = 3600.0  # to load a model

    def __init__(
        self, settings: ReplicaSettings, config: EngineConfig, host: str, directory: Directory
    ) -> None:
        """`config` is ready to be loaded. It listens on `host`, any port."""
        self._settings, self._host, self._directory = settings, host, directory
        self.name = secrets.token_hex(4)
        self._key = secrets.token_bytes(32)
        self.load = ReplicaLoad(share_across_tenants=config.share_prefixes_across_tenants)
        self._supervisor = Supervisor(
            "engine", config, messages.Report, log_level=settings.log_level, module=settings.module
        )
        self._supervisor.SILENCE_LIMIT_S = 5.0  # other replicas can go on with its requests
        self._backoff = Backoff()
        self._loop = asyncio.new_event_loop()
        self._links: dict[Link, str] = {}  # to gateways, by their names
        self._owners: dict[str, Link] = {}  # of requests
        self._calls: dict[int, tuple[Link, int]] = {}  # of gateways, by our own ids
        self._call_id = 0
        self._ready: messages.Ready | None = None
        self._loaded: Future[None] = Future()
        self._draining = self._closed = False
        self._listener: asyncio.Server | None = None
        self.failure: str | None = None  # why it computes nothing, and is not expected to soon

    # From start to stop ------------------------------------------------------------------------------

    def start(self) -> None:
        """Load the model, then listen. Raises what keeps it from that."""
        threading.Thread(target=self._loop.run_forever, name="cllm-replica", daemon=True).start()
        self._start_engine(0.0)
        self._loaded.result(self.START_LIMIT_S)
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(30.0)
        threading.Thread(target=self._enter, name="cllm-directory", daemon=True).start()

    def _start_engine(self, delay_s: float) -> None:
        self._supervisor.start(lambda report: self._post(self._receive, report), delay_s)

    def _post(self, call: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(call, *arguments)

    async def _listen(self) -> None:
        def connection() -> Link:
            return Link(ToReplica, self._key, opened=self._open, received=self._handle, lost=self._close_link)

        self._listener = await self._loop.create_server(connection, self._host, 0)
        self._beating = self._loop.create_task(self._beat())

    @property
    def address(self) -> ReplicaAddress:
        assert self._listener is not None
        return ReplicaAddress(
            replica=self.name,
            host=self._host,
            port=self._listener.sockets[0].getsockname()[1],
            key=self._key,
            version=cllm.__version__,
            digest=self._settings.digest,
        )

    def _enter(self) -> None:
        """Keep the entry in the directory: it is lost with the cluster's memory, or a gateway removes it."""
        while not self._draining:
            try:
                self._directory.put(self._settings.name, self.address)
            except Exception as error:  # tried again
                log.warning("the replica could not be entered in the directory: %s", type(error).__name__)
            time.sleep(LOAD_S)

    def drain(self) -> None:
        """Take nothing new, and wait for what runs. What is left then goes on elsewhere."""
        self._draining = True
        try:
            self._directory.remove(self._settings.name, self.name)
        except Exception as error:
            log.warning("the replica could not be removed from the directory: %s", type(error).__name__)
        self._post(self._send_all, Draining())
        until = time.monotonic() + self._settings.drain_s
        while self._owners and time.monotonic() < until:
            time.sleep(0.05)

    def stop(self) -> None:
        """End the engine and the connections. Idempotent."""
        if not self._closed:
            self._draining = self._closed = True
            self._post(self._end)
            self._supervisor.close()

    def _end(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for link in tuple(self._links):
            link.close()

    # Gateways ----------------------------------------------------------------------------------------

    def _open(self, link: Link, name: str) -> None:
        self._links[link] = name
        log.info("gateway %s is connected", name)
        if self._ready is not None:
            link.send(self._ready)
            self._send_load(all_blocks=True)
        if self._draining:
            link.send(Draining())

    def _close_link(self, link: Link) -> None:
        """Cancel the requests of a gateway that is gone: nothing reads their answers."""
        name = self._links.pop(link, None)
        owned = [request_id for request_id, owner in self._owners.items() if owner is link]
        for request_id in owned:
            self._send(messages.Cancel(request_id))
        if name is not None:
            log.info("gateway %s is gone, %d requests are cancelled", name, len(owned))

    def _handle(self, link: Link, message: object) -> None:
        match message:
            case messages.Submit(request):
                if self._ready is None:  # the gateway hears of it, and moves the request
                    return
                self._owners[request.id] = link
                self.load.submitted(request, time.monotonic())
                self._send(message)
            case messages.Cancel():
                self._send(message)
            case messages.Inspect(call_id) | messages.ClearCache(call_id) if self._ready is not None:
                self._call_id += 1
                self._calls[self._call_id] = link, call_id
                if isinstance(message, messages.ClearCache):
                    self.load.forget_blocks()
                self._send(msgspec.structs.replace(message, call_id=self._call_id))

    def _send(self, command: messages.Command) -> None:
        self._supervisor.send(encode(command))

    def _send_all(self, message: msgspec.Struct) -> None:
        for link in self._links:
            link.send(message)

    def _send_load(self, *, all_blocks: bool = False) -> None:
        gateways = tuple(name for name in self._links.values() if not name.startswith("-"))
        self._send_all(self.load.report(gateways, all_blocks=all_blocks))

    async def _beat(self) -> None:
        """Send each gateway a heartbeat every second, and the load every other second."""
        while not self._closed:
            for _ in range(int(LOAD_S / HEARTBEAT_S)):
                await asyncio.sleep(HEARTBEAT_S)
                self._send_all(messages.Heartbeat(0.0))
            if self._ready is not None:
                self._send_load()

    # The engine --------------------------------------------------------------------------------------

    def _receive(self, report: messages.Report) -> None:
        match report:
            case messages.StepReport():
                self._pass_on(report)
            case messages.Inspection(call_id) | messages.CacheDone(call_id):
                link, theirs = self._calls.pop(call_id)
                link.send(msgspec.structs.replace(report, call_id=theirs))
            case messages.Ready(limits=limits):
                self._ready, self.failure = report, None
                self.load.reset(limits)
                self._backoff.ready()
                if not self._loaded.done():
                    self._loaded.set_result(None)
                self._send_all(report)
                self._send_load(all_blocks=True)
            case messages.Died():
                self._restart(report)
            case messages.LoadProgress():
                pass

    def _pass_on(self, report: messages.StepReport) -> None:
        """Send each gateway the outputs of its own requests; all that have one here hear of the work."""
        self.load.processed(report.outputs, report.stats, time.monotonic())
        for link in set(self._owners.values()):
            own = tuple(each for each in report.outputs if self._owners.get(each.request_id) is link)
            spent = {each: s for each, s in report.spent.items() if self._owners.get(each) is link}
            link.send(messages.StepReport(own, report.stats, spent))
        for output in report.outputs:
            if output.finish_reason is not None:
                self._owners.pop(output.request_id, None)
                self._backoff.progress()

    def _restart(self, died: messages.Died) -> None:
        """Report the end of the engine, whose requests gateways move, and start another one."""
        self._ready = None
        self._owners.clear()
        self._calls.clear()
        if not self._loaded.done():
            self._loaded.set_exception(from_code(died.code, died.message))
            return
        self._send_all(died)
        if self._closed:
            return
        delay_s = self._backoff.next_delay()
        log.error("the engine died: %s; it is started again in %.1f s", died.message, delay_s)
        if self._backoff.exhausted:
            self.failure = f"the engine crashed {self._backoff.count} times in a row: {died.message}"
        self._start_engine(delay_s)


class Replica:
    """The class of a Serve deployment. Serve calls its methods, and `__del__` when it is to end."""

    def __init__(
        self,
        settings: bytes,
        prepare: Callable[[ReplicaSettings], EngineConfig],
        open_directory: Callable[[], tuple[Directory, str]],
    ) -> None:
        """`settings` are a ReplicaSettings; `open_directory` gives the directory and this machine's address.

        Raises what keeps the model from loading; Serve then tries again, and `status` shows it.
        """
        decoded = msgspec.msgpack.decode(settings, type=ReplicaSettings)
        if decoded.version != cllm.__version__:
            raise ConfigError(
                f"this machine has cllm {cllm.__version__}, it was deployed by {decoded.version}: "
                "install the same version on all machines"
            )
        directory, host = open_directory()
        self._server = ReplicaServer(decoded, prepare(decoded), host, directory)
        self._server.start()

    def check_health(self) -> None:
        """Serve replaces a replica that raises here."""
        if self._server.failure is not None:
            raise EngineDied(self._server.failure)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the figures that the autoscaling policy decides by."""
        load = self._server.load
        return {
            "kv_used": load.stats.cells_used / load.cells if load.cells else 0.0,
            "requests": float(len(load.requests)),
            "waiting": float(load.waiting),
            "slots": float(load.slots),
        }

    def __call__(self) -> str:
        """Serve's own way in, which no gateway uses."""
        raise EngineNotReady("requests go to a gateway: `cllm serve --cluster ADDRESS`")

    async def __del__(self) -> None:
        """Serve ends this replica: its requests finish, or go on elsewhere."""
        if (server := getattr(self, "_server", None)) is not None:
            await asyncio.to_thread(server.drain)
            await asyncio.to_thread(server.stop)
