"""Resolve: from what names a model (file, folder, reference to a hub, name of `cllm list`) to its file.

A plain path needs nothing but this module: hubs and caches are imported where a name leads to them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from cllm.adapters import parse_adapter
from cllm.config import EngineConfig
from cllm.errors import LibraryError, ModelFileError
from cllm.models.files import parse_hub

if TYPE_CHECKING:
    from cllm.models.store import StoredModel

log = logging.getLogger(__name__)
Named = TypeVar("Named")
MAX_NEAR = 5
MAX_SHOWN = 12


def resolve(
    text: str, *, offline: bool = False, check: Callable[[Path], object] | None = None, mmproj: bool = True
) -> Path:
    """Find the file that a reference names, the first part of a model in several. Raises SetupError.

    An empty one names the embedded model. A hub's model that is not here is pulled, with the `mmproj`
    beside it; `check` gets its header before that, as a file, and may refuse it.
    """
    if not text:
        from cllm.models.store import embedded_model

        return embedded_model()
    path = Path(text).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        return find_in_folder(path)
    if reference := parse_hub(text):
        from cllm.models.pull import ensure

        return ensure(reference, offline=offline, check=check, mmproj=mmproj)
    if is_path(text):
        raise ModelFileError(f"there is no model file at {path}")
    return find_by_name(text).path


def resolve_config(config: EngineConfig) -> EngineConfig:
    """Replace the references to models by their files. Raises SetupError.

    A hub's model is checked by its header, as the settings have it, before it is pulled.
    """

    def check(head: Path) -> None:
        from cllm.backend.llama.memory import prepare

        found = resolve_config(msgspec.structs.replace(config, model=str(head)))
        try:
            prepare(found)
        except LibraryError:  # the GPU cannot be used: it will be left out
            prepare(msgspec.structs.replace(found, gpu_layers=0))

    model, draft = resolve(config.model, offline=config.offline, check=check), config.draft_model
    if draft:
        draft = str(resolve(draft, offline=config.offline, mmproj=False))
    adapters = tuple(
        f"{each.name}={resolve(each.file, offline=config.offline)}:{each.scale!r}"
        for each in map(parse_adapter, config.adapter)
    )
    mmproj = "" if config.no_mmproj else find_mmproj(model, config.mmproj)
    files = {"draft_model": draft, "adapter": adapters, "mmproj": mmproj}
    return msgspec.structs.replace(config, model=str(model), **files)


def find_mmproj(model: Path, asked: str = "") -> str:
    """Find the multimodal projector of a model: the one asked for, or one beside it that has its width.

    Empty where there is none, or libmtmd is not built and none was asked for. Raises SetupError.
    """
    beside = [Path(asked).expanduser()] if asked else sorted(model.parent.glob("mmproj*.gguf"))
    if not beside:
        return ""
    from cllm.backend.llama.gguf import GgufFile
    from cllm.backend.llama.library import NO_MEDIA, find
    from cllm.build.module import find_media

    header, found = GgufFile(model).metadata, ""
    width = header.get(f"{header.get('general.architecture')}.embedding_length")
    for path in beside:
        with nullcontext() if asked else suppress(ModelFileError):
            if any(width in tensor.shape for tensor in GgufFile(path).tensors):
                found = str(path)
                break
    if asked and not found:
        raise ModelFileError(f"--mmproj: {asked} is for another model: {model.name} has rows of {width}")
    if found and find_media(find()) is None:
        if asked:
            raise LibraryError(NO_MEDIA)
        log.warning("%s is left out: %s", Path(found).name, NO_MEDIA)
        return ""
    return found


def is_path(text: str) -> bool:
    """Check that a text can only be meant as a path."""
    nested = text.lower().endswith(".gguf") and Path(text).name != text
    return nested or text.startswith((".", "~")) or Path(text).is_absolute()


def find_in_folder(folder: Path) -> Path:
    """Find the only model of a folder. Raises ModelFileError with the list where there is none or several."""
    from cllm.models.store import scan_folder

    found = scan_folder(folder, deep=False)
    if len(found) == 1:
        return found[0].path
    if not found:
        raise ModelFileError(f"there is no .gguf file in {folder}")
    more = " …" if len(found) > MAX_SHOWN else ""
    names = ", ".join(model.path.name for model in found[:MAX_SHOWN]) + more
    raise ModelFileError(f"{folder} has {len(found)} models: {names}; name one of these files")


def find_by_name(text: str, folders: str = "") -> StoredModel:
    """Find the model of the list with this name, or the only one whose name begins with it."""
    from cllm.models.store import scan

    models = scan(folders)
    found = match_name(text, {model: list_names(model) for model in models})
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(model.name for model in found[:MAX_SHOWN])
        raise ModelFileError(f"{text!r} names {len(found)} models: {names}; give more of the name")
    known = {name: model.name for model in models for name in list_names(model)}
    close = get_close_matches(text.lower(), known, n=MAX_NEAR, cutoff=0.5)
    near = dict.fromkeys(known[name] for name in close)
    hint = f"; near it: {', '.join(near)}" if near else ""
    pull = f", `cllm pull hf:{text}` gets one" if text.count("/") == 1 else ", `cllm search` finds others"
    raise ModelFileError(
        f"there is no file, folder or model {text!r} here{hint}; `cllm list` shows all{pull}"
    )


def match_name(text: str, names: Mapping[Named, Sequence[str]]) -> list[Named]:
    """Find those with this name, of the names of each in lower case; else those whose name begins with it."""
    wanted = text.lower()
    for test in (str.__eq__, str.startswith):
        if found := [each for each, own in names.items() if any(test(name, wanted) for name in own)]:
            return found
    return []


def list_names(model: StoredModel) -> list[str]:
    """List every way to name a stored model, in lower case."""
    full = model.name.lower()
    short = full.partition(":")[2] if model.repo else full
    return [full, short, short.rpartition("/")[2], model.stem.lower(), model.path.name.lower()]
