"""Speculative decoding on llama.cpp: the same tokens as without drafts, fewer steps, KV memory right."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec
import pytest

from cllm.backend.base import Batch, Drafter, ModelRunner, Row
from cllm.types import FinishReason, Request
from tests.driver.engine import Answer, StepDriver, Tokens, ask, words
from tests.driver.kinds import NATIVE, Kind, Opened
from tests.driver.runner import GREEDY
from tests.driver.same_text import Reference
from tests.tiny_models import VOCABULARY

DENSE = tuple(kind for kind in NATIVE if kind.model == "dense")
every_dense = pytest.mark.parametrize("kind", DENSE, ids=lambda kind: kind.label)
both_layouts = pytest.mark.parametrize(
    "kind", [Kind("dense"), Kind("dense", unified=True)], ids=lambda kind: kind.label
)
ROLLBACK = (Kind("hybrid-rollback"), Kind("hybrid-delta"))  # their states can be rolled back
every_drafting = pytest.mark.parametrize("kind", (*DENSE, *ROLLBACK), ids=lambda kind: kind.label)
RIGHT, MIXED, WRONG = 0.0, 0.3, 1.0  # how likely a draft token is wrong
any_luck = pytest.mark.parametrize("wrong", [RIGHT, MIXED, WRONG], ids=["right", "mixed", "wrong"])


class Knowing:
    """Knows the texts; some of its draft tokens are wrong."""

    def __init__(self, texts: Sequence[Tokens], wrong: float, source: random.Random) -> None:
        self._texts = texts
        self._wrong = wrong
        self._source = source

    def propose(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        for text in self._texts:
            if text[: len(tokens)] == tuple(tokens):
                return [
                    (token + (self._source.random() < self._wrong)) % VOCABULARY
                    for token in text[len(tokens) : len(tokens) + max_tokens]
                ]
        return []


def knowing(texts: Sequence[Tokens], wrong: float) -> Callable[[], Drafter]:
    source = random.Random(7)
    return lambda: Knowing(texts, wrong, source)


def answered(runner: ModelRunner, requests: Sequence[Request], **options: object) -> dict[str, Answer]:
    """All of them at once; afterwards KV memory is empty, by what llama.cpp says of it."""
    driver = StepDriver(runner, **options)  # type: ignore[arg-type]
    driver.submit(*requests)
    return driver.finish()


@every_drafting
@any_luck
@pytest.mark.parametrize("count", [1, 3])
def test_greedy_text_is_the_text_without_drafts(
    kind: Kind, wrong: float, count: int, opened: Opened, reference: Reference
) -> None:
    prompts = {f"r{seed}": words(seed, 12 + 5 * seed) for seed in range(count)}
    texts = [prompt + reference.alone(kind, prompt, 40, endless=True).tokens for prompt in prompts.values()]
    requests = [ask(name, prompt, 40, ignore_eos=True) for name, prompt in prompts.items()]
    answers = answered(opened(kind), requests, new_drafter=knowing(texts, wrong))
    for name, prompt in prompts.items():
        reference.check(kind, prompt, 40, answers[name], endless=True)
        work = answers[name].work
        assert len(answers[name].logprobs) == 40
        assert work.drafted_tokens > 0 and answers[name].recomputed == 0
        if wrong == WRONG:
            assert work.accepted_tokens == 0
        else:
            assert 0 < work.accepted_tokens <= work.drafted_tokens
    if wrong == RIGHT and count == 1:
        longest = 5 if kind in ROLLBACK else 9
        assert answers["r0"].work.steps <= 12 * 9 / longest, "40 tokens in steps of so many"


@both_layouts
def test_a_text_that_repeats_itself_is_drafted_from_the_prompt(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    """Prompt lookup itself, as shipped: the prompt holds the answer, as in an edit or a quotation."""
    begin = words(3, 20)
    said = reference.alone(kind, begin, 40, endless=True).tokens
    prompt = begin + said + words(4, 3) + begin
    driver = StepDriver(opened(kind))
    driver.submit(ask("r", prompt, 60, ignore_eos=True))
    answer = driver.finish()["r"]
    reference.check(kind, prompt, 60, answer, endless=True)
    assert answer.work.drafted_tokens > 0


@both_layouts
def test_the_same_request_takes_the_same_steps_every_time(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    """Whatever is measured: a lone request drafts by its text, so that work can be compared."""
    begin = words(3, 20)
    prompt = begin + reference.alone(kind, begin, 40, endless=True).tokens + words(4, 3) + begin
    runner = opened(kind)
    works = set()
    for number in range(6):
        driver = StepDriver(runner)
        driver.submit(ask(f"r{number}", prompt, 60, ignore_eos=True))
        works.add(driver.finish()[f"r{number}"].work)
    (work,) = works
    assert work.drafted_tokens > 0


@both_layouts
@any_luck
def test_sampled_text_is_the_same_for_the_same_seed(kind: Kind, wrong: float, opened: Opened) -> None:
    """Rounding may turn a draw that falls between two tokens; a wrong state would turn nearly all of them."""
    requests = [
        ask(f"r{seed}", words(seed, 20), 40, temperature=0.9, seed=seed, repetition_penalty=1.1)
        for seed in range(8)
    ]
    plain = answered(opened(kind, sequences=1), requests, draft_tokens=0)
    texts = [request.prompt.items + plain[request.id].tokens for request in requests]
    drafted = answered(opened(kind, sequences=1), requests, new_drafter=knowing(texts, wrong))
    same = [request.id for request in requests if plain[request.id].tokens == drafted[request.id].tokens]
    assert len(same) >= 7
    for name in same:
        assert drafted[name].text == plain[name].text
        assert drafted[name].finish_reason == plain[name].finish_reason
        assert len(drafted[name].logprobs) == len(plain[name].logprobs)
    assert sum(answer.work.drafted_tokens for answer in drafted.values()) > 0


@both_layouts
@pytest.mark.parametrize("at", [1, 2, 3, 4, 7])
def test_a_stop_string_inside_accepted_drafts_ends_there(
    kind: Kind, at: int, opened: Opened, reference: Reference
) -> None:
    prompt = words(11, 30)
    alone = reference.alone(kind, prompt, 30, endless=True).tokens
    drafter = knowing([prompt + alone], RIGHT)
    runner = opened(kind)
    plain = ask("r", prompt, 30, ignore_eos=True)
    (free,) = answered(runner, [plain], draft_tokens=0).values()
    pieces = [runner.vocabulary.piece(token) for token in free.tokens]
    stop = b"".join(pieces[at : at + 2]).decode(errors="ignore")
    if not stop or "\ufffd" in stop:
        stop = free.text[at : at + 2]
    request = msgspec.structs.replace(plain, stop=(stop,))
    (without,) = answered(runner, [request], draft_tokens=0).values()
    driver = StepDriver(runner, cache_mb=64, new_drafter=drafter)
    driver.submit(request)
    (drafted,) = driver.finish().values()
    assert drafted.text == without.text and drafted.tokens == without.tokens
    assert drafted.finish_reason is without.finish_reason is FinishReason.STOP
    assert len(drafted.logprobs) == len(drafted.tokens)
    assert drafted.work.cells <= len(prompt) + len(drafted.tokens)
    assert drafted.recomputed == 0


@both_layouts
@pytest.mark.parametrize("limit", [1, 2, 5, 6, 11])
def test_max_tokens_is_never_exceeded(kind: Kind, limit: int, opened: Opened, reference: Reference) -> None:
    prompt = words(12, 25)
    text = prompt + reference.alone(kind, prompt, 30, endless=True).tokens
    request = ask("r", prompt, limit, ignore_eos=True)
    (answer,) = answered(opened(kind), [request], new_drafter=knowing([text], RIGHT)).values()
    reference.check(kind, prompt, limit, answer, endless=True)
    assert len(answer.tokens) == limit and answer.finish_reason is FinishReason.LENGTH


@every_drafting
@pytest.mark.parametrize("wrong", [RIGHT, MIXED])
def test_with_the_prefix_cache_a_conversation_computes_what_is_new(
    kind: Kind, wrong: float, opened: Opened, reference: Reference
) -> None:
    history, known = words(77, 150), 0
    runner = opened(kind, sequences=2, cells=2048)
    texts: list[Tokens] = []
    driver = StepDriver(runner, cache_mb=64, new_drafter=lambda: Knowing(texts, wrong, random.Random(1)))
    for turn in range(3):
        history += words(turn, 40)
        texts.append(history + reference.alone(kind, history, 40, endless=True).tokens)
        driver.submit(ask(f"turn {turn}", history, 40, ignore_eos=True))
        answer = driver.finish()[f"turn {turn}"]
        reference.check(kind, history, 40, answer, endless=True)
        assert answer.work.cached_tokens == known and answer.work.drafted_tokens > 0
        assert answer.recomputed == 0
        known = len(history) + 39
        history += answer.tokens


@every_dense
def test_rejected_drafts_leave_no_trace(kind: Kind, opened: Opened) -> None:
    """Whatever was drafted, what follows is the same to the last bit: only the shape of the step counts."""
    runner = opened(kind)
    sampler = runner.create_sampler(GREEDY)
    prompt = words(5, 20)
    found = []
    for drafts in (words(6, 5), words(7, 5), words(8, 5)):
        (first,) = runner.run(Batch((Row(0, 0, prompt, 1, sampler),))).rows[0].tokens
        verified = runner.run(Batch((Row(0, 20, [first, *drafts], 6, sampler, logprobs=8),))).rows[0]
        assert len(verified.tokens) == 1 and runner.truncate(0, 21) == 21
        after = runner.run(Batch((Row(0, 21, verified.tokens, 1, sampler, logprobs=8),))).rows[0]
        found.append((verified.tokens, verified.logprobs, after.tokens, after.logprobs))
        runner.truncate(0, 0)
    sampler.close()
    assert found[1:] == [found[0]] * 2
