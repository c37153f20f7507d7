"""The same-text rule: greedy text under load equals the text alone, up to near ties of the top two logits.

Kernels round differently at different batch sizes, so a near tie may be decided either way. `Reference`
applies the rule to the tokens of a `StepDriver`, `Soloist` to the texts of a server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from cllm.backend.base import Batch, ModelRunner, Row, StepStatus
from cllm.backend.llama.runner import LlamaRunner
from cllm.config import EngineConfig
from cllm.types import SamplingParams
from tests.driver.engine import Answer, Tokens
from tests.driver.kinds import THREADS, Kind, open_runner
from tests.driver.runner import feed, text_of

TIE = 0.05  # top-two logits closer than this (alone) may be chosen either way under load
# Options of a server on a tiny F32 model. With them the greedy text does not depend on how batches are cut.
EXACT = ("--no-flash-attention", "--cache-type-k", "f32", "--cache-type-v", "f32")


class Alone(NamedTuple):
    """A greedy answer computed by the bare runner, one row at a time on a fresh sequence."""

    tokens: Tokens
    logprobs: tuple[float, ...]
    # At each step, that of the end token included, the tokens as good as the chosen one: two are a tie.
    near: tuple[frozenset[int], ...]


class Tally(Counter[str]):
    """How often the same-text rule was applied, and how often a tie made a difference."""

    def __str__(self) -> str:
        return (
            f"same text: {self['answers']} answers, {self['tokens']} tokens; "
            f"{self['ties']} ties, of which {self['parted']} went the other way"
        )


class Reference:
    """Runs prompts alone (and remembers them), compares answers, counts ties.

    Stricter than the rule: an answer may differ from the text alone only at a tie, by a token of that tie,
    and from there on is compared with what that prefix gives alone. So every token is checked.
    """

    def __init__(self, models: dict[str, Path], tally: Tally) -> None:
        self._models = models
        self._tally = tally
        self._runners: dict[Kind, ModelRunner] = {}
        self._known: dict[tuple[Kind, Tokens, int, bool], Alone] = {}

    def alone(self, kind: Kind, prompt: Tokens, max_tokens: int, *, endless: bool = False) -> Alone:
        """The greedy answer to a prompt alone; `endless` is `ignore_eos`."""
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
        logprobs = [logprob.logprob for logprob in answer.logprobs]
        assert len(logprobs) == len(answer.tokens)
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
                assert abs(logprobs[done + step] - alone.logprobs[step]) < TIE
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
    """Greedy generation on the bare runner; leaves the sequence empty."""
    sampler = runner.create_sampler(SamplingParams(temperature=0, ignore_eos=endless))
    tokens: list[int] = []
    logprobs: list[float] = []
    near: list[frozenset[int]] = []
    pending = prompt
    while len(tokens) < max_tokens:
        result = runner.run(Batch((Row(0, runner.next_position(0), pending, 1, sampler, logprobs=8),)))
        assert result.status is StepStatus.DONE
        (found,) = result.rows[0].logprobs
        near.append(frozenset(token for token, logprob in found.top if logprob > found.logprob - TIE))
        if found.token in runner.vocabulary.ends:
            break
        tokens.append(found.token)
        logprobs.append(found.logprob)
        pending = [found.token]
    sampler.close()
    runner.truncate(0, 0)
    return Alone(tuple(tokens), tuple(logprobs), tuple(near))


class SoloText(NamedTuple):
    """A greedy text; `certain` is the part before the first tie."""

    text: str
    certain: str
    tie: bool

    def agrees(self, text: str) -> bool:
        """The same-text rule."""
        return text.startswith(self.certain) if self.tie else text == self.text


class Soloist:
    """One runner of one sequence: the texts of a model when it is asked alone."""

    def __init__(self, model: Path) -> None:
        """Open a model as a server does with the options `EXACT`."""
        config = EngineConfig(model=str(model), parallel=1, ctx_size=4096, threads=THREADS)
        exact = {"flash_attention": False, "cache_type_k": "f32", "cache_type_v": "f32"}
        self.runner = LlamaRunner(msgspec.structs.replace(config, **exact))

    def answer(self, prompt: str, max_tokens: int) -> SoloText:
        vocabulary = self.runner.vocabulary
        tokens = vocabulary.tokenize(prompt, add_special=True, parse_special=False)
        alone = run_alone(self.runner, tokens, max_tokens)
        tie = next((step for step, near in enumerate(alone.near) if len(near) > 1), None)
        certain = text_of(vocabulary, alone.tokens[:tie])
        return SoloText(text_of(vocabulary, alone.tokens), certain, tie is not None)

    def close(self) -> None:
        self.runner.close()


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
