"""Engine registry: names, the rule of memory, and requests that wait for a model."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cllm.config import EngineConfig, ModelConfig, PreparedModel
from cllm.errors import (
    DeadlineExceeded,
    EngineNotReady,
    ModelBusy,
    ModelDoesNotFit,
    ModelFileError,
    ModelNotFound,
    QueueFull,
    ShuttingDown,
)
from cllm.frontend import engine_registry, served_model
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.engine_registry import CLOSED_S, EngineRegistry, ModelLease
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.frontend.served_model import Memory, ModelState, ServedModel
from cllm.frontend.tenants import Tenants
from cllm.messages import Command, Died, Ready
from cllm.types import Health, Prompt, Request, TenantLimits
from cllm.workers.executor import ProcessExecutor, Receive
from tests.driver.fake_runner import FakeRunner
from tests.driver.thread_engine import ThreadTokenizer
from tests.profiles import examples
from tests.unit.frontend.test_request_queue import Clock

SIZES = {"ant": 40, "bee": 50, "cat": 30, "dog": 30, "elk": 120}  # the last one never fits
LIMIT = 100
Result = TypeVar("Result")


class InstantExecutor(ProcessExecutor):
    """An executor whose engine is ready, or has died, as soon as it is started."""

    tokenizer = ThreadTokenizer()

    def __init__(self, failure: str, stopped: Callable[[], None]) -> None:
        runner = FakeRunner(sequences=2)
        self._report = Died("engine_died", failure) if failure else Ready(runner.info, runner.limits)
        self._stopped = stopped
        self.running = False

    def start(self, receive: Receive, delay_s: float = 0.0) -> None:
        self.running = True
        receive(self._report)

    def send(self, command: Command) -> None: ...

    def stop(self) -> None:
        if self.running:
            self.running = False
            self._stopped()


class FakeLoader:
    """Makes engines of known size; notes which ones were started and stopped, in order."""

    def __init__(self) -> None:
        self.stopped: list[str] = []
        self.prepared: list[tuple[str, Sequence[Memory]]] = []
        self.failures: dict[str, str] = {}
        self.on_stop: Callable[[str], None] = lambda name: None
        self.tenants = Tenants()

    def prepare(
        self, model: ModelConfig, *, rooms: Sequence[Memory] = (), **_: EngineConfig | str | None
    ) -> PreparedModel:
        self.prepared.append((model.name, [dict(room) for room in rooms]))
        if self.failures.get(model.name) == "file":
            raise ModelFileError("it is truncated")
        return PreparedModel(config=EngineConfig(alias=model.name), memory={"host": SIZES[model.name]})

    def is_current(self, prepared: PreparedModel) -> bool:
        return True

    def find_file(self, name: str) -> Path:
        raise AssertionError("no adapter is loaded here")

    def make(self, prepared: PreparedModel) -> EngineClient:
        name = prepared.config.alias

        def stopped() -> None:
            self.on_stop(name)
            self.stopped.append(name)

        return EngineClient(InstantExecutor(self.failures.get(name, ""), stopped), tenants=self.tenants)


@pytest.fixture(autouse=True)
def _inline(monkeypatch: pytest.MonkeyPatch) -> None:
    run_inline(monkeypatch.setattr)


def run_inline(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """What goes to a thread is called at once, so that a test knows when nothing happens any more."""

    async def call(function: Callable[..., Result], *arguments: Any, **more: Any) -> Result:
        return function(*arguments, **more)

    set_attribute(served_model.asyncio, "to_thread", call)  # type: ignore[attr-defined]


def make_registry(loader: FakeLoader, names: str = "ant bee cat dog elk", **settings: Any) -> EngineRegistry:
    configs = settings.pop("configs", {})
    models = [ServedModel(configs.get(name, ModelConfig(name=name)), loader) for name in names.split()]
    return EngineRegistry(models, **{"limit": {"host": LIMIT}, "tenants": loader.tenants, **settings})


def loaded_names(registry: EngineRegistry) -> set[str]:
    return {model.name for model in registry.served if model.loaded}


def on_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test on an event loop of its own."""
    return functools.wraps(test)(lambda: asyncio.run(asyncio.wait_for(test(), 20)))


async def use(
    registry: EngineRegistry, name: str, timeout_s: float | None = None, tenant: str = ""
) -> ModelLease:
    return await registry.use(registry.find(name), timeout_s, tenant)


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


# Names -----------------------------------------------------------------------------------------------------


def test_a_name_an_alias_or_a_unique_beginning_finds_a_model() -> None:
    config = ModelConfig(name="Bee-7B", aliases=("small",), names=("hf:insects/bee-gguf:q4_k_m",))
    registry = make_registry(FakeLoader(), "ant bee beetle", configs={"bee": config})
    ant, bee, beetle = registry.served
    for name in ("Bee-7B", "bee-7b", "SMALL", "sma", "hf:insects/bee-gguf:Q4_K_M", "bee-"):
        assert registry.find(name) is bee
    assert registry.find("beet") is beetle
    assert registry.find(None) is ant and registry.find("") is ant
    with pytest.raises(ModelNotFound, match=r"'wasp' is not served here; choose one of: ant, Bee-7B, beetle"):
        registry.find("wasp")
    with pytest.raises(ModelNotFound, match=r"'bee' names several models; choose one of: Bee-7B, beetle"):
        registry.find("bee")


def test_an_adapter_follows_the_name_of_its_model() -> None:
    engine = EngineConfig(adapter=("sql=x.gguf", "8b=y.gguf"))
    configs = {
        "ant": ModelConfig(name="ant", engine=engine),
        "bee": ModelConfig(name="bee", engine=engine, names=("bee:8b",)),
    }
    registry = make_registry(FakeLoader(), "ant bee", configs=configs)
    ant, bee = registry.served
    assert registry.find_adapter("ant:sql") == (ant, "sql") and registry.find("ant:sql") is ant
    assert registry.find_adapter("ant:8b") == (ant, "8b") and registry.find_adapter("bee:8b") == (bee, "")
    assert registry.find_adapter("ant:latest") == (ant, "") and registry.find_adapter(None) == (ant, "")
    with pytest.raises(ModelNotFound, match="ant has no adapter 'other'; choose one of: ant:sql, ant:8b"):
        registry.find("ant:other")
    with pytest.raises(ModelNotFound, match="'wasp:sql' is not served here"):
        registry.find("wasp:sql")


def test_one_model_serves_every_plain_name() -> None:
    registry = make_registry(FakeLoader(), "ant")
    assert registry.find("gpt-4o") is registry.find("/models/x") is registry.default
    for name in ("../x", "~/x", "a\\b"):
        with pytest.raises(ModelNotFound):
            registry.find(name)


# Memory ----------------------------------------------------------------------------------------------------


@on_loop
async def test_room_is_made_by_memory_least_recently_used_first() -> None:
    loader = FakeLoader()
    registry = make_registry(loader)
    for name in ("ant", "bee", "ant"):
        (await use(registry, name)).release()
    assert loaded_names(registry) == {"ant", "bee"} and registry.memory == {"host": 90}
    (await use(registry, "cat")).release()  # 30: the bee goes, though it is the larger one
    assert loader.stopped == ["bee"] and loaded_names(registry) == {"ant", "cat"}
    (await use(registry, "dog")).release()  # 30 more fit
    assert loader.stopped == ["bee"] and registry.memory == {"host": 100}
    assert loader.prepared[-1] == ("dog", [{"host": 30}, {"host": 70}, {"host": 100}])
    (await use(registry, "bee")).release()  # 50: two must go; its settings are known
    assert loader.stopped == ["bee", "ant", "cat"] and len(loader.prepared) == 4


@on_loop
async def test_a_model_that_can_never_fit_is_refused_with_the_sum_and_evicts_nothing() -> None:
    loader = FakeLoader()
    registry = make_registry(loader, configs={"ant": ModelConfig(name="ant", keep=True)})
    await registry.start()
    (await use(registry, "cat")).release()
    with pytest.raises(ModelDoesNotFit, match="needs 0 MiB, limit 0 MiB, models that are kept 0 MiB"):
        await use(registry, "elk")
    assert loader.stopped == [] and registry.find("elk").state is ModelState.FAILED
    assert "does not fit" in registry.models[-1].error
    (await use(registry, "bee")).release()
    assert loader.stopped == ["cat"], "one that is kept stays"


@on_loop
async def test_a_busy_model_is_waited_for_and_takes_no_new_requests_meanwhile() -> None:
    loader = FakeLoader()
    registry = make_registry(loader)
    first, second = await use(registry, "ant"), await use(registry, "bee")
    waiting = asyncio.ensure_future(use(registry, "cat"))
    await settle()
    assert not waiting.done() and registry.find("cat").state is ModelState.LOADING
    late = asyncio.ensure_future(use(registry, "ant"))  # the ant is to leave: this one waits for its turn
    other = await use(registry, "bee")  # the bee is not
    await settle()
    assert not late.done() and loader.stopped == []
    first.release()
    await settle()
    assert waiting.done() and loader.stopped == ["ant"]
    assert first.engine.health is Health.STOPPED and waiting.result().engine.health is Health.READY
    assert not late.done()
    waiting.result().release()
    await settle()
    assert late.done() and loader.stopped == ["ant", "cat"]
    for lease in (second, other, late.result()):
        lease.release()
        lease.release()  # a second time does nothing
    assert all(model.users == 0 for model in registry.served)


@on_loop
async def test_a_long_answer_closes_its_model_for_a_bounded_time() -> None:
    """One client streams on the ant and asks for the bee: others still get the ant, and the cat."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        for module in (engine_registry, served_model):
            patch.setattr(module, "time", clock)
        registry = make_registry(FakeLoader(), limit={"host": 75})

        async def advance(seconds: float) -> None:
            clock.now += seconds
            registry._changed.set()
            await settle()

        long, bee = await use(registry, "ant"), asyncio.ensure_future(use(registry, "bee"))
        for closed_s in (CLOSED_S, 2 * CLOSED_S, 4 * CLOSED_S):
            await settle()
            late = asyncio.ensure_future(use(registry, "ant"))
            await advance(closed_s - 1)
            assert not late.done(), "closed"
            await advance(2)
            assert late.done(), "open again"
            late.result().release()
            await advance(closed_s - 2)
            (await use(registry, "ant")).release()
            await advance(1)
        cat = asyncio.ensure_future(use(registry, "cat"))
        await advance(8 * CLOSED_S)
        assert not cat.done() and not bee.done()
        await advance(8 * CLOSED_S)
        assert cat.done(), "it fits beside the ant, and has the next turn"
        cat.result().release()
        assert not bee.done()
        long.release()
        await settle()
        assert bee.done() and loaded_names(registry) == {"bee"} and not registry.find("bee").turns
        bee.result().release()


@on_loop
async def test_a_tenant_below_its_share_may_wait_for_a_model_beside_many_of_another() -> None:
    registry = make_registry(FakeLoader(), queue_size=2)
    registry.set_tenants({"hog": TenantLimits(), "b": TenantLimits()})
    leases = [await use(registry, "ant"), await use(registry, "bee")]
    waiting = [asyncio.ensure_future(use(registry, "cat", None, "hog")) for _ in range(2)]
    await settle()
    with pytest.raises(QueueFull):
        await use(registry, "dog", None, "hog")
    waiting.append(asyncio.ensure_future(use(registry, "cat", None, "b")))
    await settle()
    with pytest.raises(QueueFull):
        await use(registry, "cat", None, "b")
    for lease in leases:
        lease.release()
    for each in await asyncio.gather(*waiting):
        each.release()


@on_loop
async def test_waiting_is_bounded_and_a_client_that_leaves_frees_the_way() -> None:
    loader = FakeLoader()
    registry = make_registry(loader, queue_size=1)
    leases = [await use(registry, "ant"), await use(registry, "bee")]
    with pytest.raises(DeadlineExceeded, match="still waiting for its model to be loaded"):
        await use(registry, "cat", 0.01)
    waiting = asyncio.ensure_future(use(registry, "cat"))
    await settle()
    with pytest.raises(QueueFull):
        await use(registry, "dog")
    waiting.cancel()
    await asyncio.sleep(0.01)
    leases.append(await use(registry, "ant"))  # not in the way any more
    assert loader.stopped == [] and not registry.find("cat").waiters
    for lease in leases:
        lease.release()
    (await use(registry, "cat")).release()
    assert loader.stopped == ["bee"]


@on_loop
async def test_a_failed_load_is_said_to_all_that_wait_and_tried_again_after_a_while() -> None:
    loader = FakeLoader()
    registry = make_registry(loader)
    loader.failures = {"ant": "no memory", "bee": "file"}
    for name, reason in (("ant", "no memory"), ("bee", "it is truncated")):
        refused = await asyncio.gather(*(use(registry, name) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(each, EngineNotReady) and reason in str(each) for each in refused)
        assert registry.find(name).state is ModelState.FAILED
    assert registry.memory == {} and registry.health is Health.READY
    loader.failures = {}
    ant = registry.find("ant")
    with pytest.raises(EngineNotReady, match="no memory; it is tried again in 5 s") as resting:
        await use(registry, "ant")
    assert resting.value.retry_after_s > 4
    ant.try_again()
    (await use(registry, "ant")).release()
    assert ant.state is ModelState.READY and registry.models[0].error == "" and not ant.rest_s


@on_loop
async def test_each_load_that_fails_again_is_tried_later() -> None:
    loader = FakeLoader()
    registry = make_registry(loader)
    loader.failures, rests = {"ant": "no memory"}, []
    for _ in range(6):
        registry.find("ant").try_again()
        with pytest.raises(EngineNotReady):
            await use(registry, "ant")
        rests.append(round(registry.find("ant").rest_s))
    assert rests == [5, 10, 20, 40, 60, 60]


@on_loop
async def test_idle_models_are_unloaded_after_their_time_and_on_demand() -> None:
    loader = FakeLoader()
    configs = {
        "ant": ModelConfig(name="ant", ttl=0.02),
        "bee": ModelConfig(name="bee", ttl=0.02, keep=True),
        "cat": ModelConfig(name="cat"),
    }
    registry = make_registry(loader, "ant bee cat", configs=configs, limit={})
    watching = asyncio.ensure_future(registry.unload_idle())
    lease = await use(registry, "ant")
    (await use(registry, "bee")).release()
    (await use(registry, "cat")).release()
    await asyncio.sleep(0.1)
    assert loader.stopped == []
    with pytest.raises(ModelBusy, match="ant has 1 requests"):
        await registry.unload(registry.find("ant"))
    assert registry.models[0].expires_at is not None and registry.models[1].expires_at is None
    lease.release()
    while not loader.stopped or registry.find("ant").health is not Health.SLEEPING:
        await asyncio.sleep(0.01)
    assert loader.stopped == ["ant"] and registry.find("ant").health is Health.SLEEPING
    await registry.unload(registry.find("bee"))
    await registry.unload(registry.find("bee"))
    assert loader.stopped == ["ant", "bee"]
    (await use(registry, "ant")).release()
    watching.cancel()


@on_loop
async def test_a_shutdown_ends_what_waits_and_stops_all() -> None:
    loader = FakeLoader()
    registry = make_registry(loader)
    leases = [await use(registry, "ant"), await use(registry, "bee")]
    waiting = asyncio.ensure_future(use(registry, "cat"))
    await settle()
    registry.drain()
    await settle()
    with pytest.raises(ShuttingDown):
        waiting.result()
    with pytest.raises(ShuttingDown):
        await use(registry, "dog")
    registry.stop()
    assert sorted(loader.stopped) == ["ant", "bee"] and len(leases) == 2


@on_loop
async def test_tenants_have_one_account_over_all_models() -> None:
    loader = FakeLoader()
    registry = make_registry(loader)
    ant, bee = await use(registry, "ant"), await use(registry, "bee")
    for number, lease in enumerate((ant, bee)):
        request = Request(id=str(number), prompt=Prompt((1, 2, 3)), max_tokens=4, tenant="ann")
        lease.engine.submit(request, AsyncOutputStream)
    tenant = registry.default.engine.tenants.accounts["ann"]  # type: ignore[union-attr]
    assert tenant.running == 2 and tenant.tokens == 6


@on_loop
async def test_metrics_have_the_model_only_where_there_are_several() -> None:
    registry = make_registry(FakeLoader(), "ant")
    (await use(registry, "any")).release()
    assert b"\ncllm_ready 1.0" in registry.render_metrics()
    registry = make_registry(FakeLoader(), "ant bee cat")
    (await use(registry, "bee")).release()
    text = registry.render_metrics().decode()
    assert 'cllm_ready{model="bee"} 1.0' in text and 'cllm_ready{model="ant"} 0.0' in text
    assert 'model="cat"' not in text and text.count("# TYPE cllm_ready gauge") == 1
    await registry.unload(registry.find("bee"))
    assert 'cllm_ready{model="bee"} 0.0' in registry.render_metrics().decode()


# Any order of uses and releases ----------------------------------------------------------------------------


class RegistryMachine(RuleBasedStateMachine):
    """Requests come, wait, leave and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        patch = self._patch = pytest.MonkeyPatch()
        run_inline(patch.setattr)
        self.loop = asyncio.new_event_loop()
        self.loader = FakeLoader()
        self.loader.on_stop = self.check_eviction
        self.registry = make_registry(self.loader)
        self.pending: list[asyncio.Task[ModelLease]] = []
        self.leases: list[ModelLease] = []
        self.order: list[str] = []  # names by last use
        self.used_at: dict[str, float] = {}  # as of the last `settle`

    def check_eviction(self, name: str) -> None:
        """It has no request, and of all such it was not used for the longest time.

        Models that were used since the last `settle` are left out: the order among them is not known here.
        """
        assert not self.registry.find(name).users, f"{name} has requests"
        quiet = [
            model.name
            for model in map(self.registry.find, self.order)
            if model.loaded and not model.users and model.used_at == self.used_at[model.name]
        ]
        assert name not in quiet or quiet[0] == name, f"{name} was unloaded before {quiet}"

    def settle(self) -> None:
        self.loop.run_until_complete(settle())
        leases: list[ModelLease] = []
        for task in [task for task in self.pending if task.done()]:
            self.pending.remove(task)
            if task.cancelled():
                continue
            if (error := task.exception()) is not None:
                assert isinstance(error, ModelDoesNotFit)
            else:
                leases.append(task.result())
        for lease in sorted(leases, key=lambda lease: lease.model.used_at):
            self.leases.append(lease)
            self.touch(lease.model.name)
        self.used_at = {model.name: model.used_at for model in self.registry.served}

    def touch(self, name: str) -> None:
        self.order = [*(each for each in self.order if each != name), name]

    @rule(name=st.sampled_from(sorted(SIZES)))
    def use(self, name: str) -> None:
        self.pending.append(self.loop.create_task(use(self.registry, name)))
        self.settle()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.touch(lease.model.name)
        self.loop.call_soon(lease.release)
        self.settle()

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.pending[data.draw(st.integers(0, len(self.pending) - 1))].cancel()
        self.settle()

    @rule(name=st.sampled_from(sorted(SIZES)))
    def unload(self, name: str) -> None:
        model = self.registry.find(name)
        self.loader.on_stop = lambda _: None
        try:
            self.loop.run_until_complete(self.registry.unload(model))
        except ModelBusy:
            assert model.users or model.waiters
        finally:
            self.loader.on_stop = self.check_eviction
        self.settle()

    @invariant()
    def memory_is_within_the_limit(self) -> None:
        assert self.registry.memory.get("host", 0) <= LIMIT
        for lease in self.leases:
            assert lease.model.loaded and lease.engine.health is Health.READY
        for model in self.registry.served:
            assert model.users == sum(lease.model is model for lease in self.leases)

    def teardown(self) -> None:
        for _ in range(200):
            while self.leases:
                lease = self.leases.pop()
                self.touch(lease.model.name)
                lease.release()
            self.settle()
            if not self.pending and not self.leases:
                break
        assert not self.pending, "a request waits for ever"
        self.loop.close()
        self._patch.undo()


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=examples(40), deadline=None)
