"""The prefix cache on every kind of memory: the same texts, and less to compute."""

from __future__ import annotations

import pytest

from cllm.backend.base import Batch, StepResult, StepStatus
from cllm.types import Request
from tests.driver.engine import StepDriver, Tokens, ask, words
from tests.driver.kinds import HYBRIDS, LAYOUTS, Kind, Opened
from tests.driver.same_text import Reference
from tests.tiny_models import TURN_START

every_layout = pytest.mark.parametrize("kind", (*LAYOUTS, *HYBRIDS), ids=lambda kind: kind.label)

SYSTEM = words(77, 150)


def cuttable(kind: Kind) -> bool:
    return kind.model in ("dense", "fake")


def cached(driver: StepDriver, request: Request) -> int:
    """Ask alone; how many tokens were taken over."""
    driver.submit(request)
    driver.finish()
    assert driver.answers[request.id].recomputed == 0
    return driver.answers[request.id].work.cached_tokens


@every_layout
def test_a_prompt_that_comes_again_is_restored_and_says_the_same(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    driver = StepDriver(opened(kind), cache_mb=64)
    assert cached(driver, ask("first", SYSTEM, 12, ignore_eos=True)) == 0
    assert cached(driver, ask("again", SYSTEM, 12, ignore_eos=True)) == 149
    driver.offload()
    assert cached(driver, ask("from RAM", SYSTEM, 12, ignore_eos=True)) == 149
    for name in driver.answers:
        reference.check(kind, SYSTEM, 12, driver.answers[name], endless=True)


@every_layout
def test_a_conversation_computes_what_is_new(kind: Kind, opened: Opened, reference: Reference) -> None:
    driver = StepDriver(opened(kind, sequences=2, cells=2048), cache_mb=64)
    history: Tokens = SYSTEM
    known = 0
    for turn in range(4):
        history += words(turn, 40)
        # Every memory can do this: what was computed is a prefix of the next turn as a whole.
        assert cached(driver, ask(f"turn {turn}", history, 40, ignore_eos=True)) == known
        answer = driver.answers[f"turn {turn}"]
        reference.check(kind, history, 40, answer, endless=True)
        known = len(history) + 39
        history += answer.tokens


@every_layout
@pytest.mark.parametrize("offloaded", [False, True], ids=["in place", "from RAM"])
def test_thoughts_that_are_stripped_from_history_cost_the_last_turn_at_most(
    kind: Kind, offloaded: bool, opened: Opened, reference: Reference
) -> None:
    driver = StepDriver(opened(kind, sequences=2, cells=2048), cache_mb=64)
    history: Tokens = SYSTEM
    unchanged = 0  # up to the answer that is repeated without its thoughts
    for turn in range(4):
        opening = (*history, TURN_START, *words(turn, 40))
        prompt = (*opening, TURN_START, *words(99, 3))
        found = cached(driver, ask(f"turn {turn}", prompt, 90, ignore_eos=True))
        assert len(prompt) - found <= 1.1 * (len(prompt) - unchanged)
        answer = driver.answers[f"turn {turn}"]
        reference.check(kind, prompt, 90, answer, endless=True)
        history, unchanged = (*prompt, *answer.tokens[70:]), len(opening)
        if offloaded:
            driver.offload()


@every_layout
def test_a_load_with_and_without_the_cache_says_the_same(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    driver = StepDriver(opened(kind, sequences=3), cache_mb=64)
    asked: dict[str, tuple[Tokens, int]] = {}
    for number in range(30):
        begin = (SYSTEM, words(78, 90), SYSTEM[:100] + words(79, 60))[number % 3]
        asked[f"r{number}"] = (begin + words(number % 7, number % 40), 4 + number % 9)
        prompt, count = asked[f"r{number}"]
        driver.submit(ask(f"r{number}", prompt, count, ignore_eos=True))
        driver.step(number % 5)
        if number % 11 == 10:
            driver.scheduler.cancel(f"r{number - 1}")
            del asked[f"r{number - 1}"]
    answers = driver.finish()
    for name, (prompt, count) in asked.items():
        reference.check(kind, prompt, count, answers[name], endless=True)
    if cuttable(kind):
        assert sum(answers[name].work.cached_tokens for name in asked) > 1000


@pytest.mark.parametrize(
    "kind", [Kind("fake", unified=True), Kind("dense", unified=True), Kind("sliding", unified=True)]
)
def test_kv_pressure_with_the_cache_on(kind: Kind, opened: Opened, reference: Reference) -> None:
    driver = StepDriver(opened(kind, sequences=4, cells=256, request_tokens=256), cache_mb=64)
    tier = driver.scheduler.prefix_cache.host
    lengths = {1: 70, 2: 40, 3: 64, 4: 90}
    for round_ in range(2):
        names = {f"{round_}.{seed}": words(seed, length) for seed, length in lengths.items()}
        driver.submit(*(ask(name, prompt, 120, ignore_eos=True) for name, prompt in names.items()))
        answers = driver.finish()
        for name, prompt in names.items():
            reference.check(kind, prompt, 120, answers[name], endless=True)
        assert tier.swapped_bytes == 0
        assert tier.cached_bytes > 0


@every_layout
@pytest.mark.parametrize("status", [StepStatus.FAILED, StepStatus.ABORTED, StepStatus.BAD_BATCH])
def test_a_failed_step_leaves_no_wrong_state_behind(
    kind: Kind, status: StepStatus, opened: Opened, reference: Reference
) -> None:
    driver = StepDriver(opened(kind), cache_mb=64)
    codes = {StepStatus.FAILED: -3, StepStatus.ABORTED: 2, StepStatus.BAD_BATCH: -1}

    def fail(number: int, batch: Batch) -> StepResult | None:
        if number not in (1, 5, 9):
            return None
        if status is not StepStatus.BAD_BATCH:
            driver.runner.inner.run(batch)  # what it computed stays in memory
        return StepResult(status, code=codes[status])

    driver.runner.fail = fail
    prompts = {f"r{n}": SYSTEM + words(n, 70) for n in range(2)}
    driver.submit(*(ask(name, prompt, 20, ignore_eos=True) for name, prompt in prompts.items()))
    driver.finish()
    driver.runner.fail = lambda number, batch: None
    driver.submit(*(ask(f"{name} again", prompt, 20, ignore_eos=True) for name, prompt in prompts.items()))
    answers = driver.finish()
    for name, prompt in prompts.items():
        reference.check(kind, prompt, 20, answers[f"{name} again"], endless=True)


@pytest.mark.parametrize("unified", [False, True])
def test_a_restored_prefix_gives_bit_for_bit_the_same_probabilities(unified: bool, opened: Opened) -> None:
    """Computed in the same steps, with the common part once from RAM and once from the model."""
    kind = Kind("dense", unified=unified)
    texts = []
    for cache_mb in (64, 0):
        driver = StepDriver(opened(kind), cache_mb=cache_mb)
        # 64 tokens are a step: the rest of the second prompt begins at the same place either way.
        driver.submit(ask("first", SYSTEM[:128], 1, logprobs=8))
        driver.finish()
        driver.submit(ask("second", SYSTEM[:128] + words(5, 60), 6, logprobs=8))
        answer = driver.finish()["second"]
        assert answer.work.cached_tokens == (128 if cache_mb else 0)
        texts.append((answer.tokens, answer.logprobs))
    assert texts[0] == texts[1]
