"""The candidates a sampler chain works on: all of the vocabulary, or exactly those that can matter."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from cllm.types import SamplingParams, TokenMask

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32] | npt.NDArray[np.intp]
GROUP = 64  # tokens that are looked at by their maximum first
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Cut:
    """What a chain does first to its candidates, if it is something that a threshold can do before it.

    `least`: it keeps the `least` likeliest. `gap`: it keeps what lies within `gap` of the best logit. Neither
    is set where the first sampler looks at every token, so that none may be left out.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.least = 0
        self.gap = 0.0
        if params.temperature <= 0 or params.mirostat or params.adjusts_logits or params.top_n_sigma >= 0:
            return
        if params.top_k > 0:
            self.least = params.top_k
        elif params.typical_p >= 1 and params.top_p >= 1 and params.min_p > 0:
            self.gap = -math.log(params.min_p) + 1e-3  # the sampler itself cuts to the last bit


class Candidates:
    """Room for the candidates of one row at a time. Each thread that samples has its own."""

    NARROW = 4096  # so few allowed tokens are taken as they are

    def __init__(self, api: Any, vocabulary_size: int) -> None:
        self._api = api
        self._ids = np.arange(vocabulary_size, dtype=np.int32)
        self._data = np.zeros(vocabulary_size, _CANDIDATE)
        self._pointer = self._data.ctypes.data_as(ctypes.POINTER(api.llama_token_data))

    def choose(self, chain: Any, logits: Logits, cut: Cut, mask: TokenMask | None = None) -> int:
        """Run a chain over a row of logits; returns the token it selected. The row is left as it is."""
        ids = self._that_matter(logits, cut, mask)
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
            raise ValueError("the samplers left no token to choose from")
        return int(array.data[array.selected].id)

    def _that_matter(self, logits: Logits, cut: Cut, mask: TokenMask | None) -> Ids | None:
        """A superset of what survives the chain's first cut, in order of id; None: all of them."""
        if not cut.least and not cut.gap:
            return None
        if mask is not None and np.count_nonzero(mask) <= self.NARROW:
            return np.flatnonzero(mask)
        if mask is not None:
            logits = np.where(mask, logits, np.float32(-np.inf))
        if cut.gap:
            return np.flatnonzero(logits >= logits.max() - cut.gap)
        return _likeliest(logits, cut.least)


def _likeliest(logits: Logits, count: int) -> Ids | None:
    """The `count` likeliest and a few more, in order of id; None where that would be most of them.

    The vocabulary is dealt to groups as cards are. The `count`-th best of the groups' maxima is a threshold
    that at least `count` tokens reach, so the likeliest all lie in groups whose maximum reaches it.
    """
    groups = len(logits) // GROUP
    if count >= groups // 2:
        return None
    dealt = logits[: groups * GROUP].reshape(GROUP, groups)
    maxima = dealt.max(axis=0)
    threshold = np.partition(maxima, groups - count)[groups - count]
    reached = np.flatnonzero(maxima >= threshold)
    members = (reached + np.arange(0, groups * GROUP, groups)[:, None]).ravel()
    ids: Ids = np.concatenate((members, np.arange(groups * GROUP, len(logits))))
    enough: Ids = ids[logits[ids] >= threshold]
    return enough


def best(logits: Logits, mask: TokenMask | None) -> int:
    """The likeliest allowed token; ties go to the lowest id. Raises ValueError where nothing is allowed."""
    token = int(logits.argmax())
    if mask is None or mask[token]:
        return token
    allowed = np.flatnonzero(mask)
    if not len(allowed):
        raise ValueError("no token is allowed here")
    return int(allowed[logits[allowed].argmax()])
