"""A damaged GGUF is refused in Python, in one line, before native code sees it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from cllm.backend.llama.gguf import TENSOR_TYPES, GgufHeader
from cllm.errors import ModelFileError
from tests.tiny_models import make_dense


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dense(tmp_path_factory.mktemp("gguf") / "dense.gguf")


def test_a_good_file_is_read(good: Path) -> None:
    header = GgufHeader(good)
    assert header.architecture == "llama" and header.context_train == 4096 and len(header.tensors) > 10
    assert header.vocabulary == 512 and header.file_bytes - 40_000 < header.data_bytes < header.file_bytes


def test_the_table_of_types_is_that_of_the_package_gguf() -> None:
    assert {kind.name: (kind, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType} == TENSOR_TYPES


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as error:
        GgufHeader(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_wrong_is_said(good: Path, tmp_path: Path) -> None:
    data = good.read_bytes()
    path = tmp_path / "m.gguf"
    assert "no model file" in refusal(path)
    assert "folder" in refusal(tmp_path)
    path.write_bytes(b"")
    assert "not a GGUF" in refusal(path)
    path.write_bytes(b"PK\3\4" + data[4:])
    assert "not a GGUF" in refusal(path)
    path.write_bytes(data[:4] + struct.pack("<I", 99) + data[8:])
    assert "version 99" in refusal(path)
    path.write_bytes(data[:8] + struct.pack("<Q", 2**60) + data[16:])
    assert "claims" in refusal(path)
    path.write_bytes(data[:-1000])
    assert "truncated" in refusal(path)
    path.write_bytes(data[:200])
    assert "truncated" in refusal(path)


# Tensor types -----------------------------------------------------------------------------------------


def with_type(data: bytes, name: bytes, type_id: int) -> bytes:
    """The file with another type id of one tensor."""
    place = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    (dimensions,) = struct.unpack_from("<I", data, place)
    place += 4 + 8 * dimensions
    return data[:place] + struct.pack("<I", type_id) + data[place + 4 :]


@pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "output_norm.weight", "token_embd.weight"])
def test_a_type_that_is_not_known_reaches_to_the_next_tensor(good: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "new.gguf"
    path.write_bytes(with_type(good.read_bytes(), name.encode(), 200))
    known = {tensor.name: tensor.size for tensor in GgufHeader(good).tensors}
    header = GgufHeader(path)
    assert {tensor.name: tensor.size for tensor in header.tensors} == known
    assert header.data_bytes == GgufHeader(good).data_bytes


def test_a_number_that_is_no_type_is_refused(good: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(with_type(good.read_bytes(), b"output.weight", 1 << 20))
    assert "corrupt" in refusal(path) and "type 1048576" in refusal(path)


# Models in several files --------------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    first = make_dense(tmp_path / "split.gguf", split_tensors=8)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert len(parts) == 3 and parts[0] == first
    return parts


def test_all_parts_are_counted_whichever_is_named(good: Path, split: list[Path]) -> None:
    whole = GgufHeader(good)
    for part in split:
        header = GgufHeader(part)
        assert header.path == split[0] and header.architecture == "llama" and header.vocabulary == 512
        assert sorted(tensor.name for tensor in header.tensors) == sorted(t.name for t in whole.tensors)
        assert header.data_bytes == whole.data_bytes
        assert header.file_bytes == sum(file.stat().st_size for file in split)


def test_a_part_that_is_missing_cut_or_foreign_is_named(split: list[Path]) -> None:
    first, second, third = split
    data = second.read_bytes()
    second.unlink()
    assert f"the model has 3 files, and {second.name} is missing" in refusal(first)
    second.write_bytes(data[:-2000])
    assert f"{second.name} is truncated" in refusal(first)
    second.write_bytes(third.read_bytes())
    assert f"{second.name} is not part 2" in refusal(third)
    second.write_bytes(data)
    renamed = first.rename(first.with_name("renamed.gguf"))
    assert "renamed.gguf is one of 3 files" in refusal(renamed)
