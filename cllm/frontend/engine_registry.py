"""Engine registry: the engine that serves, and those that only finish what they have: a reload under load.

An idle engine may sleep: it is stopped, and started again for the next request.

A request stays with the engine that served when it came in: its tokens are those of that engine's vocabulary.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from cllm.errors import CllmError, EngineNotReady, Forbidden, ReloadFailed, ShuttingDown
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.request_queue import RequestState
from cllm.types import Health, TenantLimits

log = logging.getLogger(__name__)
Load = Callable[[str], EngineClient]  # a model's name or "" → an engine, not started; raises CllmError
GRACE_S = 2.0  # for requests that came in before the change and are still being tokenised
POLL_S = 0.1


class EngineRegistry:
    """The engines of this server: `current` serves new requests, the others finish those they have.

    A handler reads `current` once and keeps that engine to the end of its request.
    """

    def __init__(self, engine: EngineClient, load: Load | None = None, sleep_idle_s: float = 0.0) -> None:
        """After `sleep_idle_s` without a request the model is unloaded until the next one. 0: never."""
        self.current = engine
        self.asleep = False  # `current` has been stopped, and is loaded again when it is needed
        self.sleep_idle_s = sleep_idle_s if load is not None else 0.0
        self._users = 0  # HTTP requests that need the engine
        self._used = time.monotonic()
        self._changing = asyncio.Lock()  # falling asleep or waking up
        self._engines = [engine]  # those that have processes
        self._load = load
        self._tenants: Mapping[str, TenantLimits] = {}
        self._reloading = False
        self._closing = False
        self._retiring: set[asyncio.Task[None]] = set()

    @property
    def health(self) -> Health:
        return Health.SLEEPING if self.asleep else self.current.health

    @property
    def requests(self) -> tuple[RequestState, ...]:
        """The requests of all engines."""
        return tuple(state for engine in self._engines for state in engine.requests)

    def cancel(self, request_id: str) -> bool:
        """End a request; False if there is none of this id."""
        found = any(state.request.id == request_id for state in self.requests)
        for engine in tuple(self._engines):
            engine.cancel(request_id)
        return found

    def set_tenants(self, limits: Mapping[str, TenantLimits]) -> None:
        self._tenants = limits
        for engine in tuple(self._engines):
            engine.set_tenants(limits)

    def drain(self) -> None:
        """Accept no new requests; accepted ones go on."""
        self._closing = True
        for engine in tuple(self._engines):
            engine.drain()

    def end_all(self) -> None:
        """The time to drain is over: every request left ends with an error."""
        for engine in tuple(self._engines):
            engine.end_all()

    def stop(self) -> None:
        self._closing = True
        for engine in tuple(self._engines):
            engine.stop()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While this is open the model does not fall asleep."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self._used = time.monotonic()

    async def sleep_when_idle(self) -> None:
        """Unload the model whenever there was no request for `sleep_idle_s`. Runs until it is cancelled."""
        while self.sleep_idle_s:
            await asyncio.sleep(min(1.0, self.sleep_idle_s / 4))
            used = self._users or self.requests or self._reloading or self.asleep or self._closing
            if not used and time.monotonic() - self._used >= self.sleep_idle_s:
                async with self._changing:
                    self.asleep = True
                    await asyncio.to_thread(self.current.stop)
                log.info("idle for %.0f s: the model is unloaded until the next request", self.sleep_idle_s)

    async def wake(self) -> None:
        """Load the model again if it sleeps. Raises EngineNotReady."""
        if not self.asleep:
            return
        async with self._changing:
            if not self.asleep:
                return  # another request has done it
            assert self._load is not None
            try:
                old, new = self.current, await self._start(await asyncio.to_thread(self._load, ""))
            except CllmError as error:
                raise EngineNotReady(f"the model sleeps and could not be loaded again: {error}") from None
            self.current, self.asleep = new, False
            new.replace(old)
            self._engines.remove(old)
        log.info("the model is loaded again")

    async def reload(self, model: str) -> EngineClient:
        """Load an engine and let it take over; returns it. Raises CllmError: then nothing has changed."""
        if self._load is None:
            raise Forbidden("the model of this server cannot be changed")
        if self._reloading:
            raise ReloadFailed("another model is being loaded already; try again when it serves")
        self._reloading = True
        try:
            new = await self._start(await asyncio.to_thread(self._load, model))
        finally:
            self._reloading = False
        old, self.current = self.current, new
        new.replace(old)
        task = asyncio.create_task(self._retire(old))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
        log.info("a new engine serves; the old one has %d requests to finish", len(old.requests))
        return new

    async def _start(self, new: EngineClient) -> EngineClient:
        """Start an engine and wait until it is ready; nothing is left of one that fails."""
        new.deliver = asyncio.get_running_loop().call_soon_threadsafe
        new.set_tenants(self._tenants)
        self._engines.append(new)
        try:
            if self._closing:
                raise ShuttingDown("the server is shutting down")
            new.start()
            await asyncio.wrap_future(new.loaded)
            if self._closing:
                raise ShuttingDown("the server is shutting down")
        except BaseException as error:
            await asyncio.to_thread(new.stop)
            self._engines.remove(new)
            if isinstance(error, CllmError) and not isinstance(error, ShuttingDown):
                raise ReloadFailed(f"the model could not be loaded: {error}") from None
            raise
        return new

    async def _retire(self, old: EngineClient) -> None:
        """End an engine when its last request has ended."""
        await asyncio.sleep(GRACE_S)
        while old.requests:
            await asyncio.sleep(POLL_S)
        await asyncio.to_thread(old.stop)
        self._engines.remove(old)
        log.info("the old engine has ended")
