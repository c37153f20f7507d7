"""Engine and tokenizer in processes: an engine that ends itself, starts that fail, what cannot be sent."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cllm.config import EngineConfig
from cllm.errors import EngineNotReady, InvalidRequest
from cllm.messages import Submit, Text, TokenizeTexts
from cllm.types import FinishReason, Health, Prompt, Request, SamplingParams
from cllm.workers.executor import ProcessExecutor, ProcessTokenizer
from cllm.workers.supervisor import Backoff, Supervisor
from tests.driver.fake_runner import expected_text
from tests.driver.server import wait_for
from tests.driver.thread_engine import BlockingEngine, BlockingOutputStream

PATIENCE_S = 60


@pytest.fixture
def tokenizer() -> Iterator[ProcessTokenizer]:
    tokenizer = ProcessTokenizer(EngineConfig(), module="tests.unit.workers.crashing_tokenizer")
    yield tokenizer
    tokenizer.close()


class StartFailure:
    """`Popen` fails as it does where no process is left, while `failing`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing = False
        self.tries = 0
        self._popen = subprocess.Popen
        monkeypatch.setattr(subprocess, "Popen", self)

    def __call__(self, *arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        self.tries += 1
        if self.failing:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return self._popen(*arguments, **options)


def request(name: str) -> Request:
    return Request(id=name, prompt=Prompt(tuple(name.encode())), max_tokens=8)


def test_an_engine_that_ends_itself_is_replaced_and_no_request_fails(tmp_path: Path) -> None:
    """Was: after two failed steps all 40 got an error from the dying engine, and none was replayed."""
    config = EngineConfig(model=str(tmp_path / "mark"), draft_tokens=0)
    engine = BlockingEngine(ProcessExecutor(config, module="tests.unit.workers.failing_engine"))
    engine.start()
    try:
        engine.loaded.result(PATIENCE_S)
        names = [f"request {number}" for number in range(40)]
        streams = [engine.submit(request(name), BlockingOutputStream) for name in names]
        for name, stream in zip(names, streams, strict=True):
            outputs = list(stream)
            assert outputs[-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH), outputs[-1].error
            assert "".join(output.text for output in outputs) == expected_text(name.encode(), 8)
        assert engine.health is Health.READY
    finally:
        engine.stop()


def test_an_engine_that_cannot_be_started_again_is_tried_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: one failed start, and health stayed "restarting" for good."""
    monkeypatch.setattr(Backoff, "MAX_DELAY_S", 0.05)
    starts = StartFailure(monkeypatch)
    config = EngineConfig(model=str(tmp_path / "mark"), draft_tokens=0)
    engine = BlockingEngine(ProcessExecutor(config, module="tests.unit.workers.failing_engine"))
    engine.start()
    try:
        engine.loaded.result(PATIENCE_S)
        starts.failing = True
        stream = engine.submit(request("r0"), BlockingOutputStream)  # it ends itself of this one
        failure = list(stream)[-1].error
        assert failure is not None and failure.code == "engine_not_ready"
        assert "could not be started: Cannot allocate memory" in failure.message
        assert engine.health is Health.FAILED and starts.tries >= Backoff.MAX_IN_A_ROW
        starts.failing = False
        wait_for(lambda: engine.health is Health.READY, PATIENCE_S)
        assert list(engine.submit(request("r1"), BlockingOutputStream))[-1].error is None
    finally:
        engine.stop()


def test_a_tokenizer_that_cannot_be_started_is_tried_until_it_can(
    tokenizer: ProcessTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: one failed start, and every later task waited for ever. No task is to blame for it."""
    starts = StartFailure(monkeypatch)
    starts.failing = True
    tasks = [tokenizer.submit(TokenizeTexts((str(number),))) for number in range(3)]
    wait_for(lambda: starts.tries >= 2, PATIENCE_S)
    starts.failing = False
    assert [task.result(PATIENCE_S) for task in tasks] == [Text("0"), Text("1"), Text("2")]


def test_tasks_are_refused_once_a_tokenizer_could_not_be_started_several_times(
    tokenizer: ProcessTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "MAX_DELAY_S", 0.01)
    starts = StartFailure(monkeypatch)
    starts.failing = True
    for _ in range(2):
        error = tokenizer.submit(TokenizeTexts(("x",))).exception(PATIENCE_S)
        assert isinstance(error, EngineNotReady) and "could not be started" in error.message
    starts.failing = False
    assert tokenizer.submit(TokenizeTexts(("y",))).result(PATIENCE_S) == Text("y")


def test_tasks_of_a_tokenizer_that_does_not_read_are_replayed(
    tokenizer: ProcessTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervisor, "SILENCE_LIMIT_S", 0.5)
    pid = tokenizer.submit(TokenizeTexts(("who",))).result(PATIENCE_S)
    assert isinstance(pid, Text)
    os.kill(int(pid.text), signal.SIGSTOP)
    large = "x" * (1 << 20)
    tasks = [tokenizer.submit(TokenizeTexts((large,))) for _ in range(6)]
    assert {task.result(PATIENCE_S) for task in tasks} == {Text(large)}


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"seed": 1 << 64}, "64 bits"),
        ({"stop": ("\ud83d",)}, "surrogate"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_a_request_that_no_message_can_carry_is_refused(value: dict[str, Any], match: str) -> None:
    executor = ProcessExecutor(EngineConfig())
    sampling = SamplingParams(**{name: value.pop(name) for name in ("seed", "temperature") if name in value})
    with pytest.raises(InvalidRequest, match=match):
        executor.send(Submit(Request(id="r", prompt=Prompt((1,)), max_tokens=1, sampling=sampling, **value)))
