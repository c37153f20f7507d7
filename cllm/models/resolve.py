"""Resolve: from what names a model (file, folder, reference to a hub, name of `cllm list`) to its file.

A plain path needs nothing but this module: hubs and caches are imported where a name leads to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cllm.errors import ModelFileError
from cllm.models.reference import parse_hub

if TYPE_CHECKING:
    from cllm.models.store import StoredModel

Named = TypeVar("Named")
NEAR = 5
SHOWN = 12


def resolve(text: str, *, offline: bool = False, check: Callable[[Path], object] | None = None) -> Path:
    """The file that a reference names; the first part of a model in several. A missing hub model is pulled.

    `check` gets the header of a model that is about to be pulled, as a file, and may refuse it. Raises
    SetupError.
    """
    path = Path(text).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        return find_in_folder(path)
    if reference := parse_hub(text):
        from cllm.models.pull import ensure

        return ensure(reference, offline=offline, check=check)
    if is_path(text):
        return path  # reading it says what is wrong
    return find_by_name(text).path


def is_path(text: str) -> bool:
    """Whether a text can only be meant as a path."""
    nested = text.lower().endswith(".gguf") and Path(text).name != text
    return nested or text.startswith((".", "~")) or Path(text).is_absolute()


def find_in_folder(folder: Path) -> Path:
    """The only model of a folder. Raises ModelFileError with the list where there is none or several."""
    from cllm.models.store import scan_folder

    found = scan_folder(folder, deep=False)
    if len(found) == 1:
        return found[0].path
    if not found:
        raise ModelFileError(f"there is no .gguf file in {folder}")
    names = ", ".join(model.path.name for model in found[:SHOWN]) + (" …" if len(found) > SHOWN else "")
    raise ModelFileError(f"{folder} has {len(found)} models: {names}; name one of these files")


def find_by_name(text: str, folders: str = "") -> StoredModel:
    """The model of the list with this name, or the only one whose name begins with it."""
    from cllm.models.store import scan

    models = scan(folders)
    wanted = text.lower()
    found = match_name(text, {model: list_names(model) for model in models})
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(model.name for model in found[:SHOWN])
        raise ModelFileError(f"{text!r} names {len(found)} models: {names}; give more of the name")
    known = {name: model.name for model in models for name in list_names(model)}
    near = dict.fromkeys(known[name] for name in get_close_matches(wanted, known, n=NEAR, cutoff=0.5))
    hint = f"; near it: {', '.join(near)}" if near else ""
    pull = f", `cllm pull hf:{text}` gets one" if text.count("/") == 1 else ", `cllm search` finds others"
    raise ModelFileError(
        f"there is no file, folder or model {text!r} here{hint}; `cllm list` shows all{pull}"
    )


def match_name(text: str, names: Mapping[Named, Sequence[str]]) -> list[Named]:
    """Those with this name, of the names of each in lower case; else those with one that begins with it."""
    wanted = text.lower()
    for test in (str.__eq__, str.startswith):
        if found := [each for each, own in names.items() if any(test(name, wanted) for name in own)]:
            return found
    return []


def list_names(model: StoredModel) -> list[str]:
    """Every way to name a stored model, in lower case."""
    full = model.name.lower()
    short = full.partition(":")[2] if model.repo else full
    return [full, short, short.rpartition("/")[2], model.stem.lower(), model.path.name.lower()]
