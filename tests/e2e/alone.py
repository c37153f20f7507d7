"""What a model says when it is asked alone, in this process: the measure for text under load."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import NamedTuple

from cllm.backend.base import Batch, Row, StepStatus
from cllm.backend.llama.memory import embedded_model
from cllm.backend.llama.runner import LlamaRunner
from cllm.config import EngineConfig
from cllm.types import SamplingParams

TIE = 0.05  # DESIGN, "same text": below this the order of the top two may depend on the batch


class Alone(NamedTuple):
    """A greedy answer; `certain` is the part before the first tie."""

    text: str
    certain: str
    tie: bool

    def agrees(self, text: str) -> bool:
        """DESIGN's same-text rule."""
        return text.startswith(self.certain) if self.tie else text == self.text


def visible(pieces: list[bytes]) -> str:
    """The text of token pieces as a client may see it: an unfinished last character is not there."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(pieces))


class Soloist:
    """One runner of one sequence; greedy answers, one after the other."""

    def __init__(self, model: Path | None = None) -> None:
        path = str(model or embedded_model())
        self.runner = LlamaRunner(EngineConfig(model=path, parallel=1, ctx_size=4096, threads=1))

    def answer(self, prompt: str, max_tokens: int) -> Alone:
        vocabulary = self.runner.vocabulary
        sampler = self.runner.create_sampler(SamplingParams(temperature=0))
        tokens = vocabulary.tokenize(prompt, add_special=True, parse_special=False)
        position, pieces, certain = 0, list[bytes](), None
        while len(pieces) < max_tokens:
            result = self.runner.run(Batch((Row(0, position, tokens, 1, sampler, logprobs=2),)))
            assert result.status is StepStatus.DONE
            position += len(tokens)
            (token,) = result.rows[0].tokens
            (_, first), (_, second) = result.rows[0].logprobs[0].top
            if certain is None and first - second < TIE:
                certain = visible(pieces)
            if vocabulary.is_end(token):
                break
            pieces.append(vocabulary.piece(token))
            tokens = [token]
        sampler.close()
        self.runner.truncate(0, 0)
        return Alone(visible(pieces), certain or "", certain is not None)

    def close(self) -> None:
        self.runner.close()
