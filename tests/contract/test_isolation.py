"""Isolation: a request that fails, fails alone."""

from __future__ import annotations

import pytest

from cllm.backend.base import Batch, StepResult, StepStatus
from cllm.types import FinishReason
from tests.driver.engine import StepDriver, ask, words
from tests.driver.kinds import DENSE, NATIVE_LAYOUTS, Kind, Opened
from tests.driver.same_text import Reference

native_kinds = pytest.mark.parametrize("kind", NATIVE_LAYOUTS, ids=lambda kind: kind.label)


@native_kinds
@pytest.mark.parametrize("culprit", [0, 2, 4])
def test_a_prompt_that_llama_refuses_fails_alone(
    kind: Kind, culprit: int, opened: Opened, reference: Reference
) -> None:
    driver = StepDriver(opened(kind, sequences=5))
    prompts = {seed: words(seed, 12) for seed in range(5)}
    prompts[culprit] = (*prompts[culprit][:-1], 10_000)  # no such token
    driver.submit(*(ask(f"r{seed}", prompt, 6) for seed, prompt in prompts.items()))
    answers = driver.finish()
    for seed, prompt in prompts.items():
        if seed == culprit:
            assert answers[f"r{seed}"].finish_reason is FinishReason.ERROR
            assert answers[f"r{seed}"].error_code == "bad_batch"
        else:
            reference.check(kind, prompt, 6, answers[f"r{seed}"])


@pytest.mark.parametrize(
    "kind", [Kind("fake", unified=True), Kind("dense", unified=True)], ids=lambda k: k.label
)
def test_a_refused_batch_whose_half_finds_no_room_preempts_one_and_loses_none(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    # The outcome of the first half (the youngest is preempted) may concern a row of the second.
    driver = StepDriver(opened(kind, sequences=4))

    def fail(number: int, batch: Batch) -> StepResult | None:
        statuses = {3: (StepStatus.BAD_BATCH, -1), 4: (StepStatus.NO_ROOM, 1)}
        return StepResult(statuses[number][0], code=statuses[number][1]) if number in statuses else None

    driver.runner.fail = fail
    driver.submit(*(ask(f"r{seed}", words(seed, 12), 8) for seed in range(10, 14)))
    answers = driver.finish()
    for seed in range(10, 14):
        reference.check(kind, words(seed, 12), 8, answers[f"r{seed}"])


@pytest.mark.parametrize("kind", [Kind("fake"), DENSE], ids=lambda k: k.label)
def test_more_logprobs_than_there_are_tokens_are_as_many_as_there_are(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    driver = StepDriver(opened(kind))
    size = driver.runner.vocabulary.size
    driver.submit(
        ask("greedy for logprobs", words(0, 12), 4, logprobs=size + 1), ask("other", words(1, 12), 6)
    )
    answers = driver.finish()
    assert all(len(logprob.top) <= size for logprob in answers["greedy for logprobs"].logprobs)
    reference.check(kind, words(1, 12), 6, answers["other"])


def test_a_sampler_that_raises_fails_its_own_request_and_no_other_sampler_has_moved(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Was: an exception while sampling is taken for a failed step: all members are cut back although the
    # samplers before the culprit's have drawn already, and at the second time the engine ends.
    def refuse(*_: object) -> int:
        raise ValueError("the samplers left no token to choose from")

    def texts(*, with_culprit: bool) -> dict[str, tuple[int, ...]]:
        driver = StepDriver(opened(DENSE))
        seeded = [ask(f"r{n}", words(n, 12), 8, temperature=1.0, seed=n) for n in range(2)]
        driver.submit(*seeded, *[ask("culprit", words(9, 12), 8, temperature=1.0)] * with_culprit)
        driver.step(2)
        if with_culprit:
            monkeypatch.setattr(driver.runner.samplers[-1], "sample", refuse)
        answers = driver.finish()
        assert not with_culprit or answers["culprit"].finish_reason is FinishReason.ERROR
        return {request.id: answers[request.id].tokens for request in seeded}

    assert texts(with_culprit=True) == texts(with_culprit=False)
