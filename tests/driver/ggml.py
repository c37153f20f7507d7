"""Single operations of ggml, as the library computes them."""

from __future__ import annotations

import ctypes
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from cllm.backend.llama.library import load

F32, F16, Q8_0 = 0, 1, 8  # of ggml_type
THREADS = 2
PREFIX = "ggml_"
_POINTERS = ["init", "new_tensor_4d", "permute", "flash_attn_ext", "mul_mat", "new_graph", "get_data"]


class _InitParams(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class Graph:
    """A graph of one operation at a time, in memory of its own."""

    def __init__(self) -> None:
        folder = load().directory
        self.base, self._cpu = (ctypes.CDLL(str(folder / f"libggml-{name}.so")) for name in ("base", "cpu"))
        for name in _POINTERS:
            getattr(self.base, f"{PREFIX}{name}").restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(self.call("init", _InitParams(1 << 28, None, False)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.call("free", self._context)

    def add(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        return ctypes.c_void_p(getattr(self.base, f"{PREFIX}{name}")(self._context, *arguments))

    def tensor(self, kind: int, shape: tuple[int, ...], data: bytes) -> ctypes.c_void_p:
        """A tensor that holds this; the first size is that of a row."""
        sizes = (*shape, 1, 1, 1)[:4]
        tensor = self.add("new_tensor_4d", kind, *map(ctypes.c_int64, sizes))
        ctypes.memmove(self._find(tensor), data, len(data))
        return tensor

    def call(self, name: str, *arguments: Any) -> Any:
        """A function that takes no context."""
        return getattr(self.base, f"{PREFIX}{name}")(*arguments)

    def _find(self, tensor: ctypes.c_void_p) -> int:
        address: int = self.call("get_data", tensor)
        return address

    def compute(self, result: ctypes.c_void_p, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
        """The floats of a result, in numpy's order of sizes."""
        graph = self.add("new_graph")
        self.call("build_forward_expand", graph, result)
        compute = getattr(self._cpu, f"{PREFIX}graph_compute_with_ctx")
        assert compute(self._context, graph, THREADS) == 0
        found = (ctypes.c_float * int(np.prod(shape))).from_address(self._find(result))
        return np.array(found, float).reshape(shape)
