"""The logit scan in C finds what NumPy finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.backend.llama import candidates
from cllm.backend.llama.candidates import PART, Logits, LogitScan, NativeLogitScan, make_logit_scan
from tests.profiles import examples

THREADS = 3


@pytest.fixture(scope="module")
def native() -> Iterator[NativeLogitScan]:
    scan = make_logit_scan(THREADS)
    assert isinstance(scan, NativeLogitScan), "`cllm build` makes it"
    yield scan
    scan.close()


def make_logits(seed: int, rows: int, width: int, levels: int) -> Logits:
    """With few levels there are many equals; some tokens are excluded."""
    random = np.random.default_rng(seed)
    logits = random.integers(0, levels, (rows, width)).astype(np.float32) - levels / 2
    logits[:, random.integers(0, width, 3)] = -np.inf
    return logits


@settings(max_examples=examples(100), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 9),
    width=st.integers(600, 3000),
    levels=st.sampled_from([2, 50, 10**6]),
)
def test_the_likeliest_is_the_first_of_equals(
    native: NativeLogitScan, seed: int, rows: int, width: int, levels: int
) -> None:
    logits = make_logits(seed, rows, width, levels)
    assert native.likeliest(logits) == logits.argmax(axis=1).tolist()


@settings(max_examples=examples(100), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 9),
    width=st.integers(2000, 20000),
    levels=st.sampled_from([50, 10**6]),
    top_k=st.integers(0, 7),
)
def test_the_top_k_and_all_within_the_gap_are_found(
    native: NativeLogitScan, seed: int, rows: int, width: int, levels: int, top_k: int
) -> None:
    logits = make_logits(seed, rows, width, levels)
    gap = 0.0 if top_k else 0.1 * levels
    arrays = native.candidates(logits, [(top_k, gap)] * rows)
    for row, line in enumerate(logits):
        threshold = np.sort(line)[-top_k] if top_k else line.max() - gap
        found = [candidates.reaching(line, top_k, gap)]
        if arrays is not None:  # fewer than a prefilter is good for
            drawn = arrays[row].data[: arrays[row].size]
            assert [each.logit for each in drawn] == line[[each.id for each in drawn]].tolist()
            assert len(drawn) < width / 4
            found.append(np.array([each.id for each in drawn]))
        for ids in found:
            assert (np.diff(ids) > 0).all()
            assert set(np.flatnonzero(line >= threshold)) <= set(ids.tolist())


def test_many_passes_on_all_threads(native: NativeLogitScan) -> None:
    logits = make_logits(1, 8, 2 * THREADS * PART // 8, 10**6)
    expected = logits.argmax(axis=1).tolist()
    assert all(native.likeliest(logits) == expected for _ in range(200))


def test_without_the_library_numpy_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("find", "sampling_path"):
        monkeypatch.setattr(candidates, name, lambda: tmp_path)
    assert type(make_logit_scan(THREADS)) is LogitScan
