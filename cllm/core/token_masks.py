"""Token masks: which tokens a sequence may sample next, by its grammar, reasoning budget and least length."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import numpy as np

from cllm.core.sequence import Sequence
from cllm.core.step_cost import MILLISECOND
from cllm.errors import CllmError
from cllm.text.structured_output import MaskBuilder
from cllm.types import TokenMask, Vocabulary


class TokenMasks:
    """Builds the masks of a step. Owner thread only."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._grammars = MaskBuilder(vocabulary.size)

    def build(
        self, masked: Iterable[Sequence], counts: Mapping[str, int]
    ) -> tuple[dict[str, TokenMask], list[tuple[Sequence, CllmError]]]:
        """The masks of those that sample in this step, by request id; and those whose grammar is exhausted.

        Some token of each is `masked`. `counts`: how many tokens of each request are computed.
        """
        sampling = [each for each in masked if counts.get(each.id, 0) == each.pending]
        masks: dict[str, TokenMask] = {}
        failed: list[tuple[Sequence, CllmError]] = []
        constrained = [(each, grammar) for each in sampling if (grammar := each.stopping.grammar) is not None]
        # Masks that may be costly are built and timed one by one: each sequence pays for its own.
        quick = [pair for pair in constrained if 0 < pair[0].mask_s < MILLISECOND]
        for group in (quick, *([pair] for pair in constrained if pair not in quick)):
            started = time.perf_counter()
            found = self._grammars.masks([grammar for _, grammar in group]) if group else []
            mask_s = (time.perf_counter() - started) / max(1, len(group))
            for (sequence, _), mask in zip(group, found, strict=True):
                sequence.mask_s = mask_s
                if isinstance(mask, CllmError):
                    failed.append((sequence, mask))
                else:
                    masks[sequence.id] = mask
        for sequence in sampling:
            if due := sequence.stopping.due:
                masks[sequence.id] = np.eye(1, self._vocabulary.size, due[0], np.bool_)[0]
            elif not sequence.stopping.endable:
                allowed = masks.get(sequence.id)
                mask = np.ones(self._vocabulary.size, np.bool_) if allowed is None else allowed.copy()
                mask[[*self._vocabulary.ends, *sequence.request.stop_token_ids]] = False
                if allowed is None or mask.any():  # where a grammar allows nothing else, it may end
                    masks[sequence.id] = mask
        return masks, failed
