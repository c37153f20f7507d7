"""The arrays llama_decode reads, filled anew each step through NumPy."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from cllm.backend.base import Row


class NativeBatch:
    """A `llama_batch` over arrays that Python owns; holds up to `capacity` tokens of `sequences` ids."""

    def __init__(self, api: Any, capacity: int, sequences: int) -> None:
        self.capacity = capacity
        self._token = np.zeros(capacity, np.int32)
        self._position = np.zeros(capacity, np.int32)
        self._id_count = np.ones(capacity, np.int32)
        self._output = np.zeros(capacity, np.int8)
        # Each token points at its sequence's entry in this table.
        self._ids = np.arange(sequences, dtype=np.int32)
        self._base = int(self._ids.ctypes.data)
        self._id_pointer = np.full(capacity + 1, self._base, np.uintp)
        self._ramp = np.arange(capacity, dtype=np.int32)
        self.struct = api.llama_batch(
            n_tokens=0,
            token=self._token.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            embd=None,
            pos=self._position.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            n_seq_id=self._id_count.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=ctypes.cast(self._id_pointer.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=self._output.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(self, rows: Sequence[Row]) -> None:
        """Lay the rows out one after the other. A batch over the capacity cannot be built: it raises."""
        count = sum(len(row.tokens) for row in rows)
        if count > self.capacity:
            raise ValueError(f"a batch of {count} tokens is over the limit of {self.capacity}")
        ids = [row.sequence_id for row in rows]
        assert ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] < len(self._ids), f"rows {ids}"
        base = self._base
        if count == len(rows):  # everybody generates: one assignment for all of them
            self._token[:count] = [row.tokens[0] for row in rows]
            self._position[:count] = [row.position for row in rows]
            self._id_pointer[:count] = [base + 4 * sequence_id for sequence_id in ids]
            self._output[:count] = [row.outputs for row in rows]
            self.struct.n_tokens = count
            return
        begin = 0
        self._output[:count] = 0
        for row in rows:
            end = begin + len(row.tokens)
            self._token[begin:end] = row.tokens
            self._position[begin:end] = self._ramp[: end - begin] + row.position
            self._id_pointer[begin:end] = base + 4 * row.sequence_id
            self._output[end - row.outputs : end] = 1
            begin = end
        self.struct.n_tokens = count


def count_ubatches(rows: Iterable[Row], ubatch_tokens: int, *, unified: bool) -> int:
    """Into how many physical batches llama.cpp cuts these rows.

    One pool of cells: by size alone. One stream per sequence: a physical batch takes a run of consecutive
    ids and the same number of tokens of each, so gaps between ids and rows of unequal length cost extra.
    """
    left = {row.sequence_id: len(row.tokens) for row in rows}
    if unified:
        return -(-sum(left.values()) // ubatch_tokens)
    if (
        left
        and len(left) <= ubatch_tokens
        and max(left) - min(left) + 1 == len(left)
        and set(left.values()) == {1}
    ):
        return 1  # everybody generates, and no id is missing between them
    count = 0
    while left:
        first = min(left)
        run = [first]
        while run[-1] + 1 in left and len(run) < ubatch_tokens:
            run.append(run[-1] + 1)
        take = min(min(left[i] for i in run), max(1, ubatch_tokens // len(run)))
        for sequence_id in run:
            left[sequence_id] -= take
            if not left[sequence_id]:
                del left[sequence_id]
        count += 1
    return count
