"""From a step's logits to its tokens: every row that wants output gets some, or an error of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cllm.backend.base import Row, RowResult
from cllm.backend.llama.candidates import BatchCandidates, Candidates, Logits, TopKPrefilter, best
from cllm.backend.llama.sampler import LlamaSampler, log_probabilities
from cllm.types import TokenLogprob

WORTH_A_THREAD = 1 << 22  # logits that chains look at in a step; for fewer, handing them over costs more
_NOTHING = RowResult()


class _Work(NamedTuple):
    """A row that wants output, and the logits of its outputs."""

    row: Row
    sampler: LlamaSampler
    first: int  # which line of the step's logits is that of its first output
    logits: Logits
    original: Logits  # before tokens that must not be chosen were taken out


class SamplerScratch:
    """What a thread needs to work with sampler chains."""

    def __init__(self, api: Any, vocabulary_size: int) -> None:
        self._alone = Candidates(api, vocabulary_size)
        self._common = BatchCandidates(api)

    def choose(self, work: Sequence[_Work], logits: Logits) -> list[RowResult]:
        """Rows whose chains begin with a cut are cut together; the others are looked at one by one."""
        places: dict[int, int] = {}  # first line of a row -> where its candidates are
        cuts: list[TopKPrefilter] = []
        for one in work:
            if one.row.mask is None and one.sampler.cut.narrows(logits.shape[1]):
                places[one.first] = len(cuts)
                cuts += [one.sampler.cut] * one.row.outputs
        if cuts and len(cuts) < len(logits):
            lines = [
                one.first + place for one in work if one.first in places for place in range(one.row.outputs)
            ]
            logits = logits[lines]
        if not cuts or not self._common.cut(logits, cuts):
            places = {}
        return [
            self._from_common(one, places[one.first]) if one.first in places else self._on_its_own(one)
            for one in work
        ]

    def _from_common(self, work: _Work, first: int) -> RowResult:
        assert work.sampler.chain is not None
        chain = work.sampler.chain.pointer  # one that looks back on nothing, so it need not be told the token
        return _verified(work, lambda place: self._common.choose(chain, first + place))

    def _on_its_own(self, work: _Work) -> RowResult:
        sampler, mask = work.sampler, work.row.mask
        if sampler.chain is None:
            return _verified(work, lambda place: best(work.logits[place], mask))
        return _verified(work, lambda place: sampler.sample(work.logits[place], self._alone, mask))


class BatchSampler:
    """Samples rows; those with chains on several threads where that pays: native code runs beside Python."""

    def __init__(self, api: Any, vocabulary_size: int, threads: int) -> None:
        self._benches = [SamplerScratch(api, vocabulary_size) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads - 1, "sampler") if threads > 1 else None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def choose(self, rows: Sequence[Row], logits: Logits) -> tuple[RowResult, ...]:
        """The tokens of each row; `logits` holds one line per output, in the order of the rows.

        Tokens that a sampler excludes are taken out of its lines.
        """
        work = _work_of(rows, logits)
        plain = [one for one in work if one.row.mask is None and one.sampler.chain is None]
        found: dict[int, RowResult] = {}
        if 2 * len(plain) > len(work):  # in one go over all lines, unless most of them are others'
            likeliest = logits.argmax(axis=1).tolist()
            for one in plain:
                found[one.first] = _verified(one, likeliest[one.first :].__getitem__)
        others = [one for one in work if one.first not in found]
        if others:
            results = self._with_chains(others, logits)
            found.update((one.first, result) for one, result in zip(others, results, strict=True))
        if len(work) == len(rows):
            return tuple(found[one.first] for one in work)
        by_sequence = {one.row.seq_id: found[one.first] for one in work}
        return tuple(by_sequence.get(row.seq_id, _NOTHING) for row in rows)

    def _with_chains(self, work: Sequence[_Work], logits: Logits) -> list[RowResult]:
        threads = len(self._benches)
        if self._pool is None or len(work) < threads or sum(one.logits.size for one in work) < WORTH_A_THREAD:
            return self._benches[0].choose(work, logits)
        size = -(-len(work) // threads)

        def share(number: int) -> list[RowResult]:
            part = work[number * size : (number + 1) * size]
            return self._benches[number].choose(part, logits) if part else []

        others = [self._pool.submit(share, number) for number in range(1, threads)]
        return sum((other.result() for other in others), share(0))


def _work_of(rows: Sequence[Row], logits: Logits) -> list[_Work]:
    """Who wants output. What must not be chosen is taken out: of all lines at once, as it is mostly alike."""
    work = []
    excluding: dict[int, tuple[npt.NDArray[np.int32], list[int]]] = {}  # by identity: tokens, and lines
    first = 0
    for row in rows:
        if not row.outputs:
            continue
        sampler = row.sampler
        assert isinstance(sampler, LlamaSampler)
        own = original = logits[first : first + row.outputs]
        if len(sampler.excluded):
            if row.logprobs:
                original = own.copy()
            lines = excluding.setdefault(id(sampler.excluded), (sampler.excluded, []))[1]
            lines += range(first, first + row.outputs)
        work.append(_Work(row, sampler, first, own, original))
        first += row.outputs
    for excluded, lines in excluding.values():
        logits[np.array(lines)[:, None], excluded] = -np.inf
    return work


def _verified(work: _Work, choose: Callable[[int], int]) -> RowResult:
    """Choose token after token, as long as the next draft is what was chosen.

    The last `outputs` tokens of a row are the newest one and the drafts behind it: each choice is made as it
    would be without them, so the text is the same; only how many are made in one step differs.
    """
    row = work.row
    if row.outputs == 1 and not row.logprobs:
        try:
            return RowResult((choose(0),))
        except ValueError as error:  # law 5: the others of this step have their tokens
            return RowResult(error=str(error))
    drafts = row.tokens[len(row.tokens) - row.outputs + 1 :]
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    for place in range(row.outputs):
        try:
            token = choose(place)
        except ValueError as error:
            return RowResult(tuple(tokens), tuple(logprobs), error=str(error))
        tokens.append(token)
        if row.logprobs:
            logprobs.append(log_probabilities(work.original[place], token, row.logprobs))
        if place < len(drafts) and drafts[place] != token:
            break
    return RowResult(tuple(tokens), tuple(logprobs))
