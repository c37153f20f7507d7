"""The scheduler, one rule at a time: who is admitted, who is preempted, what is reported."""

from __future__ import annotations

from typing import Any

import pytest

from cllm.backend.base import StepResult, StepStatus
from cllm.errors import IntegrityError
from cllm.messages import Report, StepReport, Wake
from cllm.types import FinishReason, RequestOutput
from tests.driver.engine import StepDriver
from tests.driver.fake_runner import FakeRunner


class Recorder(StepDriver):
    """A driver that keeps every output."""

    def __init__(self, runner: FakeRunner, **options: Any) -> None:
        self.outputs: list[RequestOutput] = []
        super().__init__(runner, **options)

    def _take(self, report: Report) -> None:
        super()._take(report)
        if isinstance(report, StepReport):
            self.outputs += report.outputs

    @property
    def running(self) -> list[str]:
        return [self.scheduler.running[seq_id].id for seq_id in sorted(self.scheduler.running)]

    def step_with(self, status: StepStatus) -> None:
        """A step whose decode ends so."""
        self.fake.fail = lambda _, name: status if name == "collect" else None
        self.step()
        self.fake.fail = None


def test_no_more_run_than_may_run_at_once() -> None:
    driver = Recorder(FakeRunner(sequences=4, parallel=2))
    for number in range(3):
        driver.add(b"prompt %d" % number, 4, ignore_eos=True)
    driver.step()
    assert driver.running == ["r0", "r1"]
    driver.finish()


@pytest.mark.parametrize(("length", "admitted"), [(11, True), (12, False), (13, False)])
def test_a_request_that_would_preempt_another_at_once_waits(length: int, admitted: bool) -> None:
    driver = Recorder(FakeRunner(sequences=2, cells=20, unified=True))
    driver.add(b"a" * 8, 2, ignore_eos=True)
    driver.add(b"b" * length, 2, ignore_eos=True)
    driver.step()
    assert driver.running == (["r0", "r1"] if admitted else ["r0"])
    driver.finish()


def test_a_lone_request_is_admitted_however_large_it_is() -> None:
    driver = Recorder(FakeRunner(sequences=2, cells=20, unified=True))
    driver.add(b"a" * 18, 4, ignore_eos=True)
    driver.step()
    assert driver.running == ["r0"]
    driver.finish()


def test_the_youngest_of_the_lowest_priority_is_preempted_and_waits_until_one_has_left() -> None:
    driver = Recorder(FakeRunner(sequences=3))
    driver.kv_runs_out = True
    for priority in (0, 0, 1):
        driver.add(b"prompt", 6, priority=priority, ignore_eos=True, reuse=False)
    driver.step()
    driver.step_with(StepStatus.NO_ROOM)
    assert driver.running == ["r0", "r2"]
    assert [(one.id, one.preempted) for one in driver.scheduler.waiting] == [("r1", True)]
    driver.step(2)
    assert driver.running == ["r0", "r2"]
    driver.cancel("r2")
    driver.step()
    assert driver.running == ["r0", "r1"]
    driver.finish()
    assert driver.text("r1") == driver.expected("r1")


def test_the_priority_of_a_tenant_preempts_no_other() -> None:
    driver = Recorder(FakeRunner(sequences=3))
    driver.kv_runs_out = True
    for tenant, priority in (("a", 0), ("b", 7), ("b", 100)):
        driver.add(b"prompt", 6, tenant=tenant, priority=priority, ignore_eos=True, reuse=False)
    driver.step()
    driver.step_with(StepStatus.NO_ROOM)
    assert driver.running == ["r0", "r2"]
    driver.finish()


def test_a_lone_request_without_room_ends_with_all_of_its_text() -> None:
    plain = Recorder(FakeRunner(sequences=2))
    plain.add(b"prompt", 3, ignore_eos=True)
    plain.finish()
    text = plain.text("r0")
    for stop in ((), (text[1] + "#",)):
        driver = Recorder(FakeRunner(sequences=2))
        driver.kv_runs_out = True
        driver.add(b"prompt", 9, ignore_eos=True, stop=stop)
        driver.step(2)
        driver.step_with(StepStatus.NO_ROOM)
        assert driver.outcome("r0") is FinishReason.LENGTH and driver.text("r0") == text[:2]


def test_after_a_failed_step_a_recurrent_memory_keeps_nothing() -> None:
    driver = Recorder(FakeRunner(sequences=2, trimmable=False), cache_mb=1)
    driver.add(b"a prompt of some length", 4, ignore_eos=True)
    driver.finish()
    assert driver.prefix_cache.device.entries
    driver.add(b"another", 4, ignore_eos=True)
    driver.step()
    driver.step_with(StepStatus.ABORTED)
    assert not driver.prefix_cache.device.entries
    assert [one.num_computed for one in driver.scheduler.running.values()] == [0]
    driver.finish()


def test_the_first_output_of_an_answer_tells_its_usage_and_later_ones_do_not() -> None:
    driver = Recorder(FakeRunner(sequences=1, batch_tokens=64))
    driver.add(b"prompt", 4, ignore_eos=True)
    driver.finish()
    assert [output.usage_so_far is not None for output in driver.outputs] == [True, False, False, False]
    first = driver.outputs[0].usage_so_far
    assert first is not None and (first.steps, first.decoded_tokens) == (1, 6)


def test_what_a_row_took_to_sample_is_noted() -> None:
    runner = FakeRunner(sequences=1)
    driver = Recorder(runner)
    compute = runner.collect

    def collect() -> StepResult:
        result = compute()
        return result._replace(rows=tuple(row._replace(sample_s=0.25) for row in result.rows))

    runner.collect = collect  # type: ignore[method-assign]
    driver.add(b"prompt", 4, ignore_eos=True)
    driver.step()
    assert driver.scheduler.running[0].sample_s == 0.25
    driver.finish()


def test_requests_are_numbered_and_admitted_as_they_come() -> None:
    driver = Recorder(FakeRunner(sequences=1))
    for number in range(3):
        driver.add(b"prompt %d" % number, 1, ignore_eos=True)
    assert [one.arrival for one in driver.scheduler.waiting] == [1, 2, 3]
    driver.finish()
    ends = [output.request_id for output in driver.outputs if output.finish_reason is not None]
    assert ends == ["r0", "r1", "r2"]


def test_leftovers_are_named_and_cleared() -> None:
    driver = Recorder(FakeRunner(sequences=3), cache_mb=1)
    driver.add(b"a prompt of some length", 1, ignore_eos=True)
    driver.finish()
    driver.fake.memory[0].pop()
    driver.fake.memory[2] = [1, 2, 3]
    left = "22 cells in slot 0 instead of 23, 3 cells in slot 2"
    with pytest.raises(IntegrityError, match=left):
        driver.scheduler.check_idle()
    driver.core.inbox.put(Wake())
    assert driver.core._take_commands() and driver.scheduler.integrity_failures == 2
    assert driver.fake.memory == [[], [], []]
    driver.check_released()
