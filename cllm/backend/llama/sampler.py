"""The sampler of a sequence: argmax where that is enough, llama.cpp's sampler chain otherwise."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from cllm.backend.llama.candidates import Candidates, TopKPrefilter
from cllm.backend.llama.library import DeferredFrees, Owned
from cllm.backend.llama.logit_scan import Logits
from cllm.types import SamplingParams, TokenLogprob, TokenMask

MAX_ADJUSTED = 512  # tokens: with more, the prefilter hardly narrows


class LlamaSampler:
    """The sampler of one sequence. A greedy one needs no chain: then `chain` is None."""

    def __init__(
        self,
        api: Any,
        params: SamplingParams,
        chain: Owned | None,
        excluded: npt.NDArray[np.int32],
        context: int,
    ) -> None:
        self._api = api
        self.params = params
        self.chain = chain
        self.seconds = 0.0  # of its last token
        penalties = params.penalty_last_n if params.penalises else 0
        dry = params.dry_penalty_last_n if params.dry_multiplier > 0 else 0
        self._lookback = max(get_lookback(penalties, context), get_lookback(dry, context))
        self._biased = [token for token, _ in params.logit_bias]
        self._recent: deque[int] | None = None  # the history, if it is short: its tokens are adjusted
        if params.adjusts_logits and self._lookback + len(self._biased) <= MAX_ADJUSTED:
            self._recent = deque(maxlen=self._lookback)
        self.prefilter = TopKPrefilter(params)
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
        """Sample an allowed token from a row and accept it. The row is left as it is."""
        assert self.chain is not None
        adjusted = None
        if self._recent is not None:
            adjusted = np.unique(np.array([*self._recent, *self._biased], np.int32))
        token = candidates.sample(self.chain.pointer, logits, self.prefilter, mask, adjusted)
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
    """How many tokens a penalty looks back: -1 is the whole context, and no more than that is kept."""
    return context if count < 0 else min(count, context)


def build_chain(
    api: Any, params: SamplingParams, *, dry: DryPrototypes, vocabulary_size: int, context: int
) -> Any:
    """A new chain for `params`, in the order `SamplingParams` documents; the caller owns it."""
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())

    def add(sampler: Any) -> None:
        api.llama_sampler_chain_add(chain, sampler)

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
        top = np.argpartition(logits, -count)[-count:]
        top = top[np.argsort(-logits[top], kind="stable")]
    highest = float(logits[top[0]])
    normaliser = highest + float(np.log(np.exp(logits - logits[top[0]]).sum(dtype=np.float64)))
    return TokenLogprob(
        token,
        float(logits[token]) - normaliser,
        tuple((int(index), float(logits[index]) - normaliser) for index in top),
    )
