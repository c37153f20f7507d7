"""A cancel during prefill ends the step early, by llama.cpp's abort callback; other requests go on."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from cllm.backend.base import Batch, StepResult, StepStatus
from cllm.backend.llama.library import _log_line
from cllm.messages import Cancel, Stop, Submit
from cllm.types import FinishReason
from tests.driver.engine import Answer, StepDriver, ask, words
from tests.driver.kinds import DENSE, LAYOUTS, Kind, Opened
from tests.driver.same_text import Reference

every_kind = pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.label)


MAX_STEPS = 1000


class Watching:
    """A driver that posts cancels while a step runs, and records the status of each step."""

    def __init__(self, driver: StepDriver) -> None:
        self.driver = driver
        self.results: list[StepStatus] = []
        self.leaving: dict[int, str] = {}  # number of the step -> the request that is cancelled while it runs
        driver.runner.fail = self._forward

    def _forward(self, number: int, batch: Batch) -> StepResult:
        if (name := self.leaving.get(number)) is not None:
            self.driver.core.post(Cancel(name))
        result = self.driver.runner.inner.run(batch)
        self.results.append(result.status)
        return result

    def finish(self) -> dict[str, Answer]:
        """Like `StepDriver.finish`, with the inbox read between two steps as the loop does."""
        for _ in range(MAX_STEPS):
            if not self.driver.scheduler.live:
                break
            assert self.driver.core._take_commands()
            self.driver.step()
        return self.driver.finish()


@every_kind
def test_a_cancel_in_mid_prefill_ends_the_step_and_the_others_say_what_they_would_alone(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    driver = StepDriver(opened(kind))
    watching = Watching(driver)
    driver.submit(
        ask("stays", words(1, 40), 12), ask("leaves", words(2, 300), 6), ask("also", words(3, 20), 12)
    )
    watching.leaving = {1: "leaves"}
    answers = watching.finish()
    # Of a recurrent model it would take the states of all slots along.
    assert watching.results[1] is (StepStatus.DONE if kind.recurrent else StepStatus.ABORTED)
    assert watching.results.count(StepStatus.ABORTED) == (not kind.recurrent)
    assert answers["leaves"].finish_reason is FinishReason.CANCELLED
    reference.check(kind, words(1, 40), 12, answers["stays"])
    reference.check(kind, words(3, 20), 12, answers["also"])


@every_kind
def test_a_step_in_which_the_cancelled_request_only_decodes_is_not_ended(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    driver = StepDriver(opened(kind))
    watching = Watching(driver)
    driver.submit(ask("leaves", words(1, 4), 50))
    driver.step(3)
    driver.submit(ask("long", words(2, 200), 6))
    watching.leaving = dict.fromkeys(range(4, 8), "leaves")
    answers = watching.finish()
    assert set(watching.results) == {StepStatus.DONE}
    assert answers["leaves"].finish_reason is FinishReason.CANCELLED
    reference.check(kind, words(2, 200), 6, answers["long"])


def test_an_aborted_step_logs_no_error_of_llama_cpp(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    driver = StepDriver(opened(DENSE))
    watching = Watching(driver)
    driver.submit(ask("stays", words(1, 40), 4), ask("leaves", words(2, 300), 4))
    watching.leaving = {1: "leaves"}
    with caplog.at_level(logging.DEBUG, "llama.cpp"):
        watching.finish()
    assert watching.results[1] is StepStatus.ABORTED
    logged = [record for record in caplog.records if record.name == "llama.cpp"]
    assert any("ret = 2" in record.message for record in logged), "it is still there for debugging"
    assert [record.message for record in logged if record.levelno > logging.DEBUG] == []


@pytest.mark.parametrize(
    "line",
    [
        b"graph_compute: ggml_backend_sched_graph_compute_async failed with error -1\n",
        b"process_ubatch: failed to compute graph, compute status: -2\n",
        b"llama_decode: failed to decode, ret = -3\n",
    ],
)
def test_a_step_that_failed_by_itself_still_logs_its_errors(
    line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "llama.cpp"):
        _log_line(4, line, None)
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_two_steps_in_a_row_are_not_taken_from_the_neighbours(opened: Opened, reference: Reference) -> None:
    driver = StepDriver(opened(DENSE, sequences=4, batch_tokens=256))
    watching = Watching(driver)
    driver.submit(*(ask(f"leaves{n}", words(n, 60), 6) for n in range(3)), ask("stays", words(9, 60), 6))
    watching.leaving = {0: "leaves0", 1: "leaves1", 2: "leaves2"}
    answers = watching.finish()
    # in the second step "leaves1" goes too, but it is let finish; the third is a step of those who generate
    assert watching.results[:2] == [StepStatus.ABORTED, StepStatus.DONE]
    assert watching.results.count(StepStatus.ABORTED) == 1
    reference.check(DENSE, words(9, 60), 6, answers["stays"])


@pytest.mark.parametrize("command", [Cancel("long"), Stop()], ids=["cancel", "stop"])
def test_a_native_decode_is_stopped_while_it_runs(opened: Opened, command: Cancel | Stop) -> None:
    """The flag is raised from another thread, in the middle of one decode of 4000 tokens."""
    driver = StepDriver(opened(DENSE, sequences=1, cells=4096, batch_tokens=4096))
    driver.answers["long"] = Answer()
    entered = threading.Event()
    statuses: list[StepResult] = []

    def forward(number: int, batch: Batch) -> StepResult:
        entered.set()
        statuses.append(driver.runner.inner.run(batch))
        return statuses[-1]

    driver.runner.fail = forward
    loop = threading.Thread(target=driver.core.run)
    loop.start()
    driver.core.post(Submit(ask("long", words(1, 4000), 4)))
    assert entered.wait(30)
    inside = time.process_time() + 0.03  # it has computed; a whole such decode takes a second or so
    while time.process_time() < inside:
        time.sleep(0.002)
    driver.core.post(command)
    driver.core.post(Stop())
    loop.join(30)
    assert not loop.is_alive()
    assert [result.status for result in statuses] == [StepStatus.ABORTED]
    assert statuses[0].code == 2 and statuses[0].compute_s > 0.01
    driver.check_released()
