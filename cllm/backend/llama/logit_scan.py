"""The logit scan: the likeliest tokens of each row of a step, found in one pass over all logits.

On a GPU that pass is what the device waits for: 64 rows of a vocabulary of 152,000 are 39 MB. In C, on a few
threads, it takes a fifth of what NumPy takes; Python's threads would spend their time on the GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cllm.backend.llama.library import find
from cllm.build.build import SAMPLING_NAME, sampling_path

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32] | npt.NDArray[np.intp]
NO_TOKENS: npt.NDArray[np.int32] = np.zeros(0, np.int32)
GROUP = 64  # tokens that are looked at by their maximum first
COARSE = 16  # groups that are ordered by their maximum
MAX_CANDIDATES = 4096  # of a row: with more, the prefilter hardly narrows
PART = 1 << 19  # logits: for less, waking a thread costs more than it saves
CHAINS = 8  # sampler chains, likewise
ALONE = 3 << 17  # logits that one thread scans in the time in which others wake up
IDLE_PART = 1 << 15  # least part of what is more than that, with a GPU: no compute thread polls the cores
WAKE_S = 250e-6  # before the device is expected to be done


class Reaching(NamedTuple):
    """The tokens of several rows that reach their row's threshold: row after row, in order of id."""

    ids: Ids
    logits: Logits
    bounds: Ids  # where each row begins, and the end


class LogitScan:
    """In NumPy, on one thread. `prefilters` are pairs of a top-k and a gap, one for each row."""

    def close(self) -> None:
        return

    def wait(self, function: Any, pointer: Any, expected_s: float, size: int) -> None:
        """Call llama.cpp's function that waits for the device, which is expected to be done in a while.

        So many logits are scanned then. A thread that waits in CUDA keeps its core busy.
        """
        function(pointer)

    def likeliest(self, logits: Logits, excluded: npt.NDArray[np.int32] = NO_TOKENS) -> list[int]:
        """The likeliest token of each row; of equals the first. Some are excluded, from `logits`, too."""
        if len(excluded):
            logits[:, excluded] = -np.inf
        found: list[int] = logits.argmax(axis=1).tolist()
        return found

    def apply(self, function: object, chains: Sequence[int], arrays: object) -> list[int] | None:
        """Run a sampler chain over each of several candidate arrays: the tokens that they select, or -1.

        `function` is llama.cpp's, `arrays` are its token data arrays. None: the caller is to do it.
        """
        return None

    def reaching(self, logits: Logits, prefilters: Sequence[tuple[int, float]]) -> Reaching | None:
        """What can survive prefilters that narrow each row, and a few more; None where it may be most of it.

        A vocabulary is dealt to groups as cards are. The n-th best of the groups' maxima is a threshold that
        at least n tokens reach, so the n likeliest all lie in groups whose maximum reaches it. All rows
        together: what NumPy takes for a call would be most of it otherwise.
        """
        rows, size = logits.shape
        groups = size // GROUP
        maxima = logits[:, : groups * GROUP].reshape(rows, GROUP, groups).max(axis=1)
        rest = logits[:, groups * GROUP :]
        thresholds = _thresholds(maxima, rest, prefilters)
        reached, group = np.nonzero(maxima >= thresholds[:, None])
        if len(reached) * GROUP > max(size, rows * MAX_CANDIDATES):
            return None
        members = (reached * size + group)[:, None] + np.arange(0, groups * GROUP, groups)
        flat = logits.ravel()
        places = members[flat[members] >= thresholds[reached][:, None]]
        if rest.shape[1]:
            row, column = np.nonzero(rest >= thresholds[:, None])
            places = np.concatenate((places, row * size + groups * GROUP + column))
        places.sort()
        bounds = np.searchsorted(places, np.arange(rows + 1) * size)
        return Reaching(places % size, flat[places], bounds)


def _thresholds(maxima: Logits, rest: Logits, prefilters: Sequence[tuple[int, float]]) -> Logits:
    """What the logits of each row must reach."""
    # A lower threshold does, too: of maxima of maxima there are fewer to order.
    coarse = maxima.shape[1] // COARSE
    ordered = maxima
    if 2 * max(top_k or 1 for top_k, _ in prefilters) <= coarse:
        ordered = maxima[:, : coarse * COARSE].reshape(-1, COARSE, coarse).max(axis=1)
    kept = [ordered.shape[1] - (top_k or 1) for top_k, _ in prefilters]
    ordered = np.partition(ordered, sorted(set(kept)), axis=1)
    thresholds: Logits = ordered[np.arange(len(prefilters)), kept]
    if any(gap for _, gap in prefilters):
        best = maxima.max(axis=1) if not rest.shape[1] else np.maximum(maxima.max(axis=1), rest.max(axis=1))
        gaps = np.array([gap for _, gap in prefilters], np.float32)
        thresholds = np.where(gaps > 0, best - gaps, thresholds)
    return thresholds


class NativeLogitScan(LogitScan):
    """In C, on several threads: see cllm/build/sampling.c. Owner thread only."""

    def __init__(self, library: Path, threads: int, part: int = PART) -> None:
        """`part` is the least for each thread. Raises OSError where the library cannot be loaded."""
        self._api = ctypes.CDLL(str(library))
        if not hasattr(self._api, "cllm_wait"):
            raise OSError("it was built for an earlier cllm")
        self._api.cllm_pool_new.restype = ctypes.c_void_p
        self._threads, self._part = threads, part
        self._pool = ctypes.c_void_p(self._api.cllm_pool_new(threads))
        if not self._pool:
            raise OSError("no memory for the threads that sample")
        self._ids = np.zeros((0, MAX_CANDIDATES), np.int32)
        self._values = np.zeros((0, MAX_CANDIDATES), np.float32)
        self._best, self._tokens = np.zeros(0, np.float32), np.zeros(0, np.int32)
        self._last: tuple[Logits, npt.NDArray[np.int32], tuple[Any, ...]] | None = None

    def close(self) -> None:
        if self._pool:
            self._api.cllm_pool_free(self._pool)
            self._pool = ctypes.c_void_p()

    def wait(self, function: Any, pointer: Any, expected_s: float, size: int) -> None:
        threads = self._count_threads(size)
        if expected_s <= 0 or threads == 1:
            function(pointer)
            return
        asleep = ctypes.c_int64(int(1e9 * (expected_s - WAKE_S)))
        self._api.cllm_wait(self._pool, ctypes.c_int(threads), asleep, function, ctypes.c_void_p(pointer))

    def likeliest(self, logits: Logits, excluded: npt.NDArray[np.int32] = NO_TOKENS) -> list[int]:
        last = self._last  # the context's logits are the same view as long as as many rows are computed
        if last is None or last[0] is not logits or last[1] is not excluded:
            self._last = last = logits, excluded, self._arguments(logits, excluded)
        self._api.cllm_argmax(*last[2])
        found: list[int] = self._tokens[: len(logits)].tolist()
        return found

    def _arguments(self, logits: Logits, excluded: npt.NDArray[np.int32]) -> tuple[Any, ...]:
        """Of `cllm_argmax`. To make them takes longer than the pass over a small vocabulary."""
        rows = len(logits)
        threads, *shape = self._shape(logits)
        parts = -(-logits.shape[1] // self._part) if threads > 1 else 1
        self._best, self._tokens = np.empty(rows * parts, np.float32), np.empty(rows * parts, np.int32)
        excludes = _pointer(excluded), ctypes.c_int(len(excluded))
        results = ctypes.c_int(parts), _pointer(self._best), _pointer(self._tokens)
        return self._pool, ctypes.c_int(threads), *shape, *excludes, *results

    def reaching(self, logits: Logits, prefilters: Sequence[tuple[int, float]]) -> Reaching | None:
        rows = len(logits)
        if len(self._ids) < rows:
            self._ids = np.zeros((rows, MAX_CANDIDATES), np.int32)
            self._values = np.zeros((rows, MAX_CANDIDATES), np.float32)
        counts = np.empty(rows, np.int32)
        top_k = np.array([top_k for top_k, _ in prefilters], np.int32)
        gaps = np.array([gap for _, gap in prefilters], np.float32)
        filters = _pointer(top_k), _pointer(gaps), ctypes.c_int(MAX_CANDIDATES)
        results = _pointer(self._ids), _pointer(self._values), _pointer(counts)
        threads, *shape = self._shape(logits)
        threads = min(threads, len(logits))
        self._api.cllm_reach(self._pool, ctypes.c_int(threads), *shape, *filters, *results)
        if counts.min() < 0:
            return None
        bounds = np.concatenate((np.zeros(1, np.intp), np.cumsum(counts, dtype=np.intp)))
        taken = np.arange(counts.max()) < counts[:, None]
        widest = taken.shape[1]
        return Reaching(self._ids[:rows, :widest][taken], self._values[:rows, :widest][taken], bounds)

    def apply(self, function: object, chains: Sequence[int], arrays: object) -> list[int] | None:
        rows = len(chains)
        tokens = np.empty(rows, np.int32)
        pointers = (ctypes.c_void_p * rows)(*chains)
        threads = ctypes.c_int(max(1, min(self._threads, rows // CHAINS)))
        self._api.cllm_apply(
            self._pool, threads, function, pointers, arrays, ctypes.c_int(rows), _pointer(tokens)
        )
        found: list[int] = tokens.tolist()
        return found

    def _shape(self, logits: Logits) -> tuple[int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int]:
        """Threads, logits, rows and width."""
        assert logits.flags.c_contiguous and logits.dtype == np.float32
        rows, width = logits.shape
        return (
            self._count_threads(logits.size),
            _pointer(logits),
            ctypes.c_int(rows),
            ctypes.c_int(width),
        )

    def _count_threads(self, size: int) -> int:
        """That scan so many logits together."""
        return max(1, min(self._threads, size // self._part)) if size > ALONE else 1


def _pointer(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def make_logit_scan(threads: int, part: int = PART, library: Path | None = None) -> LogitScan:
    """The fast one, where `cllm build` has compiled it or the library comes with it."""
    for path in (library,) if library is not None else (sampling_path(), find() / SAMPLING_NAME):
        with suppress(OSError):
            return NativeLogitScan(path, threads, part)
    return LogitScan()
