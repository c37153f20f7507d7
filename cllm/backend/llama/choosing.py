"""From a step's logits to its tokens: every row that wants output gets some, or an error of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from cllm.backend.base import Row, RowResult
from cllm.backend.llama.candidates import Candidates, Logits, best
from cllm.backend.llama.sampler import LlamaSampler, log_probabilities
from cllm.types import TokenLogprob

WORTH_A_THREAD = 1 << 20  # logits that chains look at in a step; for fewer, handing them over costs more


class _Work(NamedTuple):
    """A row and the logits of its outputs."""

    row: Row
    logits: Logits
    likeliest: Any = None  # per output, where the choice is a plain argmax


class Chooser:
    """Samples rows; those with chains on several threads where that pays: native code runs beside Python."""

    def __init__(self, api: Any, vocabulary_size: int, threads: int) -> None:
        self._candidates = [Candidates(api, vocabulary_size) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads - 1, "sampler") if threads > 1 else None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def choose(self, rows: Sequence[Row], logits: Logits) -> tuple[RowResult, ...]:
        """The tokens of each row; `logits` holds one line per output, in the order of the rows."""
        plain = [row for row in rows if row.outputs and _is_plain(row)]
        together = logits.argmax(axis=1) if len(plain) * 2 > sum(row.outputs > 0 for row in rows) else None
        results = [RowResult()] * len(rows)
        chained: list[tuple[int, _Work]] = []
        line = 0
        for index, row in enumerate(rows):
            if not row.outputs:
                continue
            lines = slice(line, line + row.outputs)
            line += row.outputs
            if together is not None and _is_plain(row):
                results[index] = _verified(_Work(row, logits[lines], together[lines]), self._candidates[0])
            else:
                chained.append((index, _Work(row, logits[lines])))
        for (index, _), result in zip(chained, self._work([work for _, work in chained]), strict=True):
            results[index] = result
        return tuple(results)

    def _work(self, work: Sequence[_Work]) -> list[RowResult]:
        threads = len(self._candidates)
        if self._pool is None or len(work) < threads or sum(one.logits.size for one in work) < WORTH_A_THREAD:
            return [_verified(one, self._candidates[0]) for one in work]

        def share(number: int) -> list[RowResult]:
            return [_verified(one, self._candidates[number]) for one in work[number::threads]]

        others = [self._pool.submit(share, number) for number in range(1, threads)]
        shares = [share(0), *(other.result() for other in others)]
        return [shares[index % threads][index // threads] for index in range(len(work))]


def _is_plain(row: Row) -> bool:
    """The choice is the argmax of the logits as they are."""
    assert isinstance(row.sampler, LlamaSampler)
    return row.mask is None and row.sampler.chain is None and not len(row.sampler.excluded)


def _verified(work: _Work, candidates: Candidates) -> RowResult:
    """Choose token after token, as long as the next draft is what was chosen.

    The last `outputs` tokens of a row are the newest one and the drafts behind it: each choice is made as it
    would be without them, so the text is the same; only how many are made in one step differs.
    """
    row, sampler = work.row, work.row.sampler
    assert isinstance(sampler, LlamaSampler)
    drafts = row.tokens[len(row.tokens) - row.outputs + 1 :]
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    for place in range(row.outputs):
        logits = work.logits[place]
        original = logits.copy() if row.logprobs and len(sampler.excluded) else logits
        if len(sampler.excluded):
            logits[sampler.excluded] = -np.inf
        try:
            if work.likeliest is not None:
                token = int(work.likeliest[place])
            elif sampler.chain is None:
                token = best(logits, row.mask)
            else:
                token = sampler.sample(logits, candidates, row.mask)
        except ValueError as error:  # law 5: the others of this step have their tokens
            return RowResult(tuple(tokens), tuple(logprobs), error=str(error))
        tokens.append(token)
        if row.logprobs:
            logprobs.append(log_probabilities(original, token, row.logprobs))
        if place < len(drafts) and drafts[place] != token:
            break
    return RowResult(tuple(tokens), tuple(logprobs))
