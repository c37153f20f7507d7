"""The text of a prompt run alone, and DESIGN's rule for comparing with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cllm.backend.base import Batch, ModelRunner, Row, StepStatus
from cllm.types import SamplingParams
from tests.contract.harness import Answer, Tokens, feed, text_of
from tests.contract.kinds import Kind, open_runner

TIE = 0.05  # top-two logits closer than this (alone) may be chosen either way under load


class Alone(NamedTuple):
    """A greedy answer computed by the bare runner, one row at a time on a fresh sequence."""

    tokens: Tokens
    logprobs: tuple[float, ...]
    near: tuple[frozenset[int], ...]  # at each step, the tokens as good as chosen; more than one is a tie


class Tally(Counter[str]):
    """How often the same-text rule was applied, and how often a tie made a difference."""

    def __str__(self) -> str:
        return (
            f"same text: {self['answers']} answers, {self['tokens']} tokens; "
            f"{self['ties']} ties, of which {self['parted']} went the other way"
        )


class Reference:
    """Runs prompts alone (and remembers them), compares answers, counts ties.

    Stricter than DESIGN's rule: an answer may leave the text alone only at a tie, for a token
    of that tie, and from there on is compared with what that beginning says alone. So every token is checked.
    """

    def __init__(self, models: dict[str, Path], tally: Tally) -> None:
        self._models = models
        self._tally = tally
        self._runners: dict[Kind, ModelRunner] = {}
        self._known: dict[tuple[Kind, Tokens, int, bool], Alone] = {}

    def alone(self, kind: Kind, prompt: Tokens, max_tokens: int, *, endless: bool = False) -> Alone:
        """What a prompt says alone; `endless` is `ignore_eos`."""
        key = (kind, prompt, max_tokens, endless)
        if key not in self._known:
            self._known[key] = run_alone(self._runner(kind), prompt, max_tokens, endless=endless)
        return self._known[key]

    def says(self, kind: Kind, tokens: Tokens) -> dict[int, float]:
        """The likeliest after these tokens, computed at once on a fresh sequence."""
        runner = self._runner(kind)
        found = feed(runner, 0, tokens, 8)
        runner.truncate(0, 0)
        assert found is not None
        return dict(found.top)

    def _runner(self, kind: Kind) -> ModelRunner:
        kind = kind._replace(unified=False)  # alone, the layout is no matter
        if kind not in self._runners:
            self._runners[kind] = open_runner(self._models, kind, sequences=1, cells=1024, batch_tokens=1024)
        return self._runners[kind]

    def check(
        self, kind: Kind, prompt: Tokens, max_tokens: int, answer: Answer, *, endless: bool = False
    ) -> None:
        """The same-text rule, for tokens, their logprobs and the text."""
        assert answer.error_code is None, answer.error_message
        told = [logprob.logprob for logprob in answer.logprobs]
        assert len(told) == len(answer.tokens)
        done = 0
        while True:
            alone = self.alone(kind, prompt + answer.tokens[:done], max_tokens - done, endless=endless)
            rest = answer.tokens[done:]
            same = next(
                (
                    step
                    for step, pair in enumerate(zip(rest, alone.tokens, strict=False))
                    if pair[0] != pair[1]
                ),
                len(rest),
            )
            for step in range(min(same, len(alone.tokens))):
                assert abs(told[done + step] - alone.logprobs[step]) < TIE
            self._tally["ties"] += sum(len(near) > 1 for near in alone.near[: same + 1])
            if same == len(rest):
                break
            assert rest[same] in alone.near[same], f"another text from token {done + same} on"
            self._tally["parted"] += 1
            done += same + 1
        assert len(rest) == len(alone.tokens), "the answer ended early, or late"
        assert answer.text == text_of(self._runner(kind).vocabulary, answer.tokens)
        self._tally["answers"] += 1
        self._tally["tokens"] += len(answer.tokens)

    def close(self) -> None:
        for runner in self._runners.values():
            runner.close()


def run_alone(runner: ModelRunner, prompt: Sequence[int], max_tokens: int, *, endless: bool = False) -> Alone:
    """Greedy generation straight on the seam; leaves the sequence empty."""
    sampler = runner.create_sampler(SamplingParams(temperature=0, ignore_eos=endless))
    tokens: list[int] = []
    logprobs: list[float] = []
    near: list[frozenset[int]] = []
    pending = prompt
    while len(tokens) < max_tokens:
        result = runner.run(Batch((Row(0, runner.next_position(0), pending, 1, sampler, logprobs=8),)))
        assert result.status is StepStatus.DONE
        (found,) = result.rows[0].logprobs
        if runner.vocabulary.is_end(found.token):
            break
        tokens.append(found.token)
        logprobs.append(found.logprob)
        near.append(frozenset(token for token, logprob in found.top if logprob > found.logprob - TIE))
        pending = [found.token]
    sampler.close()
    runner.truncate(0, 0)
    return Alone(tuple(tokens), tuple(logprobs), tuple(near))


def assert_alike(kind: Kind, found: dict[int, float], wanted: dict[int, float]) -> None:
    """The same logprobs, but for rounding (the last of the list may be another token then).

    Flash attention rounds to 16 bits, differently at different batch sizes: 0.02 is common, 0.03 was seen.
    A single wrong cell makes a difference of 0.5 and more.
    """
    noise = 0.1 if kind.flash and kind.model in ("dense", "sliding") else 0.005
    best = max(wanted, key=lambda token: wanted[token])
    assert abs(found[best] - wanted[best]) < noise
    for token in found.keys() & wanted.keys():
        assert abs(found[token] - wanted[token]) < noise
    assert len(found.keys() & wanted.keys()) >= len(wanted) - 2
