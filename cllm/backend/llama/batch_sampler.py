"""Batch sampling: from a step's logits to its tokens. A row that cannot be sampled gets its own error."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cllm.backend.base import Row, RowResult
from cllm.backend.llama.candidates import (
    NOTHING_LEFT,
    BatchCandidates,
    Candidates,
    NothingLeft,
    best,
)
from cllm.backend.llama.logit_scan import NO_TOKENS, Logits, LogitScan
from cllm.backend.llama.sampler import LlamaSampler, log_probabilities
from cllm.types import TokenLogprob

# For less in a step, handing it to threads costs more than it saves.
MIN_THREADED_LOGITS = 1 << 22
MIN_THREADED_S = 1e-3
TINY = 1e-9
FAILED = "the next token could not be sampled"
_NOTHING = RowResult()
Scores = tuple[TokenLogprob, ...]
log = logging.getLogger(__name__)


class _Work(NamedTuple):
    """A row that wants output, and the logits of its outputs."""

    row: Row
    sampler: LlamaSampler
    first: int  # the line of the step's logits of its first output
    logits: Logits
    original: Logits  # before excluded tokens were taken out


class BatchSampler:
    """Samples all rows of a step; on several threads where that pays, since NumPy and chains free the GIL."""

    def __init__(self, api: Any, vocabulary_size: int, threads: int, scan: LogitScan | None = None) -> None:
        self._scan, self._size = scan or LogitScan(), vocabulary_size
        self._candidates = [Candidates(api, vocabulary_size) for _ in range(threads)]
        self._batched = BatchCandidates(api, self._scan)
        self._pool = ThreadPoolExecutor(threads - 1, "sampler") if threads > 1 else None

    def close(self) -> None:
        self._scan.close()
        if self._pool is not None:
            self._pool.shutdown()

    def wait(self, function: Any, pointer: Any, expected_s: float, lines: int) -> None:
        """Wait for the device with llama.cpp's function; then so many lines of logits are sampled."""
        self._scan.wait(function, pointer, expected_s, lines * self._size)

    def sample(self, rows: Sequence[Row], logits: Logits) -> tuple[RowResult, ...]:
        """The tokens of each row; `logits` holds the lines of each row, in the order of the rows.

        Tokens that a sampler excludes are taken out of its lines.
        """
        if not any(row.scored for row in rows):
            return self._sample(rows, logits)
        scores, logits = _score(rows, logits)
        results = self._sample(rows, logits)
        return tuple(
            result._replace(scored=scored, sample_s=result.sample_s + seconds)
            for result, (scored, seconds) in zip(results, scores, strict=True)
        )

    def _sample(self, rows: Sequence[Row], logits: Logits) -> tuple[RowResult, ...]:
        """`logits` holds one line per output."""
        if (tokens := self._sample_greedy(rows, logits)) is not None:
            return tuple(RowResult((token,)) for token in tokens)
        work = _make_work(rows, logits)
        found: dict[int, RowResult] = {}
        plain = [one for one in work if one.row.mask is None and one.sampler.chain is None]
        if 2 * len(plain) > len(work):  # in one go over all lines, unless most of them are others'
            likeliest = self._scan.likeliest(logits)
            for one in plain:
                if one.row.outputs == 1 and not one.row.logprobs:
                    found[one.first] = RowResult((likeliest[one.first],))
                else:
                    found[one.first] = _verify(one, likeliest[one.first :].__getitem__)
        self._sample_prefiltered([one for one in work if one.first not in found], logits, found)
        others = [one for one in work if one.first not in found]
        if others:
            results = self._run_chains(others)
            found.update((one.first, result) for one, result in zip(others, results, strict=True))
        if len(work) == len(rows):
            return tuple(found[one.first] for one in work)
        by_sequence = {one.row.seq_id: found[one.first] for one in work}
        return tuple(by_sequence.get(row.seq_id, _NOTHING) for row in rows)

    def _sample_greedy(self, rows: Sequence[Row], logits: Logits) -> list[int] | None:
        """The tokens where every row is greedy and wants one, the usual case; otherwise None."""
        if len(rows) != len(logits):
            return None
        excluded = None
        for row in rows:
            sampler = row.sampler
            assert isinstance(sampler, LlamaSampler)
            if sampler.chain is not None or row.outputs != 1 or row.mask is not None or row.logprobs:
                return None
            if excluded is None:
                excluded = sampler.excluded
            elif excluded is not sampler.excluded:
                return None
        return self._scan.likeliest(logits, excluded if excluded is not None else NO_TOKENS)

    def _sample_prefiltered(self, work: Sequence[_Work], logits: Logits, found: dict[int, RowResult]) -> None:
        """Rows whose chains start with a prefilter are filtered together."""
        narrow = [
            one
            for one in work
            if one.row.mask is None
            and not one.sampler.prefilter.adjusts
            and one.sampler.prefilter.narrows(logits.shape[1])
        ]
        prefilters = [one.sampler.prefilter for one in narrow for _ in range(one.row.outputs)]
        if not prefilters:
            return
        started = time.perf_counter()
        if len(prefilters) < len(logits):
            logits = logits[[one.first + place for one in narrow for place in range(one.row.outputs)]]
        try:
            if not self._batched.fill(logits, prefilters):
                return
        except Exception:
            log.exception("the candidates of %d rows could not be found", len(narrow))
            return
        if len(prefilters) == len(narrow):  # no drafts: all at once
            chains = [one.sampler.chain.pointer for one in narrow if one.sampler.chain is not None]
            if (tokens := self._batched.sample_all(chains)) is not None:
                each_s = (time.perf_counter() - started) / len(narrow)
                for one, token in zip(narrow, tokens, strict=True):
                    found[one.first] = _sampled(one, token, each_s)
                return
        each_s = (time.perf_counter() - started) / len(prefilters)
        first = 0
        for one in narrow:
            found[one.first] = self._sample_batched(one, first, each_s)
            first += one.row.outputs

    def _sample_batched(self, work: _Work, first: int, each_s: float) -> RowResult:
        assert work.sampler.chain is not None
        chain = work.sampler.chain.pointer  # without penalties, so it need not accept the token
        result = _verify(work, lambda place: self._batched.sample(chain, first + place))
        work.sampler.seconds += each_s
        return result._replace(sample_s=result.sample_s + each_s * work.row.outputs)

    def _run_chains(self, work: Sequence[_Work]) -> list[RowResult]:
        """Rows one by one, on several threads where that pays."""
        threads = min(len(self._candidates), len(work))
        expected_s = sum(one.sampler.seconds * one.row.outputs for one in work)
        total = sum(one.logits.size for one in work)
        pays = expected_s > MIN_THREADED_S or total > MIN_THREADED_LOGITS
        if self._pool is None or threads == 1 or not pays:
            return _isolated(self._candidates[0], work)

        def share(number: int) -> list[RowResult]:
            return _isolated(self._candidates[number], work[number::threads])

        started = time.perf_counter()
        others = [self._pool.submit(share, number) for number in range(1, threads)]
        shares = [share(0), *(other.result() for other in others)]
        results = [shares[place % threads][place // threads] for place in range(len(work))]
        # They ran at the same time: together they took as long as the step had to wait for them.
        overlap = (time.perf_counter() - started) / max(sum(result.sample_s for result in results), TINY)
        return [result._replace(sample_s=overlap * result.sample_s) for result in results]


def _sampled(work: _Work, token: int, seconds: float) -> RowResult:
    """The result of a row whose one token was sampled together with those of others."""
    work.sampler.seconds = seconds
    if token < 0:
        return RowResult(error=NOTHING_LEFT, sample_s=seconds)
    if not work.row.logprobs:
        return RowResult((token,), sample_s=seconds)
    started = time.perf_counter()
    scores = log_probabilities(work.original[0], token, work.row.logprobs)
    work.sampler.seconds += time.perf_counter() - started
    return RowResult((token,), (scores,), sample_s=work.sampler.seconds)


def _score(rows: Sequence[Row], logits: Logits) -> tuple[list[tuple[Scores, float]], Logits]:
    """The log-probabilities that each row wants of given tokens, with the time it took; the other lines."""
    scores: list[tuple[Scores, float]] = []
    outputs: list[int] = []
    first = 0
    for row in rows:
        started = time.perf_counter()
        found = tuple(
            log_probabilities(logits[first + place], token, row.scored_top)
            for place, token in enumerate(row.scored)
        )
        scores.append((found, time.perf_counter() - started))
        outputs += range(first + len(row.scored), first + row.lines)
        first += row.lines
    return scores, logits[outputs]


def _make_work(rows: Sequence[Row], logits: Logits) -> list[_Work]:
    """The rows that want output. Excluded tokens are taken out of all lines at once: most exclude alike."""
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


def _isolated(candidates: Candidates, work: Sequence[_Work]) -> list[RowResult]:
    """A failure here ends these rows, not the step: samplers of other rows have drawn, and cannot again."""
    try:
        return [_sample_single(candidates, one) for one in work]
    except Exception:
        log.exception("%d rows could not be sampled", len(work))
        return [RowResult(error=FAILED) for _ in work]


def _sample_single(candidates: Candidates, work: _Work) -> RowResult:
    sampler, mask = work.sampler, work.row.mask
    if sampler.chain is None:
        return _verify(work, lambda place: best(work.logits[place], mask))
    return _verify(work, lambda place: sampler.sample(work.logits[place], candidates, mask))


def _verify(work: _Work, sample: Callable[[int], int]) -> RowResult:
    """Sample token after token, as long as the next draft is what was sampled.

    The last `outputs` tokens of a row are the newest one and the drafts behind it. Each token is sampled as
    it would be without drafts; only how many are sampled in one step differs.
    """
    row, started = work.row, time.perf_counter()
    drafts = row.tokens[len(row.tokens) - row.outputs + 1 :]
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    for place in range(row.outputs):
        try:
            token = sample(place)
        except NothingLeft as error:  # isolation: the other rows have their tokens
            return RowResult(tuple(tokens), tuple(logprobs), error=str(error))
        except Exception:
            log.exception("a row could not be sampled")
            return RowResult(tuple(tokens), tuple(logprobs), error=FAILED)
        tokens.append(token)
        if row.logprobs:
            logprobs.append(log_probabilities(work.original[place], token, row.logprobs))
        if place < len(drafts) and drafts[place] != token:
            break
    seconds = time.perf_counter() - started
    work.sampler.seconds = seconds / len(tokens)
    return RowResult(tuple(tokens), tuple(logprobs), sample_s=seconds)
