"""Token masks: which tokens a sequence may sample next, by its grammar, reasoning budget and least length."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING

import numpy as np

from cllm.errors import CllmError
from cllm.text.structured_output import MaskBuilder
from cllm.types import ReasoningLimit, TokenMask, Vocabulary

if TYPE_CHECKING:
    from cllm.core.sequence import Sequence


class ReasoningBudget:
    """Counts the tokens of an answer's reasoning. Once the budget is spent, the closing marker is `due`."""

    def __init__(self, limit: ReasoningLimit) -> None:
        self._limit = limit
        self._inside = limit.inside
        self._left = limit.budget
        self._thought = 0  # tokens since the last opening marker
        self.due: list[int] = []  # tokens that must come next
        self._force_closing(())

    @property
    def draft_room(self) -> float:
        """How many draft tokens cannot spend the budget."""
        return self._left - 1 if self._inside else math.inf

    def follow(self, tokens: Tokens[int]) -> None:
        """A token was appended to these."""
        limit = self._limit
        if self.due:
            del self.due[0]
            self._inside = bool(self.due)
            return
        if self._inside and ends_with(tokens, limit.closing):
            self._inside = False
            self._left += len(limit.closing) - 1  # they were counted before they were known
        elif self._inside:
            self._left -= 1
            self._thought += 1
        elif limit.opening:
            self._inside, self._thought = ends_with(tokens, limit.opening), 0
        self._force_closing(tokens)

    def _force_closing(self, tokens: Tokens[int]) -> None:
        """Where the budget is spent, what is left of the closing marker must come."""
        closing = self._limit.closing
        if self._inside and self._left <= 0:
            begun = range(min(len(closing) - 1, self._thought), 0, -1)
            length = next((length for length in begun if ends_with(tokens, closing[:length])), 0)
            self.due = list(closing[length:])
            self._left += length


def ends_with(tokens: Tokens[int], last: Tokens[int]) -> bool:
    return len(tokens) >= len(last) > 0 and list(tokens[-len(last) :]) == list(last)


class TokenMasks:
    """Builds the masks of a step. Owner thread only."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._grammars = MaskBuilder(vocabulary.size)

    def build(
        self, running: Iterable[Sequence], counts: Mapping[str, int]
    ) -> tuple[dict[str, TokenMask], list[tuple[Sequence, CllmError]]]:
        """The masks of those that sample in this step, by request id; and those whose grammar is exhausted.

        `counts`: how many tokens of each request are computed.
        """
        sampling = [each for each in running if each.masks and counts.get(each.id, 0) == each.pending]
        masks: dict[str, TokenMask] = {}
        failed: list[tuple[Sequence, CllmError]] = []
        constrained = [(each, grammar) for each in sampling if (grammar := each.grammar) is not None]
        if constrained:
            started = time.perf_counter()
            found = self._grammars.masks([grammar for _, grammar in constrained])
            mask_s = (time.perf_counter() - started) / len(constrained)
            for (sequence, _), mask in zip(constrained, found, strict=True):
                sequence.mask_s = mask_s
                if isinstance(mask, CllmError):
                    failed.append((sequence, mask))
                else:
                    masks[sequence.id] = mask
        for sequence in sampling:
            if sequence.due:
                masks[sequence.id] = self._only(sequence.due[0])
            elif not sequence.endable:
                masks[sequence.id] = self._without_ends(sequence, masks.get(sequence.id))
        return masks, failed

    def _only(self, token: int) -> TokenMask:
        mask = np.zeros(self._vocabulary.size, np.bool_)
        mask[token] = True
        return mask

    def _without_ends(self, sequence: Sequence, allowed: TokenMask | None) -> TokenMask:
        """Without what would end the answer; where a grammar allows nothing else, it may end."""
        mask = np.ones(self._vocabulary.size, np.bool_) if allowed is None else allowed.copy()
        mask[[*self._vocabulary.ends, *sequence.request.stop_token_ids]] = False
        return mask if allowed is None or mask.any() else allowed
