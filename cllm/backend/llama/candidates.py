"""The candidates a sampler chain works on: all of the vocabulary, or exactly those that can matter."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np

from cllm.backend.llama.logit_scan import GROUP, Ids, Logits, LogitScan
from cllm.types import SamplingParams, TokenMask

_SCAN = LogitScan()  # of one row: threads would not pay
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_CANDIDATE_ARRAY = np.dtype(
    [("data", np.uintp), ("size", np.uintp), ("selected", np.int64), ("sorted", np.uint64)]
)  # llama_token_data_array; its last member is a byte and padding


NOTHING_LEFT = "the samplers left no token to sample from"


class NothingLeft(ValueError):
    """No token can be sampled; the message says why."""


class TopKPrefilter:
    """What a chain's first sampler keeps, if a threshold can do that before it, for all rows at once.

    `top_k`: the `top_k` likeliest tokens. `gap`: those within `gap` of the best logit. Neither is set where
    the first sampler looks at every token, so that none may be left out.

    Penalties and biases come before it. Of the tokens that they adjust none is left out; of the others the
    `top_k` likeliest are among the `top_k` + n likeliest of all, where n are adjusted.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.top_k = 0
        self.gap = 0.0
        self.exists = False
        self.adjusts = params.adjusts_logits  # then it holds together with the adjusted tokens only
        if params.greedy or params.mirostat or params.top_n_sigma >= 0:
            return
        if params.temperature <= 0:
            self.top_k = 1
        elif params.top_k > 0:
            self.top_k = params.top_k
        elif not self.adjusts and params.typical_p >= 1 and params.top_p >= 1 and params.min_p > 0:
            self.gap = -math.log(params.min_p) + 1e-3  # the sampler itself prefilters to the last bit
        self.exists = bool(self.top_k or self.gap)

    def narrows(self, vocabulary_size: int) -> bool:
        """It leaves out most of such a vocabulary, if not all tokens are alike."""
        return self.exists and self.top_k < vocabulary_size // GROUP // 2

    def widened(self, adjusted: int) -> TopKPrefilter:
        """The same where so many tokens are adjusted before it."""
        found = copy(self)
        found.top_k += adjusted
        return found


class Candidates:
    """Room for the candidates of one row at a time. Each thread that samples has its own."""

    NARROW = 4096  # so few allowed tokens are taken as they are

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
        """Run a chain over a row of logits; returns the token it selected. The row is left as it is.

        `adjusted`: the tokens whose logits the chain may change; None: any.
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
        self._api.llama_sampler_apply(chain, ctypes.byref(array))
        if array.selected < 0:
            raise NothingLeft(NOTHING_LEFT)
        return int(array.data[array.selected].id)

    def _prefiltered(
        self, logits: Logits, prefilter: TopKPrefilter, mask: TokenMask | None, adjusted: Ids | None
    ) -> Ids | None:
        """A superset of what survives the chain's first sampler, in order of id; None: all of them."""
        if mask is not None and prefilter.exists and np.count_nonzero(mask) <= self.NARROW:
            return np.flatnonzero(mask)
        if prefilter.adjusts:
            if adjusted is None:
                return None
            prefilter = prefilter.widened(len(adjusted))
        if not prefilter.narrows(len(logits)):
            return None
        if mask is not None:
            logits = np.where(mask, logits, np.float32(-np.inf))
        found = _SCAN.reaching(logits[None], [(prefilter.top_k, prefilter.gap)])
        if found is None or adjusted is None:
            return found.ids if found is not None else None
        return np.union1d(found.ids, adjusted if mask is None else adjusted[mask[adjusted]])


class BatchCandidates:
    """Room for the candidates of many rows, prefiltered together."""

    def __init__(self, api: Any, scan: LogitScan) -> None:
        self._api = api
        self._scan = scan
        self._data = np.zeros(0, _CANDIDATE)
        self._arrays: Any = ()
        self._view = np.zeros(0, _CANDIDATE_ARRAY)

    def fill(self, logits: Logits, prefilters: Sequence[TopKPrefilter]) -> bool:
        """Prepare `sample` for these rows; False where they are to be sampled one by one."""
        found = self._scan.reaching(logits, [(each.top_k, each.gap) for each in prefilters])
        if found is None:
            return False
        if len(self._arrays) < len(prefilters):
            self._arrays = (self._api.llama_token_data_array * len(prefilters))()
            self._view = np.frombuffer(self._arrays, _CANDIDATE_ARRAY)
        if len(self._data) < len(found.ids):
            self._data = np.zeros(2 * len(found.ids), _CANDIDATE)
        data, view = self._data[: len(found.ids)], self._view[: len(prefilters)]
        data["id"] = found.ids
        data["logit"] = found.logits
        view["data"] = self._data.ctypes.data + _CANDIDATE.itemsize * found.bounds[:-1]
        view["size"] = np.diff(found.bounds)
        view["selected"] = -1
        view["sorted"] = 0
        return True

    def sample_all(self, chains: Sequence[Any]) -> list[int] | None:
        """Run a chain over the candidates of each row, once: the tokens, -1 where none is left.

        None: `sample` is to do it, row by row.
        """
        return self._scan.apply(self._api.llama_sampler_apply, chains, self._arrays)

    def sample(self, chain: Any, row: int) -> int:
        """Run a chain over the candidates of a row, once; returns the token it selected."""
        array = self._arrays[row]
        self._api.llama_sampler_apply(chain, ctypes.byref(array))
        if array.selected < 0:
            raise NothingLeft(NOTHING_LEFT)
        return int(array.data[array.selected].id)


def best(logits: Logits, mask: TokenMask | None) -> int:
    """The likeliest allowed token; ties go to the lowest id. Raises NothingLeft."""
    token = int(logits.argmax())
    if mask is None or mask[token]:
        return token
    allowed = np.flatnonzero(mask)
    if not len(allowed):
        raise NothingLeft("no token is allowed here")
    return int(allowed[logits[allowed].argmax()])
