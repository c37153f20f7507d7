"""Steps: every status of `llama_decode`, and clocks that jump."""

from __future__ import annotations

import ast
import random
import time
from pathlib import Path

import pytest

from cllm.backend.base import Batch, StepResult, StepStatus
from cllm.config import EngineConfig
from cllm.errors import EngineDied
from cllm.messages import Cancel
from cllm.types import FinishReason, Health, Prompt, Request, SamplingParams
from tests.driver.engine import StepDriver, ask, words
from tests.driver.fake_runner import FakeRunner
from tests.driver.kinds import DENSE, Kind, Opened
from tests.driver.runner import feed
from tests.driver.same_text import Reference
from tests.driver.thread_engine import BlockingEngine, BlockingOutputStream, ThreadExecutor
from tests.tiny_models import VOCABULARY

POOLED = Kind("dense", unified=True)
ROOT = Path(__file__).parents[2]


def important(request: Request, priority: int) -> Request:
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    return Request(**{**fields, "priority": priority})


@pytest.mark.failure_mode("kv-full")
def test_no_room_preempts_the_youngest_of_lowest_priority(opened: Opened, reference: Reference) -> None:
    driver = StepDriver(opened(POOLED, sequences=3, cells=256, request_tokens=256))
    endless = {"ignore_eos": True}
    driver.submit(
        ask("old", words(1, 60), 150, **endless),
        ask("minor", words(2, 60), 150, **endless),
        important(ask("young", words(3, 60), 150, **endless), 5),
    )
    while driver.runner.saves == 0:
        driver.step()
    assert tuple(one.id for one in driver.scheduler.waiting) == ("minor",), "the younger one matters more"
    answers = driver.finish()
    for seed, name in enumerate(("old", "minor", "young"), start=1):
        reference.check(POOLED, words(seed, 60), 150, answers[name], endless=True)
        assert answers[name].recomputed == 0


@pytest.mark.failure_mode("kv-full")
def test_a_lone_sequence_that_cannot_fit_ends_with_length(opened: Opened) -> None:
    driver = StepDriver(opened(POOLED, sequences=2, cells=256, request_tokens=256))
    feed(driver.runner, 1, words(9, 236))  # cells that are never freed
    driver.filled.add(1)
    driver.submit(ask("lone", words(2, 12), 100, ignore_eos=True))
    driver.step(30)
    assert not driver.scheduler.live and driver.answers["lone"].finish_reason is FinishReason.LENGTH
    driver.runner.truncate(1, 0)


@pytest.mark.failure_mode("decode-aborted")
def test_an_aborted_step_is_rolled_back_and_the_others_go_on(opened: Opened, reference: Reference) -> None:
    """llama.cpp's own code 2, through the switch that a cancel uses."""
    driver = StepDriver(opened(DENSE, sequences=4))
    lengths = {0: 100, 1: 50, 2: 7, 3: 1}
    driver.submit(*(ask(f"r{seed}", words(seed, length), 6) for seed, length in lengths.items()))
    codes: list[int] = []

    def forward(number: int, batch: Batch) -> StepResult:
        if number in (1, 3):
            driver.core._interrupt.cancelled(None)
        before = [driver.runner.next_position(row.seq_id) for row in batch.rows]
        result = driver.runner.inner.run(batch)
        codes.append(result.code)
        if result.status is StepStatus.ABORTED:
            assert before == [row.position for row in batch.rows] and result.rows == ()
        return result

    driver.runner.fail = forward
    answers = driver.finish()
    assert codes.count(2) >= 1
    for seed, length in lengths.items():
        reference.check(DENSE, words(seed, length), 6, answers[f"r{seed}"])
        assert answers[f"r{seed}"].recomputed == 0


@pytest.mark.failure_mode("decode-refused")
def test_a_bad_batch_is_bisected_and_only_the_culprit_fails(opened: Opened, reference: Reference) -> None:
    """llama.cpp's own code -1: a token that is not in its vocabulary."""
    driver = StepDriver(opened(DENSE, sequences=4))
    driver.submit(*(ask(f"r{seed}", words(seed, 9), 6) for seed in range(3)))
    driver.submit(ask("culprit", [*words(7, 5), VOCABULARY + 1000], 6))
    answers = driver.finish()
    assert answers["culprit"].error_code == "bad_batch"
    for seed in range(3):
        reference.check(DENSE, words(seed, 9), 6, answers[f"r{seed}"])


@pytest.mark.failure_mode("decode-failed")
def test_a_failed_step_is_rolled_back_and_tried_once_more(opened: Opened, reference: Reference) -> None:
    driver = StepDriver(opened(DENSE))

    def fail(number: int, batch: Batch) -> StepResult | None:
        if number not in (2, 5):
            return None
        half = [
            row._replace(tokens=row.tokens[: (len(row.tokens) + 1) // 2], outputs=0) for row in batch.rows
        ]
        driver.runner.inner.run(Batch(tuple(half)))
        return StepResult(StepStatus.FAILED, code=-3)

    driver.runner.fail = fail
    driver.submit(*(ask(f"r{seed}", words(seed, 80), 6) for seed in range(3)))
    answers = driver.finish()
    for seed in range(3):
        reference.check(DENSE, words(seed, 80), 6, answers[f"r{seed}"])


@pytest.mark.failure_mode("decode-failed")
def test_two_failed_steps_in_a_row_end_the_engine(opened: Opened) -> None:
    driver = StepDriver(opened(DENSE))
    driver.runner.fail = lambda number, batch: (
        StepResult(StepStatus.FAILED, code=-3) if number in (2, 3) else None
    )
    driver.submit(*(ask(f"r{seed}", words(seed, 80), 6) for seed in range(3)))
    with pytest.raises(EngineDied, match="two steps in a row"):
        driver.finish()  # the worker ends, and the supervisor starts another: `engine-killed`


@pytest.mark.failure_mode("batch-too-large")
@pytest.mark.parametrize("seed", range(3))
def test_a_batch_over_n_batch_cannot_be_built(opened: Opened, seed: int) -> None:
    source = random.Random(seed)
    driver = StepDriver(opened(DENSE, sequences=8, batch_tokens=32))
    driver.submit(*(ask(f"r{n}", words(n, source.randint(1, 400)), 5) for n in range(24)))
    for number in range(0, 24, 5):
        driver.core.post(Cancel(f"r{number}"))
    assert driver.core._take_commands()
    driver.finish()
    assert max(batch.token_count for batch in driver.runner.batches) == 32


# Clocks ---------------------------------------------------------------------------------------------

WALL_CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}


def wall_clock_lines(path: Path) -> list[str]:
    """The lines of a file that ask for the time of day."""
    text = path.read_text()
    found = [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in WALL_CLOCKS
    ]
    found += [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        and node.module == "time"
        and {alias.name for alias in node.names} & {"time", "time_ns"}
    ]
    return [text.splitlines()[number - 1].strip() for number in found]


@pytest.mark.failure_mode("clock-jumps")
def test_no_timing_reads_the_wall_clock() -> None:
    lines = {
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted((ROOT / "cllm").rglob("*.py"))
        for line in wall_clock_lines(path)
    }
    # Timestamps in answers and files, and dates in prompts, are wall-clock time; nothing is measured or
    # waited for with it.
    stamps = (
        *("created", "completed_at", "used_at", "today", "strftime_now", "loaded_at", "expires", "moment"),
        "_STARTED_AT",
        *("ended_at", "sampled_at", "round(time.time(), "),  # of the rows that a page draws
        *("server/job_store.py", "server/batch_runner.py", "server/batches.py"),  # dates outlive the process
        *("dialects/openai/batches.py", "offset_ns"),  # and of spans
    )
    strangers = {line for line in lines if not any(stamp in line for stamp in stamps)}
    assert strangers == set()


@pytest.mark.failure_mode("clock-jumps")
@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_clock_jumps_fire_nothing(monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    engine = BlockingEngine(
        ThreadExecutor(lambda _: FakeRunner(step_s=0.002), EngineConfig()), queue_size=20, max_timeout_s=600
    )
    engine.start()
    engine.loaded.result(5)
    sampling = SamplingParams(ignore_eos=True)
    streams = [
        engine.submit(
            Request(id=f"r{n}", prompt=Prompt((97, n)), max_tokens=60, sampling=sampling, timeout_s=60.0),
            BlockingOutputStream,
        )
        for n in range(12)
    ]
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + jump_s)
    monkeypatch.setattr(time, "time_ns", lambda: int((now() + jump_s) * 1e9))
    ends = [list(stream)[-1].finish_reason for stream in streams]
    assert ends == [FinishReason.LENGTH] * 12
    assert engine.health is Health.READY
    engine.stop()
