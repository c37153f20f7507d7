"""Candidates: the tokens of each row that can matter to its sampler chain, found in one pass over all logits.

On a GPU that pass is what the device waits for: 64 rows of a vocabulary of 152,000 are 39 MB. In C, on a few
threads, it takes a fifth of what NumPy takes; Python's threads would spend their time on the GIL.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from contextlib import suppress
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cllm.backend.llama.library import find
from cllm.build.build import SAMPLING_NAME, sampling_path
from cllm.types import SamplingParams, TokenMask

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
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_CANDIDATE_ARRAY = np.dtype(
    [("data", np.uintp), ("size", np.uintp), ("selected", np.int64), ("sorted", np.uint64)]
)  # llama_token_data_array; its last member is a byte and padding
_SHAPE = (c_void_p, c_int, c_void_p, c_int, c_int)  # pool, threads, logits, rows, width
_SIGNATURES = {
    "cllm_pool_new": (c_int,),
    "cllm_pool_free": (c_void_p,),
    "cllm_wait": (c_void_p, c_int, c_int64, c_void_p, c_void_p),
    "cllm_argmax": (*_SHAPE, c_void_p, c_int, c_int, c_void_p, c_void_p),
    "cllm_reach": (*_SHAPE, c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_void_p),
    "cllm_apply": (c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_int, c_void_p),
}  # of cllm/build/sampling.c


class Reaching(NamedTuple):
    """The tokens of several rows that reach their row's threshold: row after row, in order of id."""

    ids: Ids
    logits: Logits
    bounds: Ids  # where each row begins, and the end


def apply_chain(function: Any, chain: Any, array: Any) -> int:
    """Run a chain with llama.cpp's function over an array of candidates: the token it selects, or -1."""
    function(chain, ctypes.byref(array))
    return int(array.data[array.selected].id) if array.selected >= 0 else -1


class LogitScan:
    """In NumPy, on one thread. `prefilters` are pairs of a top-k and a gap, one for each row."""

    def close(self) -> None:
        return

    def wait(self, function: Any, pointer: Any, expected_s: float, size: int) -> None:
        """Call llama.cpp's function that waits for the device, expected to be done in `expected_s`.

        `size` logits are scanned then. A thread that waits in CUDA keeps its core busy.
        """
        function(pointer)

    def likeliest(self, logits: Logits, excluded: npt.NDArray[np.int32] = NO_TOKENS) -> list[int]:
        """The likeliest token of each row; of equals the first. Some are excluded, from `logits`, too."""
        if len(excluded):
            logits[:, excluded] = -np.inf
        found: list[int] = logits.argmax(axis=1).tolist()
        return found

    def apply(self, function: Any, chains: Sequence[int], arrays: Any) -> list[int]:
        """Run a sampler chain over each of several candidate arrays: the tokens that they select, or -1.

        `function` is llama.cpp's, `arrays` are its token data arrays.
        """
        return [apply_chain(function, chain, arrays[place]) for place, chain in enumerate(chains)]

    def reaching(self, logits: Logits, prefilters: Sequence[tuple[int, float]]) -> Reaching | None:
        """Find what can survive prefilters that narrow each row, and a few more; None where that may be most.

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
    """The least logit of each row that can survive."""
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
        for name, parameters in _SIGNATURES.items():
            getattr(self._api, name).argtypes = parameters
        self._api.cllm_pool_new.restype = c_void_p
        self._threads, self._part = threads, part
        self._pool = self._api.cllm_pool_new(threads)
        if not self._pool:
            raise OSError("no memory for the threads that sample")
        self._ids = np.zeros((0, MAX_CANDIDATES), np.int32)
        self._values = np.zeros((0, MAX_CANDIDATES), np.float32)

    def close(self) -> None:
        if self._pool:
            self._api.cllm_pool_free(self._pool)
            self._pool = None

    def wait(self, function: Any, pointer: Any, expected_s: float, size: int) -> None:
        threads = self._count_threads(size)
        if expected_s <= 0 or threads == 1:
            function(pointer)
        else:
            self._api.cllm_wait(self._pool, threads, int(1e9 * (expected_s - WAKE_S)), function, pointer)

    def likeliest(self, logits: Logits, excluded: npt.NDArray[np.int32] = NO_TOKENS) -> list[int]:
        assert logits.flags.c_contiguous and logits.dtype == np.float32
        rows, width = logits.shape
        threads = self._count_threads(logits.size)
        parts = -(-width // self._part) if threads > 1 else 1
        best, tokens = np.empty(rows * parts, np.float32), np.empty(rows * parts, np.int32)
        shape = self._pool, threads, logits.ctypes.data, rows, width
        excludes, results = (excluded.ctypes.data, len(excluded)), (best.ctypes.data, tokens.ctypes.data)
        self._api.cllm_argmax(*shape, *excludes, parts, *results)
        found: list[int] = tokens[:rows].tolist()
        return found

    def reaching(self, logits: Logits, prefilters: Sequence[tuple[int, float]]) -> Reaching | None:
        assert logits.flags.c_contiguous and logits.dtype == np.float32
        rows, width = logits.shape
        if len(self._ids) < rows:
            self._ids = np.zeros((rows, MAX_CANDIDATES), np.int32)
            self._values = np.zeros((rows, MAX_CANDIDATES), np.float32)
        counts = np.empty(rows, np.int32)
        top_k = np.array([top_k for top_k, _ in prefilters], np.int32)
        gaps = np.array([gap for _, gap in prefilters], np.float32)
        threads = min(self._count_threads(logits.size), rows)
        shape = self._pool, threads, logits.ctypes.data, rows, width
        results = self._ids.ctypes.data, self._values.ctypes.data, counts.ctypes.data
        self._api.cllm_reach(*shape, top_k.ctypes.data, gaps.ctypes.data, MAX_CANDIDATES, *results)
        if counts.min() < 0:
            return None
        bounds = np.concatenate((np.zeros(1, np.intp), np.cumsum(counts, dtype=np.intp)))
        taken = np.arange(counts.max()) < counts[:, None]
        widest = taken.shape[1]
        return Reaching(self._ids[:rows, :widest][taken], self._values[:rows, :widest][taken], bounds)

    def apply(self, function: Any, chains: Sequence[int], arrays: Any) -> list[int]:
        rows = len(chains)
        tokens = np.empty(rows, np.int32)
        threads = max(1, min(self._threads, rows // CHAINS))
        pointers = (c_void_p * rows)(*chains)
        self._api.cllm_apply(self._pool, threads, function, pointers, arrays, rows, tokens.ctypes.data)
        found: list[int] = tokens.tolist()
        return found

    def _count_threads(self, size: int) -> int:
        """Number of threads that scan `size` logits together."""
        return max(1, min(self._threads, size // self._part)) if size > ALONE else 1


def make_logit_scan(threads: int, part: int = PART) -> LogitScan:
    """The fast one, where `cllm build` has compiled it or the library comes with it."""
    for path in (sampling_path(), find() / SAMPLING_NAME):
        with suppress(OSError):
            return NativeLogitScan(path, threads, part)
    return LogitScan()


_SCAN = LogitScan()  # of one row: threads would not pay


class TopKPrefilter:
    """A threshold that does for all rows at once, before a chain, what its first sampler would do.

    `top_k`: the `top_k` likeliest tokens. `gap`: those within `gap` of the best logit. Neither is set where
    the first sampler looks at every token, so that none may be left out.

    Penalties and biases come before it. Of the tokens that they adjust none is left out; of the others the
    `top_k` likeliest are among the `top_k` + n likeliest of all, where n are adjusted.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.top_k = 0
        self.gap = 0.0
        # Where logits are adjusted, it holds together with the adjusted tokens only.
        self.adjusts = bool(params.logit_bias) or params.looks_back
        if not (params.greedy or params.mirostat or params.top_n_sigma >= 0):
            if params.temperature <= 0:
                self.top_k = 1
            elif params.top_k > 0:
                self.top_k = params.top_k
            elif not self.adjusts and params.typical_p >= 1 and params.top_p >= 1 and params.min_p > 0:
                self.gap = -math.log(params.min_p) + 1e-3  # the sampler itself prefilters to the last bit
        self.exists = bool(self.top_k or self.gap)

    def narrows(self, vocabulary_size: int, adjusted: int = 0) -> bool:
        """It leaves out most of such a vocabulary, if not all tokens are alike."""
        return self.exists and self.top_k + adjusted < vocabulary_size // GROUP // 2


class Candidates:
    """Room for the candidates of one row at a time. Each thread that samples has its own."""

    NARROW = 4096  # allowed tokens: up to this number they are taken as they are

    def __init__(self, api: Any, vocabulary_size: int) -> None:
        self._api = api
        self._ids = np.arange(vocabulary_size, dtype=np.int32)
        self._data = np.zeros(vocabulary_size, _CANDIDATE)
        self._pointer = self._data.ctypes.data_as(ctypes.POINTER(api.llama_token_data))

    def sample(
        self,
        chain: Any,
        logits: Logits,
        prefilter: TopKPrefilter,
        mask: TokenMask | None = None,
        adjusted: Ids | None = None,
    ) -> int:
        """Run a chain over a row of logits: the token it selected, or -1. The row is left as it is.

        `adjusted` are the tokens whose logits the chain may change. None stands for any.
        """
        ids = self._prefiltered(logits, prefilter, mask, adjusted)
        if ids is None:
            count = len(self._ids)
            self._data["id"] = self._ids  # the samplers of the row before have moved things about
            self._data["logit"] = logits if mask is None else np.where(mask, logits, -np.inf)
        else:
            count = len(ids)
            data = self._data[:count]
            data["id"] = ids
            data["logit"] = logits[ids]
        array = self._api.llama_token_data_array(data=self._pointer, size=count, selected=-1, sorted=False)
        return apply_chain(self._api.llama_sampler_apply, chain, array)

    def _prefiltered(
        self, logits: Logits, prefilter: TopKPrefilter, mask: TokenMask | None, adjusted: Ids | None
    ) -> Ids | None:
        """A superset of what survives the chain's first sampler, in order of id; None for all of them."""
        if mask is not None and prefilter.exists and np.count_nonzero(mask) <= self.NARROW:
            return np.flatnonzero(mask)
        if prefilter.adjusts and adjusted is None:
            return None
        more = len(adjusted) if prefilter.adjusts and adjusted is not None else 0
        if not prefilter.narrows(len(logits), more):
            return None
        if mask is not None:
            logits = np.where(mask, logits, np.float32(-np.inf))
        found = _SCAN.reaching(logits[None], [(prefilter.top_k + more, prefilter.gap)])
        if found is None or adjusted is None:
            return found.ids if found is not None else None
        return np.union1d(found.ids, adjusted if mask is None else adjusted[mask[adjusted]])


class BatchCandidates:
    """Room for the candidates of many rows, prefiltered together."""

    def __init__(self, api: Any, scan: LogitScan) -> None:
        self._api, self._scan = api, scan
        self._data = np.zeros(0, _CANDIDATE)
        self._arrays: Any = ()
        self._view = np.zeros(0, _CANDIDATE_ARRAY)

    def fill(self, logits: Logits, prefilters: Sequence[TopKPrefilter]) -> Any:
        """A candidate array for each row, to be used once; None where rows are to be sampled one by one."""
        found = self._scan.reaching(logits, [(each.top_k, each.gap) for each in prefilters])
        if found is None:
            return None
        if len(self._arrays) < len(prefilters):
            self._arrays = (self._api.llama_token_data_array * len(prefilters))()
            self._view = np.frombuffer(self._arrays, _CANDIDATE_ARRAY)
        if len(self._data) < len(found.ids):
            self._data = np.zeros(2 * len(found.ids), _CANDIDATE)
        data, view = self._data[: len(found.ids)], self._view[: len(prefilters)]
        data["id"], data["logit"] = found.ids, found.logits
        view["data"] = self._data.ctypes.data + _CANDIDATE.itemsize * found.bounds[:-1]
        view["size"] = np.diff(found.bounds)
        view["selected"], view["sorted"] = -1, 0
        return self._arrays


def best(logits: Logits, mask: TokenMask | None) -> int:
    """The likeliest allowed token; ties go to the lowest id. -1 where none is allowed."""
    token = int(logits.argmax())
    if mask is None or mask[token]:
        return token
    allowed = np.flatnonzero(mask)
    return int(allowed[logits[allowed].argmax()]) if len(allowed) else -1
