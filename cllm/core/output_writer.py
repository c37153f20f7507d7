"""The output writer: what a step gave each request, detokenized when the step after it is computed."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Entries
from typing import Any, NamedTuple

from cllm.core.sequence import Sequence
from cllm.types import RequestOutput, TokenLogprob, Vocabulary

_NO_MORE: Mapping[str, Any] = {}


class _Output(NamedTuple):
    """An output whose text is not yet detokenized (None), nor its log-probabilities spelled."""

    sequence: Sequence
    tokens: tuple[int, ...]
    text: str | None
    logprobs: Entries[TokenLogprob]
    prompt_logprobs: Entries[TokenLogprob]
    more: Mapping[str, Any]


class OutputWriter:
    """Keeps outputs in their order until they are taken."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._outputs: list[_Output] = []

    def put(
        self,
        sequence: Sequence,
        tokens: tuple[int, ...] = (),
        text: str | None = "",
        logprobs: Entries[TokenLogprob] = (),
        more: Mapping[str, Any] = _NO_MORE,
    ) -> None:
        """An output of a request; `more`: what few of them have, such as the last.

        The first one after the prompt has the prompt's log-probabilities.
        """
        scored: Entries[TokenLogprob] = ()
        if sequence.prompt_logprobs and not sequence.unscored:
            scored, sequence.prompt_logprobs = sequence.prompt_logprobs, []
        self._outputs.append(_Output(sequence, tokens, text, logprobs, scored, more))

    def take(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return [self._write(output) for output in outputs]

    def _write(self, output: _Output) -> RequestOutput:
        sequence, tokens, text, logprobs, prompt_logprobs, more = output
        return RequestOutput(
            request_id=sequence.id,
            text=sequence.stopping.detokenize(tokens, self._vocabulary) if text is None else text,
            tokens=tokens,
            logprobs=tuple(map(self._with_pieces, logprobs)),
            prompt_logprobs=tuple(map(self._with_pieces, prompt_logprobs)),
            **more,
        )

    def _with_pieces(self, entry: TokenLogprob) -> TokenLogprob:
        """A log-probability with the bytes of its tokens: the HTTP process has no vocabulary."""
        piece = self._vocabulary.piece
        pieces = (piece(entry.token), *(piece(token) for token, _ in entry.top))
        return TokenLogprob(entry.token, entry.logprob, entry.top, pieces)
