"""Token rows: what a model's input has for tokens, so that text beside pictures goes into the same step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cllm.backend.base import MediaRows, Row
from cllm.backend.llama.context import LlamaContext
from cllm.backend.llama.library import load_members
from cllm.backend.llama.model import LlamaModel
from cllm.types import Prompt

TIE = 1e-3  # of the range of the logits: kernels may differ


class TokenTable:
    """Rows of the tensor that llama.cpp looks tokens up in; wider inputs end with zeros, as its own do."""

    def __init__(self, api: Any, tensor: int, kind: int, row_bytes: int, width: int) -> None:
        traits: api.ggml_type_traits = api.ggml_get_type_traits(kind).contents
        self._api, self._tensor, self._width = api, tensor, width
        self._count = row_bytes // traits.type_size * traits.blck_size
        self._convert = traits.to_float  # null where the elements are floats
        self._row = ctypes.create_string_buffer(row_bytes)

    def __call__(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        rows, size = np.zeros((len(tokens), self._width), np.float32), len(self._row)
        for row, token in zip(rows, tokens, strict=True):
            into = self._row if self._convert else row.ctypes.data
            self._api.ggml_backend_tensor_get(self._tensor, into, token * size, size)
            if self._convert:
                self._convert(self._row, row.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), self._count)
        return rows


def find_token_rows(context: LlamaContext, model: LlamaModel) -> TokenTable | None:
    """None where rows are not what the model computes with: then a token has other logits as a row.

    Slot 0 of the context is empty, and is again afterwards.
    """
    if (members := load_members()) is None:
        return None
    kind, size = ctypes.c_int32(), ctypes.c_uint64()
    tensor = members.cllm_token_table(model.pointer, ctypes.byref(kind), ctypes.byref(size))
    if not tensor:
        return None
    rows, token = TokenTable(context.api, tensor, kind.value, size.value, context.media_width), 1
    found = []
    for media in (None, MediaRows(rows((token,)), Prompt((token,)).places(0, 1))):
        code = context.decode((Row(0, 0, (token,), 1, None, media=media),))
        found.append(None if code else context.logits(1).copy())
        context.remove(0)
    plain, looked_up = found
    if plain is None or looked_up is None:
        return None
    return rows if np.abs(looked_up - plain).max() <= TIE * np.ptp(plain) else None
