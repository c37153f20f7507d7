"""Engine registry: the models of this server by name, and the rule by which they share its memory.

A model is loaded when a request needs it. Room is made by memory: idle models are unloaded, the least
recently used first; never one with a request. Loads go one after the other, in the order they were asked for.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from cllm import errors
from cllm.config import ModelConfig
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.metrics import render_models
from cllm.frontend.request_queue import RequestState
from cllm.frontend.served_model import Memory, ModelStatus, Phase, ServedModel
from cllm.frontend.tenants import Tenants
from cllm.models.resolve import match_name
from cllm.types import Health, TenantLimits

log = logging.getLogger(__name__)
MAX_WAIT_S = 600.0  # for a model to be loaded, where requests have no time limit
MAX_LISTED = 20  # names in an error
LATEST = ":latest"
LOOK_S = 1.0  # between two looks for models that have been idle too long
CLOSED_S = 10.0  # how long a busy model takes no requests for another that waits for its memory, at first


class ModelLease(msgspec.Struct, eq=False):
    """Keeps a model loaded while an HTTP request needs its engine."""

    model: ServedModel
    engine: EngineClient
    released: asyncio.Event  # set at its end
    held: bool = True

    def release(self) -> None:
        """The request needs it no more. Idempotent."""
        if self.held:
            self.held = False
            self.model.users -= 1
            self.model.used_at = time.monotonic()
            self.released.set()
            log.debug("model %s is released, %d users", self.model.name, self.model.users)


class EngineRegistry:
    """The served models. With one, every plain name is served by it; with several, unknown names are refused.

    All methods but `stop` are called on the event loop's thread.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        limit: Memory | None = None,
        tenants: Tenants | None = None,
        queue_size: int = 1024,
        max_wait_s: float = 0.0,
    ) -> None:
        """Serve models whose engines together take at most `limit` bytes, by device; others have no limit.

        At most `queue_size` requests wait for models, each at most `max_wait_s` (0: `MAX_WAIT_S`).
        """
        self.served = tuple(models)
        self.default = self.served[0]
        self.several = len(models) > 1
        self.limit: dict[str, int] = dict(limit or {})
        first = self.default.engine
        self._tenants = tenants or (first.tenants if first is not None else Tenants())
        self._queue_size = queue_size
        self._max_wait_s = max_wait_s or MAX_WAIT_S
        self._names = {model: list_names(model.config) for model in models}
        self._turn = asyncio.Lock()  # to load
        self._changed = asyncio.Event()  # a request has ended, or waits no more
        self._closing = False

    @classmethod
    def of(cls, engine: EngineClient) -> EngineRegistry:
        """A registry of one engine, which the caller starts and stops."""
        return cls([ServedModel(ModelConfig(name="default"), engine=engine)])

    # What is here ------------------------------------------------------------------------------------

    @property
    def models(self) -> tuple[ModelStatus, ...]:
        """Every served model as it is now. Read only."""
        return tuple(model.describe(default=model is self.default) for model in self.served)

    @property
    def current(self) -> EngineClient:
        """The engine of the default model, loaded or not. Raises EngineNotReady before its first load."""
        if self.default.engine is None:
            raise errors.EngineNotReady(f"{self.default.name} is not loaded yet")
        return self.default.engine

    @property
    def health(self) -> Health:
        """Of the one model. Of several: that of the server, whatever happens to one of them."""
        if not self.several:
            return self.default.health
        return Health.DRAINING if self._closing else Health.READY

    @property
    def requests(self) -> tuple[RequestState, ...]:
        """The requests of all engines."""
        return tuple(state for model in self.served for state in model.requests)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that the loaded models take together, by device, as predicted."""
        return dict(_add(model.memory for model in self.served))

    def find(self, name: str | None) -> ServedModel:
        """The model that serves requests for a name, with or without an adapter's. Raises ModelNotFound."""
        return self.find_adapter(name)[0]

    def find_adapter(self, name: str | None) -> tuple[ServedModel, str]:
        """The model and the name of its adapter that MODEL:ADAPTER stands for; "" for any other name.

        What follows a colon may be a part of the model's own name. Raises ModelNotFound, also for an unknown
        adapter of a model that has some.
        """
        base, colon, adapter = (name or "").rpartition(":")
        if not colon or any(name.lower() in names for names in self._names.values()):  # type: ignore[union-attr]
            return self._find(name), ""
        try:
            model = self._find(base)
        except errors.ModelNotFound:
            return self._find(name), ""
        if adapter in model.adapters:
            return model, adapter
        info = model.info
        own = base.lower() in (*self._names[model], info.name.lower() if info is not None else "")
        if own and model.adapters and colon + adapter != LATEST:
            listed = ", ".join(f"{base}:{each}" for each in model.adapters)
            raise errors.ModelNotFound(f"{base} has no adapter {adapter[:64]!r}; choose one of: {listed}")
        return self._find(name), ""

    def _find(self, name: str | None) -> ServedModel:
        """The model that serves requests for a name: its name, an alias, or a beginning that no other has.

        Raises ModelNotFound. With one model, any name but a path that leads elsewhere is served by it. A name
        may begin with a slash: some servers name a model by its folder, and their clients send that. It may
        end in `:latest`, as Ollama's clients have it.
        """
        if not self.several:
            if name is not None and (".." in name or name.startswith("~") or "\\" in name):
                raise errors.ModelNotFound(
                    "this model does not exist: GET /v1/models lists the models served"
                )
            return self.default
        if not name:
            return self.default
        found = match_name(name, self._names) or match_name(name.removesuffix(LATEST), self._names)
        if len(found) == 1:
            return found[0]
        listed = ", ".join(model.name for model in (found or self.served)[:MAX_LISTED])
        more = " …" if len(found or self.served) > MAX_LISTED else ""
        why = "names several models" if found else "is not served here"
        raise errors.ModelNotFound(f"the model {name[:100]!r} {why}; choose one of: {listed}{more}")

    def add_alias(self, source: str, name: str) -> None:
        """Give the model that `source` names one more name, until the server ends.

        Raises ModelNotFound, also where one model serves every name; InvalidRequest for a name that is taken.
        """
        infos = {model: [model.info.name.lower()] if model.info is not None else [] for model in self.served}
        known = {model: names + infos[model] for model, names in self._names.items()}
        found = match_name(source, known) or match_name(source.removesuffix(LATEST), known)
        if len(found) != 1:
            raise errors.ModelNotFound(
                f"{source[:100]!r} names no model, or several: GET /v1/models lists them"
            )
        if any(name.lower() in names for names in known.values()):
            raise errors.InvalidRequest(f"the name {name!r} is taken: choose another one")
        model = found[0]
        model.config = replace(model.config, aliases=(*model.config.aliases, name))
        self._names[model] = list_names(model.config)

    async def start(self) -> None:
        """Load what is loaded from the start: the one model; of several, the first and those that are kept.

        Raises the error that keeps one of them from loading.
        """
        for model in self.served:
            if model.engine is not None:
                await model.start()
            elif model is self.default or model.config.keep:
                (await self.use(model)).release()

    # Using a model -----------------------------------------------------------------------------------

    async def use(self, model: ServedModel, timeout_s: float | None = None, tenant: str = "") -> ModelLease:
        """Load the model if need be, for a tenant, and keep it loaded until the lease is released.

        Raises ModelDoesNotFit, EngineNotReady (it could not be loaded), QueueFull, DeadlineExceeded.
        """
        if model.open:
            model.users += 1
            model.used_at = time.monotonic()
        else:
            await self._wait_loaded(model, timeout_s, tenant)
        log.debug("model %s is used, %d users", model.name, model.users)
        assert model.engine is not None
        return ModelLease(model, model.engine, self._changed)

    async def _wait_loaded(self, model: ServedModel, timeout_s: float | None, tenant: str) -> None:
        """Wait for a load; the caller is a user of the model then."""
        waiting = [name for each in self.served for name in each.waiters.values()]
        account, held = self._tenants.open(tenant), waiting.count(tenant)
        if self._closing:
            raise errors.ShuttingDown("the server is shutting down and takes no new requests")
        if len(waiting) >= (size := self._queue_size) and self._tenants.has_share(account, held, size):
            raise errors.QueueFull(len(waiting), size, LOOK_S)
        if model.loading is None and model.error is not None and (rest_s := model.rest_s):
            again = f"{model.error.message}; it is tried again in {math.ceil(rest_s)} s"
            refusal = errors.from_code(model.error.code, again)
            if isinstance(refusal, errors.CapacityError):
                refusal.retry_after_s = rest_s
            raise refusal
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model.waiters[waiter] = tenant
        if model.loading is None:
            model.loading = asyncio.create_task(self._load(model))
        limit_s = min(timeout_s or self._max_wait_s, self._max_wait_s)
        try:
            async with asyncio.timeout(limit_s):
                await waiter
        except BaseException as error:
            if waiter in model.waiters:
                del model.waiters[waiter]
            elif waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                model.users -= 1  # it was admitted in the same moment
            self._changed.set()
            if isinstance(error, TimeoutError):
                raise errors.DeadlineExceeded(limit_s, "still waiting for its model to be loaded") from None
            raise

    async def _load(self, model: ServedModel) -> None:
        """Load a model for the requests that wait for it, when it is its turn."""
        error: errors.CllmError | None = None
        try:
            async with self._turn:
                await self._load_now(model)
        except (errors.ModelDoesNotFit, errors.ShuttingDown) as refusal:
            error = refusal
        except errors.CllmError as failure:
            reason = failure.message.removeprefix("the model could not be loaded: ")
            error = errors.EngineNotReady(f"{model.name} could not be loaded: {reason}")
            log.error("model %s could not be loaded: %s", model.name, reason)
        except Exception as failure:
            log.exception("model %s could not be loaded", model.name, exc_info=failure)
            error = errors.EngineError("the model could not be loaded: the server's log has the details")
        finally:
            model.loading = None
            if error is not None:
                model.fail(error)
            elif model.loaded:
                model.admit()
            elif model.waiters:  # they came when the load had been given up, or its turn is over
                model.loading = asyncio.create_task(self._load(model))

    async def _load_now(self, model: ServedModel) -> None:
        if model.phase is Phase.UNLOADING:
            await model.unload()  # until it has ended
        if model.loaded or not model.waiters:
            return  # it was to leave and could stay, or they have left
        if not model.can_load:
            raise errors.EngineNotReady("the model is stopped")
        started = time.monotonic()
        try:
            prepared = await model.prepare(self.list_rooms(model))
            if not await self._make_room(model, prepared.memory):
                return
        except errors.NotEnoughMemory as error:
            raise errors.ModelDoesNotFit(f"{model.name} does not fit: {error}") from None
        await model.load(prepared)
        log.info("model %s is loaded (%.1f s)", model.name, time.monotonic() - started)

    # Memory ------------------------------------------------------------------------------------------

    def _others(self, model: ServedModel) -> list[ServedModel]:
        """The other models that may be unloaded: idle ones first, the least recently used first."""
        found = [each for each in self.served if each is not model and each.loaded and not each.config.keep]
        return sorted(found, key=lambda each: (not each.quiet, each.used_at))

    def list_rooms(self, model: ServedModel) -> list[Memory]:
        """Memory left for a model: beside all that are loaded, then with more and more of them unloaded."""
        used = _add(each.memory for each in self.served if each is not model)
        rooms: list[Memory] = []
        for other in [None, *self._others(model)]:
            used.subtract(other.memory if other is not None else {})
            rooms.append({device: max(0, size - used[device]) for device, size in self.limit.items()})
        return rooms if self.limit else []

    def find_in_the_way(self, model: ServedModel, needed: Memory) -> list[ServedModel]:
        """The models that must be unloaded before this one fits. Raises ModelDoesNotFit."""
        used = _add(each.memory for each in self.served if each is not model)
        chosen: list[ServedModel] = []
        for other in [*self._others(model), None]:
            over = [name for name, size in self.limit.items() if used[name] + needed.get(name, 0) > size]
            if not over:
                return chosen
            if other is not None and any(other.memory.get(device) for device in over):
                chosen.append(other)
                used.subtract(other.memory)
        sums = ", ".join(
            f"{device}: needs {needed.get(device, 0) >> 20} MiB, limit {self.limit[device] >> 20} MiB"
            + (f", models that are kept {used[device] >> 20} MiB" if used[device] else "")
            for device in over
        )
        raise errors.ModelDoesNotFit(
            f"{model.name} does not fit ({sums}); give it less context, or raise --models-memory-mb"
        )

    async def _make_room(self, model: ServedModel, needed: Memory) -> bool:
        """Unload others until this one fits; False when no request waits for it, or its turn is over.

        Where only busy models stand in the way, they take no more requests until they are unloaded: else
        requests for this one could wait without end. Those that come in for them wait for their own turn.
        A long answer must not close a model to all others: half of a turn it takes requests again. The next
        turn comes after those of other models that wait. It is twice as long, so that it ends any answer.
        """
        began, closed_s = time.monotonic(), CLOSED_S * 2**model.turns
        try:
            while chosen := self.find_in_the_way(model, needed):
                if not model.waiters:
                    model.turns = 0
                    return False
                if chosen[0].quiet:
                    await self._unload(chosen[0], f"least recently used, for {model.name}")
                    continue
                if (waited_s := time.monotonic() - began) >= 2 * closed_s:
                    model.turns += 1
                    return False
                self._let_leave(chosen if waited_s < closed_s else ())
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()
            return bool(model.waiters)
        finally:
            self._let_leave(())

    def _let_leave(self, chosen: Sequence[ServedModel]) -> None:
        """These models take no more requests, and all others do."""
        for model in self.served:
            if model.phase is (Phase.SERVING if model in chosen else Phase.LEAVING):
                model.move_to(Phase.LEAVING if model in chosen else Phase.SERVING)
            if model.waiters and model.open:
                model.admit()

    async def _unload(self, model: ServedModel, why: str) -> None:
        log.info("model %s is unloaded: %s", model.name, why)
        await model.unload()
        self._changed.set()

    async def unload(self, model: ServedModel) -> None:
        """Unload a model now. Raises ModelBusy while requests need it."""
        if not model.loaded:
            return
        if not model.can_load:
            raise errors.Forbidden("this model could not be loaded again")
        if not model.idle:
            count = max(model.users, len(model.requests)) + len(model.waiters)
            raise errors.ModelBusy(f"{model.name} has {count} requests; try again when they have ended")
        await self._unload(model, "asked for")

    async def unload_idle(self) -> None:
        """Unload every model that was not used for its `ttl`. Runs until it is cancelled."""
        while True:
            limits = [model.ttl_s for model in self.served if model.ttl_s]
            await asyncio.sleep(min([LOOK_S, *(limit_s / 4 for limit_s in limits)]))
            for model in self.served:
                idle = model.loaded and model.idle and model.can_load
                may = model.ttl_s and not (model.config.keep or self._closing)
                if idle and may and time.monotonic() - model.used_at >= model.ttl_s:
                    await self._unload(model, f"idle for {model.ttl_s:.0f} s")

    # The server ----------------------------------------------------------------------------------------

    def cancel(self, request_id: str) -> bool:
        """End a request; False if there is none of this id."""
        found = any(state.request.id == request_id for state in self.requests)
        for engine in [engine for model in self.served for engine in model.engines]:
            engine.cancel(request_id)
        return found

    def set_tenants(self, limits: Mapping[str, TenantLimits]) -> None:
        """The limits of each tenant, over all models."""
        self._tenants.register(limits)

    def count_refusal(self, code: str) -> None:
        """A request was refused before its model was known."""
        self.default.metrics.refused.labels(code).inc()

    def render_metrics(self) -> bytes:
        """The metrics of all models; with several, each has the label `model`."""
        if not self.several:
            return self.default.metrics.render()
        seen = [model for model in self.served if model is self.default or model.engine is not None]
        return render_models({model.name: model.metrics for model in seen})

    def drain(self) -> None:
        """Accept no new requests; accepted ones go on."""
        self._closing = True
        for model in self.served:
            model.drain()

    def end_all(self) -> None:
        """The time to drain is over: every request left ends with an error."""
        for engine in [engine for model in self.served for engine in model.engines]:
            engine.end_all()

    def stop(self) -> None:
        """End all engines, at the same time. From any thread."""
        self._closing = True
        with ThreadPoolExecutor(max(1, sum(bool(model.engines) for model in self.served))) as pool:
            list(pool.map(ServedModel.stop, self.served))


def list_names(config: ModelConfig) -> list[str]:
    """Every name that stands for a model, in lower case."""
    return [name.lower() for name in (config.name, *config.aliases, *config.names)]


def _add(parts: Iterable[Memory]) -> Counter[str]:
    """The sum by device."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return total
