"""The disk tier in the engine: a prefix comes back after a restart; what the disk cannot give is computed."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cllm.core.kv_cache.transfer import KVTransfer
from cllm.messages import ClearCache, Stop, UseSlot
from tests.driver.disk import LIMIT_S, PROMPT, DiskGate, Start, check, finish, serve
from tests.driver.engine import StepDriver, Tokens, ask, words
from tests.profiles import examples

OTHER = words(9, 100)


@pytest.fixture(autouse=True)
def computing_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 tokens take 20 s."""
    monkeypatch.setattr(KVTransfer, "DEFAULT_TOKEN_S", 0.1)


def restart(start: Start, *prompts: Tokens, **settings: Any) -> StepDriver:
    """An engine after another one that has answered these prompts, else `PROMPT`."""
    driver = start(**settings)
    for prompt in prompts or (PROMPT,):
        serve(driver, prompt)
    driver.close_disk()
    return start(**settings)


def write_behind(driver: StepDriver) -> None:
    """Be idle until everything is written."""
    disk, candidates = driver.core.disk, driver.prefix_cache.loader.candidates
    deadline = time.monotonic() + LIMIT_S
    while disk.idle(candidates(), LIMIT_S) is not None or disk._write or disk.scanning:
        assert time.monotonic() < deadline
        pending: list[Future[Any]] = [each for each in (disk._slice, disk.scanning) if each is not None]
        wait(pending, LIMIT_S)


@pytest.mark.parametrize("cache_mb", [1, 0])
def test_a_prefix_comes_back_after_a_restart(start: Start, cache_mb: int) -> None:
    """Also where RAM has no room for it."""
    driver = restart(start, cache_mb=cache_mb)
    assert serve(driver) == (199, "disk")
    assert serve(driver) in [(199, "device"), (199, "ram")]
    assert serve(driver, (*PROMPT, *words(2, 50)))[0] == 200 and driver.core.disk.loads == 1
    assert driver.stats[-1].disk_bytes > 0 and sum(stats.disk_loads for stats in driver.stats) == 1


def test_a_state_beyond_a_containers_memory_is_not_read(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = restart(start, cache_mb=0, swap_space_mb=0)
    monkeypatch.setattr("cllm.core.kv_cache.disk_loader.read_available_memory", lambda: 10)
    assert serve(driver)[0] == 0 and driver.core.disk.loads == 0


def test_memory_that_cannot_be_cut_comes_back_by_its_checkpoints(start: Start) -> None:
    driver = restart(start, trimmable=False)
    assert serve(driver, (*PROMPT[:199], 5, 6, 7)) == (199, "disk+checkpoint")


def test_others_run_while_one_waits_for_the_disk(start: Start, gate: DiskGate) -> None:
    driver = restart(start)
    serve(driver, OTHER)
    gate.close()
    waiting, other = driver.add(PROMPT, 8, ignore_eos=True), driver.add(words(8, 20), 8, ignore_eos=True)
    driver.step(12)
    assert driver.answers[other].finish_reason and not driver.answers[waiting].tokens
    assert not driver.core.has_work, "it sleeps until the disk answers"
    gate.open()
    assert finish(driver, waiting) == (199, "disk")


def test_no_more_is_read_at_a_time_than_there_are_free_slots(start: Start, gate: DiskGate) -> None:
    prompts = [words(number, 100) for number in range(6)]
    driver = restart(start, *prompts)
    serve(driver, OTHER)
    gate.close()
    names = [driver.add(prompt, 8, ignore_eos=True) for prompt in prompts]
    driver.step(3)
    waiting = [sequence for sequence in driver.scheduler.waiting if sequence.loading is not None]
    assert len(waiting) == driver.runner.limits.sequences == len(driver.scheduler.waiting) - 2
    gate.open()
    assert finish(driver, names[0]) == (99, "disk")
    assert {driver.usage(name).cached_from for name in names} == {"disk"}


def test_a_disk_that_is_slower_than_computing_is_not_waited_for(
    start: Start, gate: DiskGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = restart(start)
    serve(driver, OTHER)
    gate.close()
    monkeypatch.setattr(KVTransfer, "DEFAULT_TOKEN_S", 0.001)
    began = time.monotonic()
    assert serve(driver) == (0, "") and time.monotonic() - began < 10
    again = driver.add((*PROMPT[:150], *words(3, 50)), 8, ignore_eos=True)
    driver.step()
    assert driver.answers[again].ids, "it does not wait for a disk that hangs"
    driver.finish()


def test_two_with_the_same_prefix_wait_for_one_load(start: Start) -> None:
    driver = restart(start)
    names = [driver.add((*PROMPT, number), 8, ignore_eos=True) for number in (1, 2, 3)]
    finish(driver, names[0])
    assert [driver.usage(name).cached_tokens for name in names] == [200, 200, 200]
    assert driver.core.disk.loads == 1


def test_damage_is_computed(start: Start, tmp_path: Path) -> None:
    driver = start()
    serve(driver)
    driver.close_disk()
    (path,) = tmp_path.glob("kv/*/*.kv")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert serve(start()) == (0, "")


def test_a_cancelled_request_no_longer_waits(start: Start, gate: DiskGate) -> None:
    driver = restart(start)
    serve(driver, OTHER)
    gate.close()
    name = driver.add(PROMPT, 8)
    driver.step()
    driver.cancel(name)
    driver.step()
    assert driver.core.idle and driver.scheduler.loading_s is None


def test_the_loop_writes_behind_while_idle_and_at_its_end(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cllm.core.kv_cache.disk_cache.QUIET_S", 0.05)
    driver = start()
    loop = threading.Thread(target=driver.core.run)
    loop.start()
    try:
        driver.enqueue(ask("one", PROMPT))
        deadline = time.monotonic() + LIMIT_S
        while not list(tmp_path.glob("kv/*/*.kv")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        monkeypatch.setattr("cllm.core.kv_cache.disk_cache.QUIET_S", LIMIT_S)
        driver.enqueue(ask("two", words(2, 200)))
        while not driver.answers["two"].finish_reason:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        driver.core.post(Stop())
        loop.join(LIMIT_S)
    assert not loop.is_alive() and len(list(tmp_path.glob("kv/*/*"))) == 2
    disk_thread = driver.core.disk._disk._thread
    assert disk_thread is not None
    disk_thread.join(LIMIT_S)
    assert not disk_thread.is_alive()


RARE = st.sampled_from(["step", "idle", "crash", "damage", "clear", "save", "restore", "erase"])
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["ask", "restart"]) | RARE, st.integers(0, 1), st.integers(70, 130)),
    min_size=8,
    max_size=30,
)


@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(60)
)
@given(actions=ACTIONS, trimmable=st.booleans(), cache_mb=st.integers(0, 1))
def test_texts_are_right_whatever_happens_to_the_disk(
    tmp_path_factory: pytest.TempPathFactory,
    start: Start,
    actions: list[tuple[str, int, int]],
    trimmable: bool,
    cache_mb: int,
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    options = {"cache_dir": str(folder), "trimmable": trimmable, "cache_mb": cache_mb}
    driver = start(**options)
    for action, number, length in actions:
        if action == "ask":
            tenant = "rare" if length > 120 else ""
            driver.add((*words(number, length), length), 8, tenant=tenant, ignore_eos=True)
        elif action == "step":
            driver.step(number + 1)
        elif action in ("save", "restore", "erase"):
            driver.use_cache(UseSlot(1, action, number, "slot"))  # type: ignore[arg-type]
        elif action == "damage":
            for path in list(folder.glob("kv/*/[!.]*"))[number:]:
                with suppress(FileNotFoundError):  # the disk thread removes one
                    os.truncate(path, length)
        else:
            check(driver)
            if action == "idle":
                write_behind(driver)
            elif action == "clear":
                driver.use_cache(ClearCache(1))
            else:
                if action == "restart":
                    driver.close_disk()
                driver = start(**options)
    check(driver)
    driver.close_disk()
    assert not list(folder.glob("kv/*/.*")), "nothing half-written is left"
