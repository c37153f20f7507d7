"""The batch sampler: neither the top-k prefilter nor threads change a choice."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cllm.backend.base import Row
from cllm.backend.llama.candidates import (
    NARROWING,
    Candidates,
    NativeLogitScan,
    TopKPrefilter,
    best,
    make_logit_scan,
)
from cllm.backend.llama.library import DeferredFrees, Owned, load
from cllm.backend.llama.runner import LlamaRunner
from cllm.backend.llama.sampler import (
    MIN_THREADED_LOGITS,
    BatchSampler,
    DryPrototypes,
    LlamaSampler,
    build_chain,
)
from cllm.types import SamplingParams, TokenMask

SIZE = 50_000
CUTTING: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 1000, "top_p": 1.0, "min_p": 0.0},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.05},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.9, "temperature": 2.0},
    {"top_k": 40, "typical_p": 0.5},
    {"top_k": 20, "xtc_probability": 0.5, "xtc_threshold": 0.05},
]
LOOKING_AT_ALL: list[dict[str, Any]] = [
    {"top_k": 0},
    {"top_n_sigma": 1.0},
    {"mirostat": 2},
    {"temperature": 0.0},
    {"repetition_penalty": 1.2, "top_k": 0},
]
ADJUSTING: list[dict[str, Any]] = [
    {"repetition_penalty": 1.2},
    {"repetition_penalty": 0.5, "top_k": 100},
    {"frequency_penalty": -2.0, "penalty_last_n": 200},
    {"presence_penalty": 2.0, "temperature": 0.0},
    {"logit_bias": ((5, 100.0), (9, -100.0), (49_999, 3.0))},
    {"logit_bias": ((5, -100.0),), "temperature": 0.0},
]


def rows(seed: int, count: int, spread: float) -> npt.NDArray[np.float32]:
    drawn = np.random.default_rng(seed).normal(scale=spread, size=(count, SIZE))
    return drawn.astype(np.float32)


def chain_of(api: Any, params: SamplingParams) -> Any:
    dry: Any = DryPrototypes  # none of these chains asks for one
    return build_chain(api, params, dry=dry, vocabulary_size=SIZE, context=512)


@pytest.mark.parametrize("masked", ["free", "wide", "narrow", "one"])
@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0, 12.0])
@pytest.mark.parametrize("sampling", CUTTING, ids=str)
def test_the_prefilter_changes_no_choice(sampling: dict[str, Any], spread: float, masked: str) -> None:
    api = load().api
    params = SamplingParams(**{"seed": 3, **sampling})
    cut, nothing_cut = TopKPrefilter(params), TopKPrefilter(SamplingParams(temperature=0))
    assert cut.exists
    assert not nothing_cut.exists
    with_cut, without = chain_of(api, params), chain_of(api, params)
    candidates = Candidates(api, SIZE)
    for number, logits in enumerate(rows(7, 12, spread)):
        mask = mask_of(masked, number)
        expected = candidates.sample(without, logits.copy(), nothing_cut, mask)
        assert candidates.sample(with_cut, logits, cut, mask) == expected
    api.llama_sampler_free(with_cut)
    api.llama_sampler_free(without)


@pytest.mark.parametrize("times", [1, 12])  # with many, chains run on several threads
@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_rows_prefiltered_together_choose_what_each_chooses_alone(spread: float, times: int) -> None:
    api = load().api
    params = [SamplingParams(**{"seed": number, **sampling}) for number, sampling in enumerate(CUTTING)]
    params = [each for each in params if each.top_k < SIZE // NARROWING] * times
    assert len(params) == times * (len(CUTTING) - 1)
    scan, alone = make_logit_scan(4), Candidates(api, SIZE)
    assert isinstance(scan, NativeLogitScan)
    nothing_cut = TopKPrefilter(SamplingParams(temperature=0))
    chains = [(chain_of(api, each), chain_of(api, each)) for each in params]
    cuts = [(cut.top_k, cut.gap) for cut in map(TopKPrefilter, params)]
    for seed in range(5):
        logits = rows(seed, len(params), spread)
        logits[:, [0, 5, SIZE - 1]] = -np.inf  # as excluded ones are
        arrays = scan.candidates(logits, cuts)
        if arrays is None:
            assert spread < 1  # where all are alike, nearly all reach any threshold
            return
        pairs = zip(chains, logits, strict=True)
        expected = [alone.sample(one, row.copy(), nothing_cut) for (one, _), row in pairs]
        assert scan.apply(api.llama_sampler_apply, [other for _, other in chains], arrays) == expected
    scan.close()
    for pair in chains:
        for chain in pair:
            api.llama_sampler_free(chain)


def test_c_and_llama_cpp_mean_the_same_by_an_array_of_candidates() -> None:
    scan = make_logit_scan(1)
    assert isinstance(scan, NativeLogitScan)
    assert scan._api.cllm_candidates_size() == ctypes.sizeof(load().api.llama_token_data_array)
    scan.close()


def mask_of(kind: str, seed: int) -> TokenMask | None:
    share = {"wide": 0.9, "narrow": 0.001}.get(kind)
    if share is not None:
        mask: TokenMask = np.random.default_rng(seed).random(SIZE) < share
        return mask
    return np.arange(SIZE) == seed if kind == "one" else None


@pytest.mark.parametrize("masked", ["free", "wide", "narrow"])
@pytest.mark.parametrize("sampling", ADJUSTING, ids=str)
def test_the_prefilter_keeps_what_penalties_and_biases_adjust(sampling: dict[str, Any], masked: str) -> None:
    api, frees = load().api, DeferredFrees()
    params = SamplingParams(**{"seed": 3, **sampling})

    def new_sampler() -> LlamaSampler:
        chain = Owned(chain_of(api, params), api.llama_sampler_free, frees)
        return LlamaSampler(api, params, chain, np.zeros(0, np.int32), 512)

    with_cut, without = new_sampler(), new_sampler()
    without._recent = None  # any token may be adjusted: none is left out
    candidates = Candidates(api, SIZE)
    logits = rows(5, 1, 3.0)[0]
    likely = np.argsort(-logits)[:60].tolist()
    for sampler in (with_cut, without):
        sampler.accept([*range(300), *likely])
    for number in range(40):  # the same row again: what was chosen is what is penalised next
        mask = mask_of(masked, number)
        expected = without.sample(logits, candidates, mask)
        assert with_cut.sample(logits, candidates, mask) == expected
    assert with_cut._recent is not None and len(with_cut._recent) in (0, 64, 200)
    with_cut.close()
    without.close()


@pytest.mark.parametrize("sampling", LOOKING_AT_ALL, ids=str)
def test_a_chain_that_looks_at_every_token_gets_every_token(sampling: dict[str, Any]) -> None:
    cut = TopKPrefilter(SamplingParams(**sampling))
    assert not cut.exists


def test_the_best_allowed_token_is_found_and_ties_go_to_the_lowest() -> None:
    logits = np.array([1, 5, 5, 3, 3], np.float32)
    assert best(logits, None) == 1
    assert best(logits, np.array([True, False, True, True, True])) == 2
    assert best(logits, np.array([True, False, False, True, True])) == 3
    assert best(logits, np.zeros(5, np.bool_)) == -1


def test_threads_choose_what_one_thread_chooses(runner: LlamaRunner) -> None:
    count = 2 * MIN_THREADED_LOGITS // SIZE
    logits = rows(1, count, 3.0)
    found = []
    for threads in (1, 3):
        batch_sampler = BatchSampler(load().api, SIZE, threads)
        samplers = [runner.create_sampler(SamplingParams(seed=seed)) for seed in range(count)]
        batch = [Row(index, 0, (0,), 1, sampler) for index, sampler in enumerate(samplers)]
        steps = [batch_sampler.sample(batch, logits.copy()) for _ in range(3)]
        found.append([[result.tokens for result in results] for results in steps])
        for sampler in samplers:
            sampler.close()
        batch_sampler.close()
    assert found[0] == found[1]


def test_drafts_are_taken_as_long_as_they_are_what_would_be_chosen(runner: LlamaRunner) -> None:
    logits = rows(2, 4, 3.0)
    for params in (SamplingParams(temperature=0), SamplingParams(seed=5)):
        batch_sampler = BatchSampler(load().api, SIZE, 1)
        alone = runner.create_sampler(params)
        expected = [
            batch_sampler.sample((Row(0, 0, (0,), 1, alone),), line[None].copy())[0].tokens[0]
            for line in logits
        ]
        for right in range(4):
            sampler = runner.create_sampler(params)
            drafts = [token if place < right else token + 1 for place, token in enumerate(expected[:3])]
            (result,) = batch_sampler.sample((Row(0, 0, (9, *drafts), 4, sampler),), logits.copy())
            assert list(result.tokens) == expected[: right + 1]
            sampler.close()
        alone.close()
        batch_sampler.close()


def test_a_row_that_cannot_be_sampled_ends_alone_and_no_other_draws_twice(runner: LlamaRunner) -> None:
    logits = rows(3, 3, 3.0)
    for threads in (1, 2):
        batch_sampler = BatchSampler(load().api, SIZE, threads)
        samplers = [runner.create_sampler(SamplingParams(seed=seed, top_k=0)) for seed in range(3)]
        undisturbed = [runner.create_sampler(SamplingParams(seed=seed, top_k=0)) for seed in range(3)]
        batch = [Row(index, 0, (0,), 1, sampler) for index, sampler in enumerate(samplers)]
        control = [Row(index, 0, (0,), 1, sampler) for index, sampler in enumerate(undisturbed)]
        expected = [batch_sampler.sample(control, logits.copy()) for _ in range(2)]
        samplers[1].sample = broken  # type: ignore[method-assign, assignment]
        found = [batch_sampler.sample(batch, logits.copy()) for _ in range(2)]
        for one, other in zip(found, expected, strict=True):
            assert [one[0].tokens, one[2].tokens] == [other[0].tokens, other[2].tokens]
            assert one[1].error is not None and one[1].tokens == ()
        for sampler in (*samplers, *undisturbed):
            sampler.close()
        batch_sampler.close()


def broken(*_: object) -> int:
    raise RuntimeError("injected")
