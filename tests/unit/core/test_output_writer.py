"""Outputs: written while the next step is computed where the device works alone, at once otherwise."""

from __future__ import annotations

import pytest

from cllm.backend.base import Batch, StepResult
from cllm.config import EngineConfig
from cllm.core.engine_core import EngineCore
from cllm.messages import Report, StepReport
from cllm.types import Prompt, Request, SamplingParams
from tests.driver.engine import prepare_at_once
from tests.driver.fake_runner import FakeRunner, expected_text

TOKENS = 5
PROMPT = tuple(b"prompt")


class RecordedRunner(FakeRunner):
    """Notes when it is called."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(sequences=2, cells=256)
        self.events = events

    def submit(self, batch: Batch) -> None:
        self.events.append("submit")
        super().submit(batch)

    def collect(self) -> StepResult:
        self.events.append("collect")
        return super().collect()


def run(asynchronous: bool, **fields: object) -> tuple[list[str], str]:
    events: list[str] = []
    texts: list[str] = []

    def emit(report: Report) -> None:
        assert isinstance(report, StepReport)
        events.append("report")
        texts.extend(output.text for output in report.outputs)
        assert report.stats.steps == 1

    runner = RecordedRunner(events)
    runner.asynchronous = asynchronous
    core = EngineCore(runner, EngineConfig(draft_tokens=0), emit, preparation=prepare_at_once)
    sampling = SamplingParams(ignore_eos=True)
    core.scheduler.add(Request(id="r", prompt=Prompt(PROMPT), max_tokens=TOKENS, sampling=sampling, **fields))  # type: ignore[arg-type]
    while not core.idle:
        core.step()
    return events, "".join(texts)


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_step_is_reported_while_the_device_computes_the_next(stop: tuple[str, ...]) -> None:
    events, text = run(True, stop=stop)
    assert events == ["submit", "collect", *["submit", "report", "collect"] * (TOKENS - 1), "report"]
    assert text == expected_text(PROMPT, TOKENS, ends=False)


def test_a_step_that_blocks_is_reported_before_the_next() -> None:
    events, text = run(False)
    assert events == ["submit", "collect", "report"] * TOKENS
    assert text == expected_text(PROMPT, TOKENS, ends=False)


def test_a_stop_string_ends_an_answer_at_once() -> None:
    whole = expected_text(PROMPT, TOKENS, ends=False)
    events, text = run(True, stop=(whole[2],))
    assert text == whole[: whole.index(whole[2])]
    assert events.count("collect") == whole.index(whole[2]) + 1  # no step too many
