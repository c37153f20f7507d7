"""Served model: one model of the server, from its name to its engine: loaded, unloaded, reloaded.

A request stays with the engine that served when it came in: its tokens are those of that engine's vocabulary.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec

from cllm.adapters import Adapter, parse_adapter
from cllm.config import EngineConfig, ModelConfig, PreparedModel
from cllm.errors import CllmError, Forbidden, ModelDoesNotFit, ReloadFailed, ShuttingDown
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.metrics import EngineMetrics
from cllm.frontend.request_queue import RequestState
from cllm.models.files import parse_file_type
from cllm.types import Health, Limits, ModelInfo

log = logging.getLogger(__name__)
GRACE_S = 2.0  # for requests that came in before a reload and are still being tokenised
POLL_S = 0.1
REST_S, MAX_REST_S = 5.0, 60.0  # after a load that failed, twice as long after each more, up to the last
Memory = Mapping[str, int]  # bytes by device; "host" is the memory of this machine


class ModelState(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"  # the last load failed, or its engine has crashed too often


_STATES = {
    Health.LOADING: ModelState.LOADING,
    Health.FAILED: ModelState.FAILED,
    Health.SLEEPING: ModelState.UNLOADED,
}


class Phase(Enum):
    """Where a model is on its way: UNLOADED → LOADING → SERVING → UNLOADING → UNLOADED.

    A model that serves may be LEAVING, and stay after all, or RELOADING. A load that fails ends in FAILED. A
    server that shuts down is CLOSING its models, loaded or not; that is the end.
    """

    UNLOADED = "unloaded"
    LOADING = "loading"
    FAILED = "failed"
    SERVING = "serving"
    LEAVING = "leaving"  # it takes no more requests: another model needs its memory
    RELOADING = "reloading"  # another engine is loaded beside the one that serves, if one does
    UNLOADING = "unloading"
    CLOSING = "closing"


_REST = (Phase.UNLOADED, Phase.FAILED)  # without an engine, or with a stopped one
_ALLOWED = {
    Phase.UNLOADED: {Phase.LOADING, Phase.RELOADING, Phase.FAILED},
    Phase.FAILED: {Phase.LOADING, Phase.RELOADING, Phase.FAILED},
    Phase.LOADING: {Phase.SERVING, *_REST},
    Phase.SERVING: {Phase.LEAVING, Phase.RELOADING, Phase.UNLOADING},
    Phase.LEAVING: {Phase.SERVING, Phase.UNLOADING},
    Phase.RELOADING: {Phase.SERVING, *_REST},
    Phase.UNLOADING: {Phase.UNLOADED},
    Phase.CLOSING: set[Phase](),
}


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A served model as operators see it. Times are Unix times; null: never, or not before it is loaded."""

    name: str
    state: ModelState
    aliases: tuple[str, ...] = ()
    default: bool = False  # it serves requests that name no model
    keep: bool = False
    ttl_s: float = 0.0
    requests: int = 0  # accepted by its engine, waiting or running
    waiting: int = 0  # until it is loaded
    memory_bytes: dict[str, int] = {}  # predicted, by device; of one that is not loaded: what it will take
    last_used: float | None = None
    loaded_at: float | None = None
    expires_at: float | None = None  # then it is unloaded, unless it is used before
    context: int = 0  # tokens of one request; 0: not known yet
    slots: int = 0
    size_bytes: int = 0
    parameters: int = 0
    architecture: str = ""
    quantization: str = ""
    file: str = ""
    error: str = ""  # why the last load failed


class Loader(Protocol):
    """Checks settings and makes engines. `prepare` is called in a thread."""

    def prepare(
        self,
        model: ModelConfig,
        *,
        serving: EngineConfig | None = None,
        file: str = "",
        rooms: Sequence[Memory] = (),
    ) -> PreparedModel:
        """Settings that are ready to be loaded, within the first of the `rooms` that suffices.

        `file` replaces the model's own. With what is `serving`, its context stays. Raises CllmError.
        """

    def is_current(self, prepared: PreparedModel) -> bool:
        """Return False when a file has changed since it was prepared."""

    def make(self, prepared: PreparedModel) -> EngineClient:
        """An engine, not started."""

    def find_file(self, name: str) -> Path:
        """A file that operators may load. Raises Forbidden."""


async def load_adapters(engine: EngineClient, config: EngineConfig) -> None:
    """Load the adapters that the settings of an engine name. Raises AdapterRefused."""
    engine.adapters.max_bytes = config.adapter_mb << 20
    await engine.adapters.load_all(config.adapter, apply=config.apply_adapters)


class ServedModel:
    """A model by its names. Its last engine stays, stopped, while the model is unloaded."""

    def __init__(
        self,
        config: ModelConfig,
        loader: Loader | None = None,
        *,
        engine: EngineClient | None = None,
        prepared: PreparedModel | None = None,
        info: ModelInfo | None = None,
        created: int = 0,
    ) -> None:
        """With an `engine`, which the caller starts, it is loaded. `info` is what its header says."""
        self.config = config
        self.name = config.name
        self.ttl_s = config.ttl
        self.created = created or int(time.time())
        self.engine = engine
        self.prepared = prepared
        self.error: CllmError | None = None  # of the last load
        self._failures = 0  # of loads, in a row
        self._retry_at = 0.0  # it is not loaded before that
        self.users = 0  # HTTP requests that need the engine
        # HTTP requests that wait until it is loaded, and their tenants.
        self.waiters: dict[asyncio.Future[None], str] = {}
        self.turns = 0  # to load it, in which busy models left no room for it
        self.phase = Phase.UNLOADED if engine is None else Phase.SERVING
        self.loading: asyncio.Task[None] | None = None  # loads it when it is its turn
        self._unloading: asyncio.Task[None] | None = None
        self.used_at = 0.0  # the last time (monotonic); 0: never
        self.loaded_at: float | None = None if engine is None else time.time()
        self.engines: list[EngineClient] = [engine] if engine is not None else []  # those with processes
        self._loader = loader
        self.can_load = loader is not None
        self._info = info
        self._retiring: set[asyncio.Task[None]] = set()

    # What it is --------------------------------------------------------------------------------------

    @property
    def loaded(self) -> bool:
        """Its engine has processes and has been ready."""
        return self.engine in self.engines

    def move_to(self, phase: Phase) -> None:
        """Change the phase, unless the server shuts down. Asserts that the transition exists."""
        if self.phase is not Phase.CLOSING:
            assert phase in _ALLOWED[self.phase], f"{self.name}: {self.phase.value} → {phase.value}"
            self.phase = phase

    @property
    def open(self) -> bool:
        """A request can be taken now."""
        return self.phase in (Phase.SERVING, Phase.RELOADING, Phase.CLOSING) and self.engine in self.engines

    @property
    def quiet(self) -> bool:
        """No request has its engine."""
        return not (self.users or self.phase is Phase.RELOADING or self.requests)

    @property
    def idle(self) -> bool:
        """No request has its engine or waits for it."""
        return self.quiet and not self.waiters

    @property
    def requests(self) -> tuple[RequestState, ...]:
        """The requests of all its engines."""
        return tuple(state for engine in self.engines for state in engine.requests)

    @property
    def health(self) -> Health:
        if self.loaded and self.phase is not Phase.UNLOADING:
            assert self.engine is not None
            return self.engine.health
        if self.loading is not None or self.phase is Phase.LOADING:
            return Health.LOADING
        return Health.FAILED if self.error is not None else Health.SLEEPING

    @property
    def info(self) -> ModelInfo | None:
        """Of its engine; before the first load, what the header says."""
        return self.engine.info if self.engine is not None and self.engine.info is not None else self._info

    @property
    def limits(self) -> Limits | None:
        """Of its engine; None before the first load."""
        return self.engine.limits if self.engine is not None else None

    @cached_property
    def metrics(self) -> EngineMetrics:
        """One account over all its engines."""
        return self.engine.metrics if self.engine is not None else EngineMetrics()

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that its engines take, by device, as predicted."""
        needed = dict(self.prepared.memory) if self.prepared is not None else {}
        if self.engine is not None and needed:  # where most of the weights are
            needed[max(needed, key=needed.__getitem__)] += self.engine.adapters.added_bytes
        return {device: size * len(self.engines) for device, size in needed.items() if self.engines}

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of its LoRA adapters; before the first load, of those that it will have."""
        if self.engine is None:
            return tuple(parse_adapter(text).name for text in self.config.engine.adapter)
        return tuple(adapter.name for adapter in self.engine.adapters.loaded)

    async def load_adapter(self, name: str, file: str, scale: float) -> Adapter:
        """Load an adapter from a file of --model-dir. Raises Forbidden, AdapterRefused, AdapterBusy."""
        if self._loader is None:
            raise Forbidden("the model of this server cannot be changed")
        assert self.engine is not None
        path = self._loader.find_file(file)
        return await self.engine.adapters.add(Adapter(name=name, file=str(path), scale=scale))

    @property
    def state(self) -> ModelState:
        return _STATES.get(self.health, ModelState.READY)

    def describe(self, *, default: bool) -> ModelStatus:
        info, limits = self.info, self.limits
        last_used = time.time() - (time.monotonic() - self.used_at)
        expires = self.ttl_s and self.loaded and not self.config.keep
        return ModelStatus(
            name=self.name if info is None else info.name,
            aliases=self.config.aliases,
            state=self.state,
            default=default,
            keep=self.config.keep,
            ttl_s=self.ttl_s,
            requests=len(self.requests),
            waiting=len(self.waiters),
            memory_bytes=dict(self.prepared.memory) if self.prepared is not None else {},
            last_used=last_used if self.used_at else None,
            loaded_at=self.loaded_at if self.loaded else None,
            expires_at=last_used + self.ttl_s if expires else None,
            context=limits.request_tokens if limits is not None else 0,
            slots=limits.sequences if limits is not None else 0,
            size_bytes=info.size_bytes if info is not None else 0,
            parameters=info.parameters if info is not None else 0,
            architecture=info.architecture if info is not None else "",
            quantization=parse_file_type(info.description).quant if info is not None else "",
            file=info.file if info is not None else "",
            error="" if self.error is None else self.error.message,
        )

    # From load to unload -----------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine that it was made with. Raises the error that keeps it from loading."""
        assert self.engine is not None
        self.engine.start(asyncio.get_running_loop())
        await asyncio.wrap_future(self.engine.loaded)
        if self.prepared is not None:
            await load_adapters(self.engine, self.prepared.config)
        self.used_at = time.monotonic()

    async def prepare(self, rooms: Sequence[Memory] = ()) -> PreparedModel:
        """Settings to load: those of the last time if its files are still the same. Raises CllmError."""
        assert self._loader is not None
        if self.prepared is None or not self._loader.is_current(self.prepared):
            self.prepared = await self._prepare(self._loader, rooms=rooms)
        return self.prepared

    async def _prepare(self, loader: Loader, **options: Any) -> PreparedModel:
        serving = self.prepared.config if self.prepared is not None else None
        return await asyncio.to_thread(loader.prepare, self.config, serving=serving, **options)

    async def load(self, prepared: PreparedModel) -> None:
        """Start an engine and let it serve. Raises CllmError: then nothing has changed."""
        assert self._loader is not None
        with self._changing(Phase.LOADING):
            await self._take_over(self._loader.make(prepared), prepared)
        self._failures = 0

    @contextmanager
    def _changing(self, phase: Phase) -> Iterator[None]:
        """Be in this phase while a new engine takes over; what fails leaves the phase before."""
        before = self.phase
        self.move_to(phase)
        try:
            yield
        except BaseException:
            self.move_to(before)
            raise
        self.move_to(Phase.SERVING)
        self.error, self.loaded_at, self.used_at = None, time.time(), time.monotonic()

    @property
    def rest_s(self) -> float:
        """How long no load is tried since the last one failed: each may take long, and others wait for it."""
        return max(0.0, self._retry_at - time.monotonic())

    def try_again(self) -> None:
        """An operator wants it loaded now."""
        self._retry_at = 0.0

    def fail(self, error: CllmError) -> None:
        """It could not be loaded: requests that wait for it hear why."""
        self.error = error
        if self.phase in _REST:
            self.move_to(Phase.FAILED)
        if self.can_load and not isinstance(error, ModelDoesNotFit | ShuttingDown):  # known at once
            self._failures += 1
            self._retry_at = time.monotonic() + min(MAX_REST_S, REST_S * 2 ** min(self._failures - 1, 8))
        for waiter in self._take_waiters():
            waiter.set_exception(error)

    def admit(self) -> None:
        """It is loaded: requests that wait for it are its users from here on."""
        for waiter in self._take_waiters():
            self.users += 1
            waiter.set_result(None)
        self.used_at = time.monotonic()

    def _take_waiters(self) -> list[asyncio.Future[None]]:
        waiters, self.waiters, self.turns = self.waiters, {}, 0
        return [waiter for waiter in waiters if not waiter.done()]

    async def unload(self) -> None:
        """End its engine; what that has cached goes to disk first. Returns when its memory is free."""
        if self._unloading is None:
            self.move_to(Phase.UNLOADING)
            self._unloading = asyncio.create_task(self._unload())
        await asyncio.shield(self._unloading)

    async def _unload(self) -> None:
        engine = self.engine
        assert engine is not None
        try:
            await asyncio.to_thread(engine.stop)
        finally:
            self.engines.remove(engine)
            self.metrics.crashed()
            self._unloading = None
            self.move_to(Phase.UNLOADED)

    async def reload(self, file: str) -> EngineClient:
        """Load an engine beside the one that serves, then change over. Raises CllmError: all is as before."""
        if self._loader is None:
            raise Forbidden("the model of this server cannot be changed")
        if self.phase not in (Phase.SERVING, *_REST) or self.loading is not None:
            raise ReloadFailed("another model is being loaded already; try again when it serves")
        old = self.engine
        with self._changing(Phase.RELOADING):
            prepared = await self._prepare(self._loader, file=file)
            new = await self._take_over(self._loader.make(prepared), prepared)
        self.prepared = prepared
        if old is not None and old in self.engines:
            task = asyncio.create_task(self._retire(old))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
            log.info("a new engine serves; the old one has %d requests to finish", len(old.requests))
        return new

    async def _take_over(self, new: EngineClient, prepared: PreparedModel) -> EngineClient:
        """Start an engine, wait until it is ready, and serve with it; nothing is left of one that fails."""
        self.engines.append(new)
        try:
            self._check_closing()
            if self.engine is not None:
                new.adapters.take_over(self.engine.adapters)
            new.start(asyncio.get_running_loop())
            await asyncio.wrap_future(new.loaded)
            if self.engine is None:
                await load_adapters(new, prepared.config)
            self._check_closing()
        except BaseException as error:
            await asyncio.to_thread(new.stop)
            self.engines.remove(new)
            if isinstance(error, CllmError) and not isinstance(error, ShuttingDown):
                raise ReloadFailed(f"the model could not be loaded: {error}") from None
            raise
        new.use_metrics(self.metrics)
        self.engine = new
        return new

    def _check_closing(self) -> None:
        if self.phase is Phase.CLOSING:
            raise ShuttingDown("the server is shutting down")

    async def _retire(self, old: EngineClient) -> None:
        """End an engine when its last request has ended."""
        await asyncio.sleep(GRACE_S)
        while old.requests:
            await asyncio.sleep(POLL_S)
        await asyncio.to_thread(old.stop)
        self.engines.remove(old)
        log.info("the old engine has ended")

    # The end -----------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Accept no new requests; accepted ones go on."""
        self.phase = Phase.CLOSING
        for waiter in self._take_waiters():
            waiter.set_exception(ShuttingDown("the server is shutting down"))
        for engine in tuple(self.engines):
            engine.drain()

    def stop(self) -> None:
        self.phase = Phase.CLOSING
        for engine in tuple(self.engines):
            engine.stop()
