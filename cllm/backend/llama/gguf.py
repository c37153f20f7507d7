"""GGUF header, checked in Python before native code reads the file.

llama.cpp trusts the counts and offsets in it, so a hostile or damaged file must be refused earlier. (The
reader of the `gguf` package keeps every array, which takes seconds for a large vocabulary; here long arrays
are skipped. Its table of block sizes is used.)
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from cllm.errors import ModelFileError

MAX_PAIRS = 100_000
MAX_TENSORS = 1_000_000
MAX_ARRAY = 20_000_000
MAX_STRING = 64 << 20
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SIZES = (
    *("context_length", "block_count", "embedding_length", "attention.head_count"),
    *("attention.head_count_kv", "attention.key_length", "attention.value_length"),
)
_KEPT_ARRAY = 1024  # longer arrays (vocabularies) are skipped


class GgufHeader:
    """The metadata of a GGUF file with a valid structure. Raises ModelFileError otherwise."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensor_count = 0
        self.ranks = False  # it has a classification head, so it is a reranker
        self.header_bytes = 0  # where the tensor data begins
        try:
            self.file_bytes = path.stat().st_size
            with path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise ModelFileError(f"{path.name} is not a GGUF file (it does not begin with 'GGUF')")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                    self._read(_Cursor(view, 4))
        except FileNotFoundError:
            raise ModelFileError(f"there is no model file at {path}") from None
        except IsADirectoryError:
            raise ModelFileError(f"{path} is a folder; give the path of a .gguf file") from None
        except OSError as error:
            raise ModelFileError(f"{path.name} cannot be read: {error.strerror}") from None
        except (struct.error, IndexError, OverflowError):
            raise ModelFileError(f"{path.name} is truncated: its header ends in the middle") from None
        except (KeyError, UnicodeDecodeError, ValueError, TypeError) as error:
            raise ModelFileError(f"{path.name} is corrupt: {error}") from None

    def _read(self, cursor: _Cursor) -> None:
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise ModelFileError(f"{self.path.name} has GGUF version {version}; 2 and 3 are supported")
        self.tensor_count, pairs = cursor.scalar("Q"), cursor.scalar("Q")
        if self.tensor_count > MAX_TENSORS or pairs > MAX_PAIRS:
            raise ValueError(f"it claims {self.tensor_count} tensors and {pairs} metadata entries")
        for _ in range(pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        end_of_data = max((self._tensor_end(cursor) for _ in range(self.tensor_count)), default=0)
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_STRING:
            raise ValueError(f"alignment {alignment!r:.20}")
        for name in _SIZES:
            value = self.metadata.get(f"{self.architecture}.{name}", 0)
            if not all(0 <= number < 2**40 for number in (value if isinstance(value, list) else [value])):
                raise ValueError(f"its {name} is {value!r:.40}")
        self.header_bytes = cursor.offset
        data_begin = -(-cursor.offset // alignment) * alignment
        if data_begin + end_of_data > self.file_bytes:
            raise ModelFileError(
                f"{self.path.name} is truncated: its tensors need {data_begin + end_of_data} bytes, "
                f"the file has {self.file_bytes}"
            )

    def _tensor_end(self, cursor: _Cursor) -> int:
        """Read a tensor's description; returns where its data ends, counted from the data's beginning."""
        self.ranks |= cursor.string().startswith("cls.")
        dimensions = cursor.scalar("I")
        if dimensions > 8:
            raise ValueError(f"a tensor with {dimensions} dimensions")
        elements: int = math.prod(cursor.scalar("Q") for _ in range(dimensions))
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(cursor.scalar("I"))]
        offset: int = cursor.scalar("Q")
        return offset + elements // int(block) * int(block_bytes)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def number(self, name: str, default: int = 0) -> int:
        """An integer of the architecture's metadata; the largest one of a per-layer list."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if isinstance(value, list):
            value = max(value, default=default)
        return int(value) if isinstance(value, int | float) else default

    @property
    def context_train(self) -> int:
        return self.number("context_length", 4096)

    def kv_bytes_per_cell(self, key_type: str = "f16", value_type: str = "f16") -> int:
        """Upper estimate of K and V for one token; 0 for recurrent models and encoders."""
        heads = self.number("attention.head_count")
        if "bert" in self.architecture or self.architecture == "gemma-embedding":
            return 0
        if not heads or f"{self.architecture}.ssm.state_size" in self.metadata:
            return 0
        kv_heads = self.number("attention.head_count_kv", heads) or heads
        width = self.number("embedding_length") // heads
        key = self.number("attention.key_length", width)
        value = self.number("attention.value_length", width)
        row = _row_bytes(kv_heads * key, key_type) + _row_bytes(kv_heads * value, value_type)
        return self.number("block_count") * row


def _row_bytes(elements: int, type_name: str) -> int:
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name.upper()]]
    return -(-elements // int(block)) * int(block_bytes)


class _Cursor:
    """Reads little-endian GGUF values; the end of the file raises struct.error or IndexError."""

    def __init__(self, view: mmap.mmap, offset: int) -> None:
        self._view = view
        self.offset = offset

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from("<" + form, self._view, self.offset)
        self.offset += struct.calcsize("<" + form)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        if length > MAX_STRING:
            raise ValueError(f"a string of {length} bytes")
        return self._bytes(length).decode("utf-8", "replace")

    def _bytes(self, length: int) -> bytes:
        if self.offset + length > len(self._view):
            raise IndexError
        data = self._view[self.offset : self.offset + length]
        self.offset += length
        return data

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any] | None:
        """A short array's values; None for a long one, which is skipped."""
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > MAX_ARRAY:
            raise ValueError(f"an array of {count} elements")
        if kind in _SCALARS and count > _KEPT_ARRAY:
            self._bytes(struct.calcsize("<" + _SCALARS[kind]) * count)
            return None
        if kind == _ARRAY:
            raise ValueError("an array of arrays")
        if count <= _KEPT_ARRAY:
            return [self.value(kind) for _ in range(count)]
        for _ in range(count):
            length = self.scalar("Q")
            self.offset += length
        return None
