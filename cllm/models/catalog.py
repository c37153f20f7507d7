"""Catalog: the models of this machine with what their headers say, which is read once."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from cllm.build.toolchain import cache_directory, write_record
from cllm.errors import ModelFileError
from cllm.models.store import StoredModel, scan


class HeaderInfo(msgspec.Struct, frozen=True):
    """What the list shows of a header. `size` and `changed` are the file's when it was read."""

    size: int
    changed: int
    architecture: str
    context: int
    chat_template: bool


class CatalogEntry(NamedTuple):
    """A stored model and its header; None where that cannot be read."""

    model: StoredModel
    header: HeaderInfo | None


def list_models(folders: str = "") -> list[CatalogEntry]:
    """Every model of this machine. Headers of files that have not changed are not read again."""
    path = cache_directory() / "models.json"
    known: dict[str, HeaderInfo] = {}
    with suppress(OSError, msgspec.MsgspecError):
        known = msgspec.json.decode(path.read_bytes(), type=dict[str, HeaderInfo])
    found: dict[str, HeaderInfo] = {}
    entries = []
    for model in scan(folders):
        file = str(model.path.absolute())
        with suppress(OSError, ModelFileError):
            status = model.path.stat()
            before = known.get(file)
            if before is None or (before.size, before.changed) != (status.st_size, status.st_mtime_ns):
                before = _read_header(model.path, status.st_size, status.st_mtime_ns)
            found[file] = before
        entries.append(CatalogEntry(model, found.get(file)))
    if not found.items() <= known.items():
        with suppress(OSError):  # it is a memory only
            write_record(path, msgspec.json.encode(known | found))
    return entries


def _read_header(path: Path, size: int, changed: int) -> HeaderInfo:
    from cllm.backend.llama.gguf import GgufFile  # numpy comes along: not needed where all is known

    metadata = GgufFile(path).metadata
    architecture = str(metadata.get("general.architecture", ""))
    context = metadata.get(f"{architecture}.context_length", 0)
    template = isinstance(metadata.get("tokenizer.chat_template"), str)
    return HeaderInfo(size, changed, architecture, context if isinstance(context, int) else 0, template)
