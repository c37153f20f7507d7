"""The trial process on real llama.cpp: what it measures, and that a setting may kill it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cllm.backend.llama.library import load
from cllm.config import EngineConfig
from cllm.tune.search import TRIAL
from cllm.tune.trial import MIX, Bench, Plan, Trial, TrialProcess, TrialTask

EVERY_CASE = set(MIX)
PLAN = Plan(requests=3, short=16, long=96, steps=2)
LIMIT_S = 60.0
# The real trial, but a setting of poll kills it, or lets it hang: what a wrong instruction would do.
MORTAL = """
import os, signal, sys, time
from cllm.tune import trial
real = trial.Trial.measure
def measure(self, task):
    if task.config.poll == 13:
        os.kill(os.getpid(), signal.SIGILL)
    if task.config.poll == 14:
        time.sleep(60)
    if task.config.poll == 15:
        print("nonsense", flush=True)
    if task.config.poll == 16:
        sys.exit(3)
    return real(self, task)
trial.Trial.measure = measure
sys.exit(trial.main())
"""


def settings(models: dict[str, Path], kind: str = "dense", **fields: Any) -> EngineConfig:
    config = EngineConfig(model=str(models[kind]), parallel=3, threads=1)
    return msgspec.structs.replace(config, **fields)


@pytest.fixture(scope="module")
def trial() -> Iterator[TrialProcess]:
    with TrialProcess(TRIAL) as process:
        yield process


@pytest.mark.parametrize("kind", ["dense", "sliding", "recurrent"])
@pytest.mark.parametrize("unified", [False, True])
def test_every_case_is_timed(trial: TrialProcess, models: dict[str, Path], kind: str, unified: bool) -> None:
    measured = trial.ask(settings(models, kind, unified_kv=unified), PLAN, LIMIT_S)
    assert measured.problem == ""
    assert set(measured.seconds) == EVERY_CASE and all(value > 0 for value in measured.seconds.values())
    assert measured.took_s > 0 and measured.perplexity is None


@pytest.mark.parametrize(
    "fields",
    [
        {"flash_attention": False},
        {"batch_tokens": 64},
        {"poll": 0},
        {"extra_buffers": False},
        {"cache_type_k": "bf16"},
        {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
    ],
    ids=str,
)
def test_every_kind_of_setting_is_measured(
    trial: TrialProcess, models: dict[str, Path], fields: dict[str, Any]
) -> None:
    measured = trial.ask(settings(models, **fields), PLAN, LIMIT_S)
    assert measured.problem == "" and set(measured.seconds) == EVERY_CASE


def test_the_model_is_loaded_once_unless_the_setting_needs_it(models: dict[str, Path]) -> None:
    with TrialProcess(TRIAL) as trial:
        loads = [
            trial.ask(settings(models, **fields), PLAN, LIMIT_S).load_s
            for fields in ({}, {"poll": 0}, {"extra_buffers": False}, {"extra_buffers": False, "poll": 0})
        ]
    assert [load_s > 0 for load_s in loads] == [True, False, True, False]


def test_one_stream_and_short_contexts_alone(trial: TrialProcess, models: dict[str, Path]) -> None:
    one = trial.ask(settings(models), Plan(requests=1, short=16, long=64, steps=1), LIMIT_S)
    assert set(one.seconds) == {"prefill", "one_short", "one_long"}
    short = trial.ask(settings(models), Plan(requests=2, short=16, long=0, steps=1), LIMIT_S)
    assert set(short.seconds) == {"prefill", "one_short", "all_short"}


def test_perplexity_distinguishes_cache_types(trial: TrialProcess, models: dict[str, Path]) -> None:
    plan = Plan(requests=1, perplexity_tokens=300)
    found = {
        types: trial.ask(settings(models, cache_type_k=types, cache_type_v=types), plan, LIMIT_S).perplexity
        for types in ("f32", "f16", "q4_0")
    }
    exact, half, coarse = found["f32"], found["f16"], found["q4_0"]
    assert exact is not None and half is not None and coarse is not None
    assert exact > 2, "random weights know nothing"
    assert abs(half / exact - 1) < 0.001 < abs(coarse / exact - 1)
    # With flash attention chunks round differently: on ARM by 0.0011, on x86 without AVX by 0.0010.
    chunked = trial.ask(
        settings(models, batch_tokens=32, cache_type_k="f32", cache_type_v="f32"), plan, LIMIT_S
    )
    assert chunked.perplexity == pytest.approx(exact, rel=3e-3)


def test_perplexity_does_not_depend_on_the_chunks(trial: TrialProcess, models: dict[str, Path]) -> None:
    """Without flash attention and in f32, where nothing rounds differently by the size of a batch."""
    plan = Plan(requests=1, perplexity_tokens=300)
    exact: dict[str, Any] = {"flash_attention": False, "cache_type_k": "f32", "cache_type_v": "f32"}
    whole, chunked = (
        trial.ask(settings(models, batch_tokens=size, **exact), plan, LIMIT_S).perplexity
        for size in (512, 32)
    )
    assert whole is not None and chunked == pytest.approx(whole, rel=1e-4)


def test_an_impossible_setting_is_an_answer(trial: TrialProcess, models: dict[str, Path]) -> None:
    measured = trial.ask(settings(models, cache_type_v="q8_0", flash_attention=False), PLAN, LIMIT_S)
    assert "q8_0" in measured.problem and not measured.seconds
    assert not trial.ask(settings(models), PLAN, LIMIT_S).problem


@pytest.mark.parametrize(
    ("poll", "said"),
    [(13, "SIGILL"), (14, "more than"), (15, "nonsense|ended|exited"), (16, "code 3")],
)
def test_a_setting_may_kill_the_process_and_the_next_is_measured(
    models: dict[str, Path], poll: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TrialProcess((sys.executable, "-c", MORTAL)) as trial:
        assert not trial.ask(settings(models), PLAN, LIMIT_S).problem
        problem = trial.ask(settings(models, poll=poll), PLAN, 2.0).problem
        assert any(word in problem for word in said.split("|")), problem
        assert set(trial.ask(settings(models), PLAN, LIMIT_S).seconds) == EVERY_CASE


def test_a_model_that_does_not_load_is_an_answer(trial: TrialProcess, tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path / "none.gguf"), threads=1)
    assert "none.gguf" in trial.ask(config, PLAN, LIMIT_S).problem


def test_the_prefix_of_a_long_context_is_computed_once(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[tuple[int, int]] = []
    real = Bench._fill

    def fill(self: Bench, seq_id: int, begin: int, end: int) -> float:
        computed.append((begin, end))
        return real(self, seq_id, begin, end)

    monkeypatch.setattr(Bench, "_fill", fill)
    trial = Trial(load())
    found = []
    for fields in ({}, {"poll": 0}, {"flash_attention": False}, {"unified_kv": True}, {"batch_tokens": 64}):
        computed.clear()
        task = TrialTask(config=settings(models, **fields), plan=PLAN)
        assert set(trial.measure(task).seconds) == EVERY_CASE
        found.append((0, 32) in computed)
        assert {(0, 16), (32, 96)} <= set(computed)
    assert found == [True, False, True, True, False], "states differ by flash attention and layout"
