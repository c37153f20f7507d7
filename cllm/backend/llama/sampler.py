"""Sampling: from a step's logits to its tokens. A row that cannot be sampled gets its own error.

A sequence's sampler is argmax where that is enough, and llama.cpp's sampler chain otherwise.
"""

from __future__ import annotations

import ctypes
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from cllm.backend.base import Row, RowResult
from cllm.backend.llama.candidates import (
    NARROWING,
    Candidates,
    Logits,
    LogitScan,
    NativeLogitScan,
    Tokens,
    TopKPrefilter,
    apply_chain,
    best,
    reaching,
)
from cllm.backend.llama.library import DeferredFrees, Owned
from cllm.types import SamplingParams, TokenLogprob, TokenMask

MAX_ADJUSTED = 512  # tokens: with more, the prefilter hardly narrows
# For less in a step, handing it to threads costs more than it saves.
MIN_THREADED_LOGITS = 1 << 22
MIN_THREADED_S = 1e-3
TINY = 1e-9
FAILED = "the next token could not be sampled"
NOTHING_LEFT = "no token is left to sample from"
_NOTHING = RowResult()
log = logging.getLogger(__name__)


class LlamaSampler:
    """The sampler of one sequence. A greedy one needs no chain: then `chain` is None."""

    def __init__(
        self, api: Any, params: SamplingParams, chain: Owned | None, excluded: Tokens, context: int
    ) -> None:
        self._api = api
        self.params = params
        self.chain = chain
        self.seconds = 0.0  # of its last token
        self._lookback = get_lookback(params.penalty_last_n, context) if params.penalises else 0
        if params.dry_multiplier > 0:
            self._lookback = max(self._lookback, get_lookback(params.dry_penalty_last_n, context))
        self._biased = [token for token, _ in params.logit_bias]
        self._recent: deque[int] | None = None  # the history, if it is short: its tokens are adjusted
        self.prefilter = TopKPrefilter(params)
        if self.prefilter.adjusts and self._lookback + len(self._biased) <= MAX_ADJUSTED:
            self._recent = deque(maxlen=self._lookback)
        self.excluded = excluded  # tokens never sampled (end tokens, with `ignore_eos`)

    def accept(self, tokens: Sequence[int]) -> None:
        """Add tokens to the history of penalties; free where there are none."""
        if self.chain is not None and self._lookback:
            for token in tokens[-self._lookback :]:
                self._accept(token)

    def skip(self, token: int) -> None:
        """The chain's last sampler draws once for each token, from however many candidates.

        Not restored: what XTC has drawn, and what mirostat and adaptive-p have drawn and learned, since these
        depend on the logits.
        """
        self.accept((token,))
        learns = self.params.mirostat or self.params.adaptive_target >= 0
        if self.chain is not None and self.params.temperature > 0 and not learns:
            api, chain = self._api, self.chain.pointer
            last = api.llama_sampler_chain_get(chain, api.llama_sampler_chain_n(chain) - 1)
            only = api.llama_token_data(id=token, logit=0.0, p=0.0)
            array = api.llama_token_data_array(data=ctypes.pointer(only), size=1, selected=-1, sorted=False)
            api.llama_sampler_apply(last, ctypes.byref(array))

    def _accept(self, token: int) -> None:
        assert self.chain is not None
        self._api.llama_sampler_accept(self.chain.pointer, token)
        if self._recent is not None:
            self._recent.append(token)

    def sample(self, logits: Logits, candidates: Candidates, mask: TokenMask | None = None) -> int:
        """Sample an allowed token from a row and accept it; -1 where none is left. The row stays as it is."""
        assert self.chain is not None
        adjusted = None
        if self._recent is not None:
            adjusted = np.unique(np.array([*self._recent, *self._biased], np.int32))
        if (token := candidates.sample(self.chain.pointer, logits, self.prefilter, mask, adjusted)) >= 0:
            self._accept(token)
        return token

    def close(self) -> None:
        if self.chain is not None:
            self.chain.close()


class DryPrototypes:
    """DRY samplers to clone from. Making one walks the whole vocabulary for each sequence breaker; a clone
    is cheap, so only the first request with its settings pays."""

    def __init__(self, api: Any, vocabulary: Any, context: int, deferred_frees: DeferredFrees) -> None:
        self._api = api
        self._vocabulary = vocabulary
        self._context = context
        self._deferred_frees = deferred_frees
        self._prototype = lru_cache(maxsize=16)(self._make)  # those it drops go to the deferred free list

    def clone(self, params: SamplingParams) -> Any:
        """A new sampler; the caller owns it."""
        prototype = self._prototype(
            params.dry_sequence_breakers,
            params.dry_multiplier,
            params.dry_base,
            params.dry_allowed_length,
            get_lookback(params.dry_penalty_last_n, self._context),
        )
        return self._api.llama_sampler_clone(prototype.pointer)

    def _make(self, breakers: Sequence[str], *settings: float) -> Owned:
        texts = (ctypes.c_char_p * len(breakers))(*(text.encode() for text in breakers))
        pointer = self._api.llama_sampler_init_dry(self._vocabulary, *settings, texts, len(texts))
        return Owned(pointer, self._api.llama_sampler_free, self._deferred_frees)

    def close(self) -> None:
        self._prototype.cache_clear()


def get_lookback(count: int, context: int) -> int:
    """Tokens that a penalty looks back on: -1 is the whole context, and no more than that is kept."""
    return context if count < 0 else min(count, context)


def build_chain(
    api: Any, params: SamplingParams, *, dry: DryPrototypes, vocabulary_size: int, context: int
) -> Any:
    """A new chain for `params`, in the order `SamplingParams` documents; the caller owns it."""
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    add = partial(api.llama_sampler_chain_add, chain)
    if params.logit_bias:
        biases = (api.llama_logit_bias * len(params.logit_bias))(*params.logit_bias)
        add(api.llama_sampler_init_logit_bias(vocabulary_size, len(biases), biases))
    if params.penalises:
        lookback = get_lookback(params.penalty_last_n, context)
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        add(api.llama_sampler_init_penalties(vocabulary_size, lookback, *penalties))
    if params.dry_multiplier > 0:
        add(dry.clone(params))
    if params.temperature <= 0:
        add(api.llama_sampler_init_greedy())
        return chain
    if params.mirostat:
        mirostat = (params.seed or 0, params.mirostat_tau, params.mirostat_eta)
        add(api.llama_sampler_init_temp(params.temperature))
        if params.mirostat == 1:
            add(api.llama_sampler_init_mirostat(vocabulary_size, *mirostat, 100))
        else:
            add(api.llama_sampler_init_mirostat_v2(*mirostat))
        return chain
    if params.top_n_sigma >= 0:
        add(api.llama_sampler_init_top_n_sigma(params.top_n_sigma))
    if params.top_k > 0:
        add(api.llama_sampler_init_top_k(params.top_k))
    if params.typical_p < 1:
        # What is impossible (masked, biased away) must go first: llama.cpp computes 0 * log 0 for it.
        add(api.llama_sampler_init_min_p(1e-30, 1))
        add(api.llama_sampler_init_typical(params.typical_p, 1))
    if params.top_p < 1:
        add(api.llama_sampler_init_top_p(params.top_p, 1))
    if params.min_p > 0:
        add(api.llama_sampler_init_min_p(params.min_p, 1))
    if params.xtc_probability > 0:
        add(api.llama_sampler_init_xtc(params.xtc_probability, params.xtc_threshold, 1, params.seed or 0))
    if params.dynatemp_range > 0:
        dynamic = (params.dynatemp_range, params.dynatemp_exponent)
        add(api.llama_sampler_init_temp_ext(params.temperature, *dynamic))
    else:
        add(api.llama_sampler_init_temp(params.temperature))
    if params.adaptive_target >= 0:
        adaptive = (params.adaptive_target, params.adaptive_decay)
        add(api.llama_sampler_init_adaptive_p(*adaptive, params.seed or 0))
    else:
        add(api.llama_sampler_init_dist(params.seed or 0))
    return chain


def log_probabilities(logits: Logits, token: int, count: int) -> TokenLogprob:
    """The chosen token's log-probability and the `count` likeliest, under the model's own distribution."""
    count = min(count, len(logits))
    if count == 1:
        top = logits.argmax(axis=0, keepdims=True)
    else:
        narrows = count < len(logits) // NARROWING
        top = reaching(logits, count, 0.0) if narrows else np.argpartition(logits, -count)[-count:]
        top = top[np.argsort(-logits[top], kind="stable")[:count]]
    shifted = logits - logits[top[0]]
    np.exp(shifted, out=shifted)
    normaliser = float(logits[top[0]]) + math.log(shifted.sum(dtype=np.float64))
    return TokenLogprob(
        token,
        float(logits[token]) - normaliser,
        tuple((int(index), float(logits[index]) - normaliser) for index in top),
    )


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
        self._api, self.scan = api, scan or LogitScan()
        self._candidates = [Candidates(api, vocabulary_size) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads - 1, "sampler") if threads > 1 else None

    def close(self) -> None:
        self.scan.close()
        if self._pool is not None:
            self._pool.shutdown()

    def sample(self, rows: Sequence[Row], logits: Logits) -> tuple[RowResult, ...]:
        """The tokens of each row; `logits` holds the lines of each row, in the order of the rows.

        Tokens that a sampler excludes are taken out of its lines.
        """
        excluded = None
        for row in rows:  # in the usual case every row is greedy and wants one token
            if row.outputs != 1 or row.mask is not None or row.logprobs or row.scored:
                break
            sampler = row.sampler
            assert isinstance(sampler, LlamaSampler)
            if excluded is None:
                excluded = sampler.excluded
            if sampler.chain is not None or sampler.excluded is not excluded:
                break
        else:
            return tuple([RowResult((token,)) for token in self.scan.likeliest(logits, excluded)])
        if any(row.scored for row in rows):
            return self._sample_scored(rows, logits)
        work = _make_work(rows, logits)
        found: dict[int, RowResult] = {}
        plain = [one for one in work if one.row.mask is None and one.sampler.chain is None]
        if 2 * len(plain) > len(work):  # in one go over all lines, unless most of them are others'
            likeliest = self.scan.likeliest(logits)
            for one in plain:
                if one.row.outputs == 1 and not one.row.logprobs:
                    found[one.first] = RowResult((likeliest[one.first],))
                else:
                    found[one.first] = _verify(one, likeliest[one.first :])
        self._sample_prefiltered([one for one in work if one.first not in found], logits, found)
        if others := [one for one in work if one.first not in found]:
            results = self._run_chains(others)
            found.update((one.first, result) for one, result in zip(others, results, strict=True))
        by_sequence = {one.row.seq_id: found[one.first] for one in work}
        return tuple(by_sequence.get(row.seq_id, _NOTHING) for row in rows)

    def _sample_scored(self, rows: Sequence[Row], logits: Logits) -> tuple[RowResult, ...]:
        """Find the log-probabilities that rows want of given tokens; then sample from their other lines."""
        scores: list[tuple[TokenLogprob, ...]] = []
        outputs: list[int] = []
        first = 0
        for row in rows:
            pairs = zip(logits[first : first + len(row.scored)], row.scored, strict=True)
            scores.append(tuple(log_probabilities(line, token, row.scored_top) for line, token in pairs))
            first += len(row.scored)
            outputs += range(first, first + row.outputs)
            first += row.outputs
        results = self.sample([row._replace(scored=()) for row in rows], logits[outputs])
        return tuple(result._replace(scored=scored) for result, scored in zip(results, scores, strict=True))

    def _sample_prefiltered(self, work: Sequence[_Work], logits: Logits, found: dict[int, RowResult]) -> None:
        """Rows whose chains start with a prefilter are filtered together."""
        max_top_k = logits.shape[1] // NARROWING
        narrow, prefilters = [], []
        for one in work:
            prefilter = one.sampler.prefilter
            narrows = prefilter.exists and not prefilter.adjusts and prefilter.top_k < max_top_k
            if narrows and one.row.mask is None:
                narrow.append(one)
                prefilters += [(prefilter.top_k, prefilter.gap)] * one.row.outputs
        scan = self.scan
        if not prefilters or not isinstance(scan, NativeLogitScan):
            return
        started = time.perf_counter()
        if len(prefilters) < len(logits):
            logits = logits[[one.first + place for one in narrow for place in range(one.row.outputs)]]
        try:
            chains = [one.sampler.chain.pointer for one in narrow if one.sampler.chain is not None]
            arrays = scan.candidates(logits, prefilters)
        except Exception:
            log.exception("the candidates of %d rows could not be found", len(narrow))
            return
        if arrays is None:
            return
        apply, at_once = self._api.llama_sampler_apply, len(prefilters) == len(narrow)
        tokens = scan.apply(apply, chains, arrays) if at_once else ()  # there are no drafts
        each_s = (time.perf_counter() - started) / len(prefilters)
        first = 0
        for one, chain in zip(narrow, chains, strict=True):  # without penalties: no token is to be accepted
            here, first = range(first, first + one.row.outputs), first + one.row.outputs
            if at_once and tokens[here[0]] >= 0 and not one.row.logprobs:
                one.sampler.seconds = each_s
                found[one.first] = RowResult((tokens[here[0]],), sample_s=each_s)
                continue
            drawn = (tokens[i] if at_once else apply_chain(apply, chain, arrays[i]) for i in here)
            result = _verify(one, drawn)
            one.sampler.seconds += each_s
            found[one.first] = result._replace(sample_s=result.sample_s + each_s * one.row.outputs)

    def _run_chains(self, work: Sequence[_Work]) -> list[RowResult]:
        """Rows one by one, on several threads where that pays."""
        threads = min(len(self._candidates), len(work))
        expected_s = sum(one.sampler.seconds * one.row.outputs for one in work)
        pays = expected_s > MIN_THREADED_S or sum(one.logits.size for one in work) > MIN_THREADED_LOGITS
        if self._pool is None or threads == 1 or not pays:
            return [_verify(one, _draw(one, self._candidates[0])) for one in work]

        def share(number: int) -> list[RowResult]:
            return [_verify(one, _draw(one, self._candidates[number])) for one in work[number::threads]]

        started = time.perf_counter()
        others = [self._pool.submit(share, number) for number in range(1, threads)]
        shares = [share(0), *(other.result() for other in others)]
        results = [shares[place % threads][place // threads] for place in range(len(work))]
        # They ran at the same time: together they took as long as the step had to wait for them.
        overlap = (time.perf_counter() - started) / max(sum(result.sample_s for result in results), TINY)
        return [result._replace(sample_s=overlap * result.sample_s) for result in results]


def _make_work(rows: Sequence[Row], logits: Logits) -> list[_Work]:
    """The rows that want output. Excluded tokens are taken out of all lines at once: most exclude alike."""
    work = []
    excluding: dict[int, tuple[Tokens, list[int]]] = {}  # by identity: tokens, and lines
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


def _draw(work: _Work, candidates: Candidates) -> Iterator[int]:
    """Sample from each line of a row; -1 where no token is left."""
    sampler, mask = work.sampler, work.row.mask
    for line in work.logits:
        yield best(line, mask) if sampler.chain is None else sampler.sample(line, candidates, mask)


def _verify(work: _Work, sampled: Iterable[int]) -> RowResult:
    """Take token after token from `sampled`, as long as the next draft is what was sampled.

    The last `outputs` tokens of a row are the newest one and the drafts behind it. Each token is sampled as
    it would be without drafts; only how many are sampled in one step differs.
    A failure ends this row, not the step: samplers of other rows have drawn, and cannot again.
    """
    row, started = work.row, time.perf_counter()
    drafts = row.tokens[len(row.tokens) - row.outputs + 1 :]
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    try:
        for place, token in zip(range(row.outputs), sampled, strict=False):
            if token < 0:
                return RowResult(tuple(tokens), tuple(logprobs), error=NOTHING_LEFT)
            tokens.append(token)
            if row.logprobs:
                logprobs.append(log_probabilities(work.original[place], token, row.logprobs))
            if place < len(drafts) and drafts[place] != token:
                break
    except Exception:
        log.exception("a row could not be sampled")
        return RowResult(tuple(tokens), tuple(logprobs), error=FAILED)
    seconds = time.perf_counter() - started
    work.sampler.seconds = seconds / len(tokens)
    return RowResult(tuple(tokens), tuple(logprobs), sample_s=seconds)
