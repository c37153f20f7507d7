"""GGUF header, checked in Python before native code reads the file.

llama.cpp trusts the counts and offsets in it, so a hostile or damaged file must be refused earlier. (The
reader of the `gguf` package keeps every array, which takes seconds for a large vocabulary; here long arrays
are skipped.)
"""

from __future__ import annotations

import json
import math
import mmap
import re
import struct
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from cllm.config import EngineConfig
from cllm.errors import ConfigError, ModelFileError

MAX_PAIRS = 100_000
MAX_TENSORS = 1_000_000
MAX_ARRAY = 20_000_000
MAX_STRING = 64 << 20
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
MAX_LAYERS = 4096
MAX_TYPE = 255  # of a tensor; unknown ones up to it are newer than the table
TABLES = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
_SIZES, _NO_MEMORY = TABLES["gguf"]["sizes"], TABLES["gguf"]["no_memory"]
_KEPT_ARRAY = 1024  # longer arrays (vocabularies) are skipped
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class TensorType(NamedTuple):
    """A type of tensors: its id, and the weights and the bytes of a block."""

    id: int
    block: int
    block_bytes: int


_TABLE = json.loads(Path(__file__).with_name("tensor_types.json").read_text(encoding="utf-8"))
TENSOR_TYPES = {name: TensorType(*row) for name, row in _TABLE.items()}
"""By ggml's names."""
TYPE_NAMES = {kind.id: name for name, kind in TENSOR_TYPES.items()}


class Tensor(NamedTuple):
    """A tensor's description. `size` is None where its type is newer than the table."""

    name: str
    type_id: int
    offset: int  # from the beginning of the data
    size: int | None
    shape: tuple[int, ...] = ()  # the fastest dimension first

    @property
    def weights(self) -> int:
        """Number of weights; 0 where the type is unknown."""
        return (self.size or 0) // kind.block_bytes * kind.block if (kind := self.kind) else 0

    @property
    def kind(self) -> TensorType | None:
        """Its type; None where that is unknown."""
        name = TYPE_NAMES.get(self.type_id)
        return TENSOR_TYPES[name] if name is not None else None


class GgufFile:
    """One GGUF file with a valid structure. Raises ModelFileError otherwise."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: list[Tensor] = []
        self.header_bytes = self.data_begin = self.data_bytes = 0
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
        if (version := cursor.scalar("I")) not in (2, 3):
            raise ModelFileError(f"{self.path.name} has GGUF version {version}; 2 and 3 are supported")
        tensor_count, pairs = cursor.scalar("Q"), cursor.scalar("Q")
        if tensor_count > MAX_TENSORS or pairs > MAX_PAIRS:
            raise ValueError(f"it claims {tensor_count} tensors and {pairs} metadata entries")
        for _ in range(pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        self.tensors = [_read_tensor(cursor) for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_STRING:
            raise ValueError(f"alignment {alignment!r:.20}")
        architecture = self.metadata.get("general.architecture", "")
        for name in _SIZES:
            value = self.metadata.get(f"{architecture}.{name}", 0)
            if not all(0 <= number < 2**40 for number in (value if isinstance(value, list) else [value])):
                raise ValueError(f"its {name} is {value!r:.40}")
        if not 0 <= self.metadata.get(f"{architecture}.block_count", 0) <= MAX_LAYERS:
            raise ValueError(f"it claims {self.metadata[f'{architecture}.block_count']!r:.40} layers")
        self.header_bytes = cursor.offset
        self.data_begin = data_begin = -(-cursor.offset // alignment) * alignment
        self.data_bytes = max((tensor.offset + (tensor.size or 0) for tensor in self.tensors), default=0)
        if self.tensors and data_begin + self.data_bytes > self.file_bytes:
            raise ModelFileError(
                f"{self.path.name} is truncated: its tensors need {data_begin + self.data_bytes} bytes, "
                f"the file has {self.file_bytes}"
            )
        self._fill_unknown_sizes(self.file_bytes - data_begin)

    def _fill_unknown_sizes(self, end: int) -> None:
        """A tensor of an unknown type reaches to the next one, the last to the end of the file."""
        if all(tensor.size is not None for tensor in self.tensors):
            return
        self.data_bytes = end
        follows = end
        for place in sorted(range(len(self.tensors)), key=lambda place: -self.tensors[place].offset):
            tensor = self.tensors[place]
            if tensor.size is None:
                self.tensors[place] = tensor._replace(size=follows - tensor.offset)
            follows = tensor.offset


class GgufHeader:
    """The metadata and tensors of a model: of one GGUF file, or of all its parts, whichever of them is named.

    Raises ModelFileError where a part is missing or has no valid structure.
    """

    def __init__(self, path: Path) -> None:
        self.parts = [GgufFile(path)]
        count = self.parts[0].metadata.get("split.count", 1)
        if isinstance(count, int) and count > 1:
            self.parts = [_read_part(part, number) for number, part in enumerate(_split_paths(path, count))]
        first = self.parts[0]  # it has the metadata, and llama.cpp is given its name
        self.path, self.metadata, self.header_bytes = first.path, first.metadata, first.header_bytes
        self.file_bytes = sum(part.file_bytes for part in self.parts)
        self.data_bytes = sum(part.data_bytes for part in self.parts)
        self.tensors = [tensor for part in self.parts for tensor in part.tensors]

    @classmethod
    def of(cls, config: EngineConfig) -> GgufHeader:
        """The header with the metadata and the context that settings give it. Raises SetupError."""
        header = cls(Path(config.model))
        for key, value in config.metadata.items():
            found = header.metadata.get(key, value)
            if type(found) is not type(value):
                raise ConfigError(f"override_kv: {key} is of type {type(found).__name__} in the model's file")
            header.metadata[key] = value
        trained = header.context_train
        original = header.number("rope.scaling.original_context_length", trained)
        header.metadata[f"{header.architecture}.context_length"] = config.extend_context(trained, original)
        return header

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

    @property
    def vocabulary(self) -> int:
        """Tokens of the vocabulary; 0 where the file has none."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        return (len(tokens) if isinstance(tokens, list | range) else 0) or self.number("vocab_size")

    @property
    def generates(self) -> bool:
        """False for an encoder, which pools what it sees at once and keeps none of it."""
        return self.architecture not in _NO_MEMORY or f"{self.architecture}.pooling_type" not in self.metadata

    @property
    def head(self) -> bool:
        """True with a layer for multi-token prediction that can be used."""
        return self.number("nextn_predict_layers") == 1

    @property
    def ranks(self) -> bool:
        """True with a classification head, so for a reranker."""
        return any(tensor.name.startswith("cls.") for tensor in self.tensors)


def _split_paths(path: Path, count: int) -> list[Path]:
    """The files of a model in `count` parts, by the name of one. Raises ModelFileError if one is missing."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ModelFileError(
            f"{path.name} is one of {count} files of a model: name them …-00001-of-{count:05}.gguf and so on"
        )
    paths = [path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    for part in paths:
        if not part.is_file():
            raise ModelFileError(
                f"the model has {count} files, and {part.name} is missing beside {path.name}"
            )
    return paths


def _read_part(path: Path, number: int) -> GgufFile:
    part = GgufFile(path)
    if part.metadata.get("split.no") != number:
        raise ModelFileError(f"{path.name} is not part {number + 1} of the model, as its name says")
    return part


def _read_tensor(cursor: _Cursor) -> Tensor:
    name = cursor.string()
    if (dimensions := cursor.scalar("I")) > 8:
        raise ValueError(f"a tensor with {dimensions} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(dimensions))
    elements = math.prod(shape)
    type_id, offset = cursor.scalar("I"), cursor.scalar("Q")
    if type_id > MAX_TYPE:
        raise ValueError(f"a tensor of type {type_id}")
    kind = TENSOR_TYPES.get(TYPE_NAMES.get(type_id, ""))
    size = None if kind is None else elements // kind.block * kind.block_bytes
    return Tensor(name, type_id, offset, size, shape)


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
        if (length := self.scalar("Q")) > MAX_STRING:
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
        return self._array() if kind == _ARRAY else self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any] | range:
        """The elements; of an array that is too long to be kept, its indices."""
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > MAX_ARRAY:
            raise ValueError(f"an array of {count} elements")
        if kind in _SCALARS and count > _KEPT_ARRAY:
            self._bytes(struct.calcsize("<" + _SCALARS[kind]) * count)
            return range(count)
        if kind == _ARRAY:
            raise ValueError("an array of arrays")
        if count <= _KEPT_ARRAY:
            return [self.value(kind) for _ in range(count)]
        # Strings: a vocabulary has 300,000 of them, and a start reads it six times.
        view, offset, lengths = self._view, self.offset, struct.Struct("<Q").unpack_from
        for _ in range(count):
            offset += 8 + lengths(view, offset)[0]
        self.offset = offset
        return range(count)
