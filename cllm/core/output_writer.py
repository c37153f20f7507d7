"""The output writer: what a step gave each request, detokenized when the step after it is computed."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Entries
from typing import Any

from cllm.core.sequence import Sequence
from cllm.types import RequestOutput, TokenLogprob, Vocabulary

# An output whose text is not yet detokenized (None), nor its log-probabilities (of tokens, of the prompt)
# spelled; and what else it has.
_Scores = Entries[TokenLogprob]
_Output = tuple[Sequence, tuple[int, ...], str | None, _Scores, _Scores, Mapping[str, Any]]


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
        logprobs: _Scores = (),
        more: Mapping[str, Any] = {},
    ) -> None:
        """An output of a request; `more`: what few of them have, such as the last.

        The first one after the prompt has the prompt's log-probabilities.
        """
        scored: _Scores = ()
        if sequence.prompt_logprobs and not sequence.unscored:
            scored, sequence.prompt_logprobs = sequence.prompt_logprobs, []
        self._outputs.append((sequence, tokens, text, logprobs, scored, more))

    def take(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return [
            RequestOutput(
                request_id=sequence.id,
                text=sequence.stopping.detokenize(tokens, self._vocabulary) if text is None else text,
                tokens=tokens,
                logprobs=tuple(map(self.spell, logprobs)),
                prompt_logprobs=tuple(map(self.spell, scored)),
                **more,
            )
            for sequence, tokens, text, logprobs, scored, more in outputs
        ]

    def spell(self, entry: TokenLogprob) -> TokenLogprob:
        """A log-probability with the bytes of its tokens: the HTTP process has no vocabulary."""
        if entry.pieces:
            return entry
        piece = self._vocabulary.piece
        pieces = (piece(entry.token), *(piece(token) for token, _ in entry.top))
        return TokenLogprob(entry.token, entry.logprob, entry.top, pieces)
