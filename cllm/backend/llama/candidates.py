"""Candidates: the tokens of each row that can matter to its sampler chain, found in one pass over all logits.

On a GPU that pass is what the device waits for: 64 rows of a vocabulary of 152,000 are 39 MB. In C, on a few
threads, it takes a fifth of what NumPy takes; Python's threads would spend their time on the GIL.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cllm.backend.llama.library import DECLARED, find
from cllm.build.build import SAMPLING_NAME, sampling_path
from cllm.types import SamplingParams, TokenMask

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32] | npt.NDArray[np.intp]
Tokens = npt.NDArray[np.int32]
NO_TOKENS: Tokens = np.zeros(0, np.int32)
GROUP = 64  # tokens that are looked at by their maximum first
NARROWING = 2 * GROUP  # a prefilter narrows if it keeps less than this part of a vocabulary
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


def apply_chain(function: Any, chain: Any, array: Any) -> int:
    """Run a chain with llama.cpp's function over an array of candidates: the token it selects, or -1."""
    function(chain, ctypes.byref(array))
    return int(array.data[array.selected].id) if array.selected >= 0 else -1


class LogitScan:
    """In NumPy, on one thread."""

    def close(self) -> None:
        return

    def wait(self, function: Any, pointer: Any, expected_s: float, size: int) -> None:
        """Call llama.cpp's function that waits for the device, expected to be done in `expected_s`.

        `size` logits are scanned then. A thread that waits in CUDA keeps its core busy.
        """
        function(pointer)

    def likeliest(self, logits: Logits, excluded: Tokens | None = None) -> list[int]:
        """The likeliest token of each row; of equals the first. Some are excluded, from `logits`, too."""
        if excluded is not None:
            logits[:, excluded] = -np.inf
        found: list[int] = logits.argmax(axis=1).tolist()
        return found


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
        self._make_room(1)

    def _make_room(self, rows: int) -> None:
        """Memory for the candidates of `rows` rows."""
        self._ids = np.zeros((rows, MAX_CANDIDATES), np.int32)
        self._values = np.zeros((rows, MAX_CANDIDATES), np.float32)
        self._counts = np.zeros(rows, np.int32)
        self._results = tuple(each.ctypes.data for each in (self._ids, self._values, self._counts))
        self._data = np.zeros((rows, MAX_CANDIDATES), _CANDIDATE)
        self._begins = self._data.ctypes.data + self._data.strides[0] * np.arange(rows, dtype=np.uintp)
        self._arrays = (DECLARED.types["llama_token_data_array"] * rows)()
        self._view = np.frombuffer(memoryview(self._arrays).cast("B"), _CANDIDATE_ARRAY)

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

    def likeliest(self, logits: Logits, excluded: Tokens | None = None) -> list[int]:
        assert logits.dtype == np.float32
        rows, width = logits.shape
        threads = self._count_threads(logits.size)
        parts = -(-width // self._part) if threads > 1 else 1
        best, tokens = (c_float * (rows * parts))(), (c_int32 * (rows * parts))()
        excludes: tuple[int | None, int] = None, 0
        if excluded is not None and len(excluded):
            excludes = excluded.ctypes.data, len(excluded)
        shape = self._pool, threads, byref(c_float.from_buffer(logits.data)), rows, width
        self._api.cllm_argmax(*shape, *excludes, parts, best, tokens)
        found: list[int] = tokens[:rows]
        return found

    def candidates(self, logits: Logits, prefilters: Sequence[tuple[int, float]]) -> Any:
        """An array of candidates for each row, to be used once; None where rows are to be sampled one by one.

        Each holds what can survive the row's prefilter, a top-k and a gap that narrow it, in order of id.
        """
        assert logits.dtype == np.float32
        rows, width = logits.shape
        if len(self._counts) < rows:
            self._make_room(rows)
        threads = min(self._count_threads(logits.size), rows)
        shape = self._pool, threads, byref(c_float.from_buffer(logits.data)), rows, width
        top_k, gaps = zip(*prefilters, strict=True)
        filters = (c_int32 * rows)(*top_k), (c_float * rows)(*gaps), MAX_CANDIDATES
        self._api.cllm_reach(*shape, *filters, *self._results)
        counts = self._counts[:rows]
        if counts.min() < 0:
            return None
        data, view = self._data[:rows, : counts.max()], self._view[:rows]
        data["id"], data["logit"] = self._ids[:rows, : counts.max()], self._values[:rows, : counts.max()]
        view["data"], view["size"] = self._begins[:rows], counts
        view["selected"], view["sorted"] = -1, 0
        return self._arrays

    def apply(self, function: Any, chains: Sequence[int], arrays: Any) -> list[int]:
        """Run a sampler chain over each array of candidates: the tokens that they select, or -1.

        `function` is llama.cpp's.
        """
        rows = len(chains)
        tokens = (c_int32 * rows)()
        threads = max(1, min(self._threads, rows // CHAINS))
        self._api.cllm_apply(self._pool, threads, function, (c_void_p * rows)(*chains), arrays, rows, tokens)
        return tokens[:]

    def _count_threads(self, size: int) -> int:
        """Number of threads that scan `size` logits together: more than one only beyond `ALONE`."""
        return max(1, min(self._threads, size // self._part)) if size > ALONE else 1


def make_logit_scan(threads: int, part: int = PART) -> LogitScan:
    """The fast one, where `cllm build` has compiled it or the library comes with it."""
    for path in (sampling_path(), find() / SAMPLING_NAME):
        with suppress(OSError):
            return NativeLogitScan(path, threads, part)
    return LogitScan()


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
        # Adaptive-p learns from what is drawn: its chain must see each token that is accepted.
        if not (params.greedy or params.mirostat or params.top_n_sigma >= 0 or params.adaptive_target >= 0):
            if params.temperature <= 0:
                self.top_k = 1
            elif params.top_k > 0:
                self.top_k = params.top_k
            elif not self.adjusts and params.typical_p >= 1 and params.top_p >= 1 and params.min_p > 0:
                self.gap = -math.log(params.min_p) + 1e-3  # the sampler itself prefilters to the last bit
        self.exists = bool(self.top_k or self.gap)


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
        ids: Ids = self._ids
        top_k = prefilter.top_k + (len(adjusted) if adjusted is not None else 0)
        unknown = prefilter.adjusts and adjusted is None
        if prefilter.exists and mask is not None and np.count_nonzero(mask) <= self.NARROW:
            ids = np.flatnonzero(mask)
        else:
            if mask is not None:
                logits = np.where(mask, logits, np.float32(-np.inf))
            if prefilter.exists and not unknown and top_k < len(logits) // NARROWING:
                ids = reaching(logits, top_k, prefilter.gap)
                if adjusted is not None:
                    ids = np.union1d(ids, adjusted if mask is None else adjusted[mask[adjusted]])
        data = self._data[: len(ids)]
        data["id"], data["logit"] = ids, logits if ids is self._ids else logits[ids]
        array = self._api.llama_token_data_array(data=self._pointer, size=len(ids), selected=-1, sorted=False)
        return apply_chain(self._api.llama_sampler_apply, chain, array)


def reaching(logits: Logits, top_k: int, gap: float) -> Ids:
    """The tokens of a row that can survive a prefilter which narrows it, and a few more, in order of id.

    A vocabulary is dealt to groups as cards are. The n-th best of the groups' maxima is a threshold that at
    least n tokens reach, so the n likeliest all lie in groups whose maximum reaches it.
    """
    groups = len(logits) // GROUP
    maxima = logits[: groups * GROUP].reshape(GROUP, groups).max(axis=0)
    rest = logits[groups * GROUP :]
    if gap:
        threshold = max(maxima.max(), rest.max(initial=-np.inf)) - np.float32(gap)
    else:
        # A lower threshold does, too: of maxima of maxima there are fewer to order.
        coarse = groups // COARSE
        dealt = maxima[: coarse * COARSE].reshape(COARSE, coarse) if 2 * top_k <= coarse else maxima[None]
        ordered = dealt.max(axis=0)
        threshold = np.partition(ordered, len(ordered) - top_k)[len(ordered) - top_k]
    members = np.flatnonzero(maxima >= threshold)[:, None] + np.arange(0, groups * GROUP, groups)
    found: npt.NDArray[np.intp] = members[logits[members] >= threshold]
    if len(rest):
        found = np.concatenate((found, groups * GROUP + np.flatnonzero(rest >= threshold)))
    found.sort()
    return found


def best(logits: Logits, mask: TokenMask | None) -> int:
    """The likeliest allowed token; ties go to the lowest id. -1 where none is allowed."""
    token = int(logits.argmax())
    if mask is None or mask[token]:
        return token
    allowed = np.flatnonzero(mask)
    return int(allowed[logits[allowed].argmax()]) if len(allowed) else -1
