"""Declarations of llama.h, mtmd.h and ggml's headers for ctypes: structures, callbacks and functions.

scripts/declarations.py writes them to `declarations.json`, each type after those that it is made of. A type
is named as ctypes has it (`int32` is `c_int32`); a star precedes what is pointed to, `[N]` follows an array.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Functions = dict[str, tuple[Any, ...]]  # result and parameters of each


class Declarations:
    """Structures, callbacks and functions, by their C names."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.types: dict[str, Any] = {}
        for name, declared in document["types"].items():
            if isinstance(declared, list):  # result and parameters of a callback
                self.types[name] = ctypes.CFUNCTYPE(*map(self._find, declared))
            else:
                fields = [(field, self._find(kind)) for field, kind in declared.items()]
                self.types[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
        self.functions = self._read(document["functions"])
        self.cpu = self._read(document["cpu"])  # of the CPU's backend, which hands them out by their names
        self.media = self._read(document["media"])  # of libmtmd, loaded for models that take media

    def _read(self, table: Mapping[str, list[str]]) -> Functions:
        return {name: tuple(map(self._find, signature)) for name, signature in table.items()}

    def _find(self, text: str) -> Any:
        """The type that a text names; None for `void`."""
        if text.startswith("*"):
            return ctypes.POINTER(self._find(text[1:]))
        if text.endswith("]"):
            name, _, size = text[:-1].partition("[")
            return self._find(name) * int(size)
        return None if text == "void" else self.types.get(text) or getattr(ctypes, f"c_{text}")


DECLARED = Declarations(json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")))
