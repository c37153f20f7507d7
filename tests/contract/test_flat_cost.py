"""Flat cost: what a request costs does not depend on how many came before."""

from __future__ import annotations

import pytest

from tests.driver.engine import StepDriver, ask, words
from tests.driver.kinds import DENSE, LAYOUTS, Kind, Opened
from tests.driver.same_text import Reference


def test_300_identical_requests_cost_exactly_the_same(opened: Opened, reference: Reference) -> None:
    driver = StepDriver(opened(DENSE))
    prompt = words(1, 20)
    costs = set()
    for number in range(300):
        driver.submit(ask(f"r{number}", prompt, 4))
        driver.finish()
        answer = driver.answers.pop(f"r{number}")
        driver.runner.batches.clear()
        driver.runner.samplers.clear()
        reference.check(DENSE, prompt, 4, answer)
        costs.add(answer.work)
    (cost,) = costs
    assert (cost.prompt_tokens, cost.completion_tokens, cost.cached_tokens) == (20, 4, 0)
    assert cost.decoded_tokens == cost.cells == 23  # the last token is delivered, not computed
    assert cost.steps == cost.ubatches == 4
    pool = driver.scheduler.pool
    assert pool.leased_total == pool.released_total == 300
    assert pool.cleared_cells_total == 6_900


@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.label)
def test_a_load_leaves_nothing_that_a_later_request_pays_for(kind: Kind, opened: Opened) -> None:
    driver = StepDriver(opened(kind))
    driver.submit(ask("before", words(1, 100), 5))
    before = driver.finish()["before"]
    driver.submit(*(ask(f"r{seed}", words(seed, 1 + 11 * seed), 7) for seed in range(20)))
    driver.step(9)
    driver.scheduler.cancel("r3")
    driver.finish()
    driver.submit(ask("after", words(1, 100), 5))
    after = driver.finish()["after"]
    assert after.work == before.work
    assert after.tokens == before.tokens and after.logprobs == before.logprobs, "bit for bit"
