"""How dense the batches stay when slots are chosen by what they hold.

Conversations come in a random order, some at once, on one engine core with 16 slots. With split KV, llama.cpp
cuts a batch at every gap between the ids of its rows: a decode-only step should be one ubatch. Without
`--model`, a tiny one is made; what pays is measured, so a machine that is busy has other figures.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.command import conclude, run_command
from bench.report import Table
from cllm.backend.base import Batch, StepResult
from cllm.backend.llama.runner import LlamaRunner
from cllm.config import EngineConfig
from cllm.core.step_cost import StepCost, StepCostModel
from cllm.types import FinishReason
from proof.command import make_parser
from tests.driver.engine import StepDriver, Tokens, ask, words
from tests.driver.runner import CheckedRunner
from tests.tiny_models import make_dense

SLOTS = 16
TURNS = (1, 5)
MESSAGE_TOKENS, OUTPUT_TOKENS = (5, 80), (4, 40)
CELLS = 512  # of one slot
CACHE_MB = 64
MAX_UBATCHES = 1.1


class CountingRunner(CheckedRunner):
    """Counts the ubatches of the steps in which every row decodes."""

    steps = 0
    ubatches = 0
    padded = 0  # rows added to close gaps
    _padding = 0
    _decode_only = False

    def submit(self, batch: Batch) -> None:
        # A prompt's row has tokens before its first output, or none that yields output.
        self._decode_only = all(len(row.tokens) == row.outputs for row in batch.rows)
        self._padding = len(batch.padding)
        self.batches.clear()
        super().submit(batch)

    def collect(self) -> StepResult:
        result = super().collect()
        if self._decode_only:
            self.steps += 1
            self.ubatches += result.ubatches
            self.padded += self._padding
        return result


@dataclass(slots=True)
class Conversation:
    """A growing history; its next turn can be asked when its last is answered."""

    draw: random.Random
    turns: int
    history: Tokens = ()
    asked: str = ""  # the request that runs

    def next_prompt(self) -> Tokens:
        self.turns -= 1
        self.history += words(self.draw.randrange(10**9), self.draw.randint(*MESSAGE_TOKENS))
        return self.history


@dataclass(slots=True)
class Load:
    """Some conversations at a time, drawn at random among those that have turns left."""

    driver: StepDriver
    at_once: int
    conversations: list[Conversation]
    draw: random.Random
    running: list[Conversation] = field(default_factory=list)
    requests: int = 0

    def run(self) -> None:
        """Until every turn is answered."""
        while True:
            self._collect()
            while len(self.running) < self.at_once and self.conversations:
                self._ask(self.conversations.pop(self.draw.randrange(len(self.conversations))))
            if not self.running:
                return
            self.driver.core.step()

    def _ask(self, conversation: Conversation) -> None:
        conversation.asked = f"r{self.requests}"
        self.requests += 1
        prompt, output = conversation.next_prompt(), self.draw.randint(*OUTPUT_TOKENS)
        self.driver.submit(ask(conversation.asked, prompt, output, logprobs=0, ignore_eos=True))
        self.running.append(conversation)

    def _collect(self) -> None:
        for conversation in list(self.running):
            answer = self.driver.answers[conversation.asked]
            if answer.finish_reason is None:
                continue
            assert answer.finish_reason is FinishReason.LENGTH, answer.error_message
            self.running.remove(conversation)
            conversation.history += answer.tokens
            if conversation.turns and len(conversation.history) + 150 < CELLS:
                self.conversations.append(conversation)


def run_density(
    model: Path | None = None,
    conversations: int = 200,
    out: Path | None = None,
    known: StepCost | None = None,
) -> int:
    """Run with 8 and 16 at once, print a table; 0 if decode-only steps are dense enough, else 1.

    With a `known` cost of steps, the batches are the same on every machine; without one it is measured.
    """
    rows, means = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = model or make_dense(Path(folder) / "dense.gguf")
        for at_once in (SLOTS // 2, SLOTS):
            config = EngineConfig(model=str(path), parallel=SLOTS, ctx_size=CELLS * SLOTS, threads=1)
            runner = LlamaRunner(config)
            counting = CountingRunner(runner)
            cost = StepCostModel(known=known, frozen=True) if known is not None else None
            driver = StepDriver(counting, cache_mb=CACHE_MB, draft_tokens=0, cost=cost, learns=True)
            draw = random.Random(f"density 1 {at_once}")
            talks = [Conversation(draw, draw.randint(*TURNS)) for _ in range(conversations)]
            load = Load(driver, at_once, talks, draw)
            load.run()
            runner.close()
            means.append(counting.ubatches / counting.steps)
            padded = f"{counting.padded / counting.steps:.2f}"
            rows.append((f"{at_once}", f"{load.requests}", f"{counting.steps}", f"{means[-1]:.3f}", padded))
    columns = ("at once", "requests", "decode-only steps", "ubatches a step", "padding rows a step")
    failed = max(means) > MAX_UBATCHES
    verdict = f"FAIL: more than {MAX_UBATCHES} ubatches a step" if failed else "pass"
    text = f"{Table(columns, rows).markdown()}\n\n{conversations} conversations, {SLOTS} slots: {verdict}"
    return conclude("density", text, {"ubatches": means}, out, failed=failed)


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__, "--model", "--out", conversations=(200, "how many"))
    return run_command(parser, arguments, run_density)
