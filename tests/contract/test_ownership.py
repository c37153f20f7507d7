"""Owned native resources: a finaliser only hands over, and only the owner thread frees."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cllm.backend.base import Batch, Row
from cllm.backend.llama.library import DeferredFrees, Owned, load
from cllm.backend.llama.runner import LlamaRunner
from cllm.backend.llama.sampler import LlamaSampler
from cllm.config import EngineConfig
from cllm.errors import NotEnoughMemory
from cllm.types import SamplingParams
from tests.driver.engine import StepDriver, ask, words
from tests.driver.kinds import DENSE, NATIVE_LAYOUTS, RECURRENT, SLIDING, Kind, Opened, open_runner
from tests.driver.runner import GREEDY, feed, native

DRAWN = SamplingParams(temperature=1.0)


def recorded(free: Callable[[Any], None], freed: list[int]) -> Callable[[Any], None]:
    """A native destructor that also writes down what it frees."""

    def told_and_freed(pointer: Any) -> None:
        freed.append(ctypes.cast(pointer, ctypes.c_void_p).value or 0)
        free(pointer)

    return told_and_freed


def test_a_null_pointer_has_no_owner() -> None:
    with pytest.raises(AssertionError, match="NULL"):
        Owned(None, id, DeferredFrees())


def test_a_forgotten_resource_is_freed_by_the_owner_thread_and_not_before() -> None:
    deferred_frees = DeferredFrees()
    freed_on: list[int] = []
    forgotten = [Owned(7, lambda _: freed_on.append(threading.get_ident()), deferred_frees)]
    thread = threading.Thread(target=forgotten.clear)  # the last reference dies on another thread
    thread.start()
    thread.join(10)
    gc.collect()
    assert freed_on == []
    deferred_frees.free_all()
    assert freed_on == [threading.get_ident()]
    deferred_frees.free_all()
    assert len(freed_on) == 1


def test_a_forgotten_sampler_is_freed_at_the_next_step(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = native(opened(DENSE))
    freed: list[int] = []
    free = runner.api.llama_sampler_free
    monkeypatch.setattr(runner.api, "llama_sampler_free", recorded(free, freed))
    sampler, other = runner.create_sampler(DRAWN), runner.create_sampler(DRAWN)
    del sampler, other
    gc.collect()
    assert runner.deferred_frees.qsize() == 2 and freed == []
    feed(runner, 0, [65])
    assert runner.deferred_frees.empty() and len(freed) == 2


def test_samplers_of_answered_requests_are_freed_at_once(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = native(opened(DENSE))
    freed: list[int] = []
    monkeypatch.setattr(runner.api, "llama_sampler_free", recorded(runner.api.llama_sampler_free, freed))
    driver = StepDriver(runner)
    driver.submit(*(ask(f"r{seed}", words(seed, 9), 5, temperature=1.0) for seed in range(9)))
    driver.step(2)
    driver.scheduler.cancel("r0")
    driver.finish()
    assert len(freed) == 9
    assert runner.deferred_frees.empty()


def test_a_sampler_may_be_closed_twice_but_not_used_again(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    runner = native(opened(DENSE))
    sampler = runner.create_sampler(DRAWN)
    sampler.close()
    sampler.close()
    (result,) = runner.run(Batch((Row(0, 0, (65,), 1, sampler),))).rows
    assert result.error is not None and result.tokens == ()
    assert "no attribute 'pointer'" in caplog.text


@pytest.mark.parametrize("kind", [DENSE, SLIDING, RECURRENT], ids=lambda kind: kind.label)
def test_a_closed_runner_may_be_closed_again_but_not_used(kind: Kind, models: dict[str, Path]) -> None:
    runner = open_runner(models, kind)
    sampler = runner.create_sampler(GREEDY)
    feed(runner, 0, words(0, 10))
    runner.close()
    runner.close()
    with pytest.raises(AttributeError, match="pointer"):
        runner.run(Batch((Row(0, 10, (65,), 1, sampler),)))
    with pytest.raises(AttributeError, match="pointer"):
        runner.save(0)


# Was: both are pointers into what was freed, kept outside of their owner: `next_position` and `tokenize`
# after close read freed memory. (The test does not do it: it asks whether the pointer is still to be had.)
def test_what_lies_inside_a_closed_resource_cannot_be_reached(opened: Opened) -> None:
    runner = native(opened(DENSE))
    assert runner.memory and runner.vocabulary.pointer
    runner.close()
    assert not hasattr(runner, "memory")
    with pytest.raises(AttributeError, match="memory"):
        runner.next_position(0)
    with pytest.raises(AttributeError, match="pointer"):
        _ = runner.vocabulary.pointer


def test_a_runner_frees_each_of_its_own_once_and_users_before_the_used(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = load()
    freed: list[str] = []

    def spy(owner: object, name: str) -> None:
        free = getattr(owner, name)

        def told_and_freed(pointer: Any) -> None:
            freed.append(name)
            free(pointer)

        monkeypatch.setattr(owner, name, told_and_freed)

    spy(library.api, "llama_free")
    spy(library.api, "ggml_threadpool_free")
    spy(library.api, "llama_model_free")
    runner = open_runner(models, DENSE)
    feed(runner, 0, words(0, 10))
    assert freed == []
    runner.close()
    assert freed == ["llama_free", "ggml_threadpool_free", "llama_model_free"]


def test_a_sampler_that_outlives_its_runner_is_freed_without_it(models: dict[str, Path]) -> None:
    runner = open_runner(models, DENSE)
    sampler = runner.create_sampler(DRAWN)
    assert isinstance(sampler, LlamaSampler) and sampler.chain is not None
    freeing = sampler.chain._finalizer
    runner.close()
    assert freeing.alive
    sampler.close()
    assert not freeing.alive


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files_and_threads() -> tuple[int, int]:
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize(
    "kind", [DENSE, Kind("sliding", unified=True), RECURRENT], ids=lambda kind: kind.label
)
def test_runners_come_and_go_without_a_trace(kind: Kind, models: dict[str, Path]) -> None:
    def life() -> None:
        runner = open_runner(models, kind)
        feed(runner, 0, words(0, 100))
        runner.create_sampler(DRAWN).close()
        runner.close()

    for _ in range(6):
        life()
    gc.collect()
    before, kept = resident_mib(), open_files_and_threads()
    for _ in range(20):
        life()
    gc.collect()
    assert resident_mib() - before < 4
    assert open_files_and_threads() == kept


# Was: LlamaRunner.__init__ lost the loaded model when the context could not be made: it stayed on a deferred
# free list that no thread empties.
def test_a_context_that_cannot_be_made_leaves_no_model_behind(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = native(open_runner(models, DENSE))
    api = runner.api
    runner.close()
    freed: list[int] = []
    monkeypatch.setattr(api, "llama_model_free", recorded(api.llama_model_free, freed))
    monkeypatch.setattr(api, "llama_init_from_model", lambda model, params: None)
    with pytest.raises(NotEnoughMemory):
        LlamaRunner(EngineConfig(model=str(models["dense"]), parallel=2, ctx_size=512, threads=1))
    gc.collect()
    assert len(freed) == 1


@pytest.mark.parametrize("kind", NATIVE_LAYOUTS, ids=lambda kind: kind.label)
def test_states_saved_and_restored_a_hundred_times_leave_nothing_behind(kind: Kind, opened: Opened) -> None:
    runner = opened(kind)
    feed(runner, 0, words(0, 200))

    def round_trip(count: int) -> None:
        for _ in range(count):
            state = runner.save(0)
            assert state is not None
            runner.truncate(0, 0)
            assert runner.restore(0, state)

    round_trip(20)
    gc.collect()
    before = resident_mib()
    round_trip(100)
    gc.collect()
    assert resident_mib() - before < 2
