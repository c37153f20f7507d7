"""What slots hold is copied to other slots on the device, between two steps; no text shows it."""

from __future__ import annotations

import pytest

from cllm.core.kv_cache.slot_choice import count_runs
from cllm.core.step_cost import StepCost, StepCostModel
from tests.driver.engine import StepDriver, ask, words
from tests.driver.kinds import DENSE, Kind, Opened
from tests.driver.same_text import Reference

DEAR_PASS = StepCost(ubatch=1.0, prefill_token=1e-3, row=0.5, attended=0.0)


@pytest.mark.parametrize(
    "kind", [Kind("fake"), DENSE, Kind("dense", flash=False)], ids=lambda kind: kind.label
)
def test_scattered_conversations_run_side_by_side_and_say_the_same(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    copies = []
    for quick in (False, True):
        cost = StepCostModel(known=DEAR_PASS, frozen=True)
        driver = StepDriver(opened(kind, sequences=6), cache_mb=64, cost=cost)
        driver.scheduler.transfer.MAX_SAVE_COST = 0.0  # what is evicted is lost
        driver.runner.stream_copy_s = 1e-9 if quick else 1e9
        made = 0
        copy = driver.runner.copy

        def counted(source: int, target: int, length: int, copy: object = copy) -> int:
            nonlocal made
            made += 1
            return copy(source, target, length)  # type: ignore[operator, no-any-return]

        driver.runner.copy = counted  # type: ignore[method-assign]
        for number in (4, 0, 5, 2, 1, 3):  # every slot is filled, used in this order
            driver.submit(ask(f"first{number}", words(number, 20 + number), 4, ignore_eos=True))
            driver.finish()
        lengths = {number: 12 + 3 * number for number in range(8)}
        for number, count in lengths.items():  # two are continued, six are new
            prompt = words(number, 20 + number) if number in (2, 5) else words(40 + number, 25)
            driver.submit(ask(f"then{number}", prompt, count, ignore_eos=True))
            driver.step(3)
            assert not quick or count_runs(driver.scheduler.running) <= 2
        answers = driver.finish()
        for number, count in lengths.items():
            prompt = words(number, 20 + number) if number in (2, 5) else words(40 + number, 25)
            reference.check(kind, prompt, count, answers[f"then{number}"], endless=True)
        copies.append(made)
    assert copies[0] == 0 and copies[1] > 3


@pytest.mark.parametrize("kind", [Kind("fake"), DENSE], ids=lambda kind: kind.label)
def test_a_state_in_ram_comes_back_beside_running_ones(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    # A slot that is being copied takes no state: what restores one is not moved first.
    cost = StepCostModel(known=DEAR_PASS, frozen=True)
    driver = StepDriver(opened(kind, sequences=4), cache_mb=64, cost=cost)
    driver.runner.stream_copy_s = 1e-9
    for number in range(7):
        driver.submit(ask(f"first{number}", words(number, 150), 4, ignore_eos=True))
        driver.finish()
    assert len(driver.host_cache.entries) >= 2
    driver.submit(ask("running", words(50, 70), 60, ignore_eos=True))
    driver.step(4)
    driver.submit(ask("again", words(0, 150), 8, ignore_eos=True))
    answers = driver.finish()
    assert driver.usage("again").cached_from == "ram" and driver.usage("again").cached_tokens == 149
    reference.check(kind, words(0, 150), 8, answers["again"], endless=True)
    reference.check(kind, words(50, 70), 60, answers["running"], endless=True)
