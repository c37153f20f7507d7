"""`cllm list`, `cllm show`, `cllm rm` and `cllm quantize`: the models of this machine."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from cllm.cli.terminal import AsJson, echo, print_columns
from cllm.errors import ConfigError, LibraryError, ModelFileError
from cllm.models import store
from cllm.models.files import FILE_TYPES, HubReference, ModelFiles, format_size, parse_hub, parse_quant
from cllm.models.resolve import find_by_name, find_in_folder, find_mmproj, is_path, resolve
from cllm.models.store import HeaderInfo, StoredModel

QUANTIZE_S = 24 * 3600.0  # a model of hundreds of gigabytes, on a slow disk
_PLAIN = {"F32", "F16", "BF16"}
_WHERE = {"hf": "Hugging Face cache", "ms": "ModelScope cache", "embedded": "embedded"}
ModelDirs = Annotated[
    list[Path] | None,
    Option("--model-dir", metavar="DIR", help="Folder of models; may be repeated. Default: CLLM_MODEL_DIR."),
]


def list_command(model_dir: ModelDirs = None, as_json: AsJson = False) -> None:
    """List the models of this machine: both hubs' caches, folders, and the embedded one."""
    entries = store.list_models(_join(model_dir))
    if as_json:
        typer.echo(json.dumps([_as_dict(*entry) for entry in entries], indent=2))
        return
    rows = []
    for model, header in entries:
        where = _WHERE.get(model.source) or _shorten(model.path.parent)
        architecture = header.architecture if header else "unreadable"
        rows.append((model.name, model.quant, format_size(model.size), architecture, where))
    print_columns(("name", "quant", "size", "architecture", "where"), rows)
    for name, (here, size) in store.find_incomplete().items():
        shown = f"{format_size(here)} of {format_size(size)}"
        echo(f"incomplete: {name}, {shown}; `cllm pull` continues, `cllm rm {name}` removes", err=True)


def _join(folders: list[Path] | None) -> str:
    return os.pathsep.join(map(str, folders or []))


def _shorten(path: Path) -> str:
    home, text = str(Path.home()), str(path)
    return "~" + text.removeprefix(home) if text.startswith(home + os.sep) else text


def _as_dict(model: StoredModel, header: HeaderInfo | None) -> dict[str, Any]:
    return {
        "name": model.name,
        "quant": model.quant,
        "size": model.size,
        "source": model.source,
        "files": [str(path) for path in model.files],
        "architecture": header.architecture if header else None,
        "context_length": header.context if header else None,
        "chat_template": header.chat_template if header else None,
    }


def find_local(text: str, folders: str = "") -> StoredModel | HubReference:
    """The stored model that a reference names; the reference itself where its hub would have to be asked."""
    if reference := None if Path(text).expanduser().exists() else parse_hub(text):
        return store.find_stored(reference) or reference
    path = Path(text).expanduser()
    if path.is_dir():
        path = find_in_folder(path)
    if not path.is_file():
        if is_path(text):
            raise ModelFileError(f"there is no model file at {path}")
        return find_by_name(text, folders)
    for model in (*store.scan(folders), *store.scan_folder(path.parent, deep=False)):
        if path in model.files or path.absolute() in model.files:
            return model
    raise ModelFileError(f"{path} is no whole GGUF model")


def show_command(
    reference: Annotated[str, Argument(metavar="REF", help="A file, folder, name of the list, hf:… or ms:…")],
    model_dir: ModelDirs = None,
    as_json: AsJson = False,
) -> None:
    """Show a model's header and what fits here; of a hub's model that is not here, too."""
    found = find_local(reference, _join(model_dir))
    if isinstance(found, StoredModel):
        senses = Path(find_mmproj(found.path)).name or "none"
        shown = {"name": found.name, "path": str(found.path), "mmproj": senses} | _describe(found.path)
    else:
        shown = _show_remote(found)
    if as_json:
        typer.echo(json.dumps(shown, indent=2))
        return
    for name, value in shown.items():
        if name == "contexts":
            value = ", ".join(f"{slots} × {tokens}" for slots, tokens in value) or "none"
        elif name == "size":
            value = format_size(value)
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        echo(f"{name.replace('_', ' '):14} {value}")


def _show_remote(reference: HubReference) -> dict[str, Any]:
    from cllm.models.hub import make_hub
    from cllm.models.pull import Pull, PullOptions, find_model

    with make_hub(reference) as hub, tempfile.TemporaryDirectory(prefix="cllm-") as folder:
        model = find_model(hub, reference)
        head = Pull(hub, reference, model, PullOptions()).read_heads(Path(folder))
        name = str(reference._replace(quant=model.chosen.quant or model.chosen.stem))
        shown = {"name": name, "path": f"not here; `cllm pull {name}` gets it"}
        return shown | ({"size": model.chosen.size} if head is None else _describe(head))


def _describe(path: Path) -> dict[str, Any]:
    from cllm.backend.llama.gguf import GgufHeader
    from cllm.models.fit import ModelFit

    header = GgufHeader(path)
    try:
        fit = ModelFit(header)
        memory = {"here": fit.describe(), "memory": fit.memory, "contexts": list(map(list, fit.contexts()))}
    except (LibraryError, ModelFileError) as error:
        memory = {"here": f"not checked: {error}"}
    return {
        "title": header.metadata.get("general.name", ""),
        "architecture": header.architecture,
        "quant": parse_quant(path.name),
        "size": header.file_bytes,
        "files": len(header.parts),
        "layers": header.number("block_count"),
        "vocabulary": header.vocabulary,
        "trained_for": f"{header.context_train} tokens",
        "chat_template": isinstance(header.metadata.get("tokenizer.chat_template"), str),
        **memory,
    }


def rm_command(
    reference: Annotated[str, Argument(metavar="REF", help="A file, a name of the list, hf:… or ms:…")],
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask.")] = False,
    model_dir: ModelDirs = None,
) -> None:
    """Remove a model from this machine; asks first, and says what that frees."""
    model = find_local(reference, _join(model_dir))
    stored = model if isinstance(model, StoredModel) else None
    removal = store.plan_removal(model) if isinstance(model, StoredModel) else store.find_parts(model)
    name = stored.name if stored else f"{model}, not complete"
    if not removal.paths:
        raise ModelFileError(f"{model} is not on this machine; `cllm list` shows what is")
    if users := store.find_users(removal.paths):
        process, command = next(iter(users.items()))
        raise ModelFileError(f"{name} is used by process {process} ({command:.60}); end it first")
    where = stored.root if stored else removal.paths[0].parent
    echo(f"{name} in {_shorten(where)}: frees {format_size(removal.freed)}", err=True)
    if not yes:
        if not sys.stdin.isatty():
            raise ModelFileError("nothing was removed: --yes removes it without asking")
        typer.confirm("remove it?", abort=True, err=True)
    try:
        store.remove(stored, removal)
    except OSError as error:
        raise ModelFileError(str(error)) from None
    typer.echo(f"removed, {format_size(removal.freed)} freed", err=True)


def quantize_command(
    model: Annotated[str, Argument(metavar="MODEL", help="A file, a name of the list, hf:… or ms:…")],
    kind: Annotated[str, Argument(metavar="TYPE", help=" ".join(FILE_TYPES))],
    out: Annotated[
        Path | None, Argument(metavar="OUT", help="The new file. None: MODEL-TYPE.gguf in this folder")
    ] = None,
    requantize: Annotated[
        bool, Option("--allow-requantize", help="Take a model that is quantised already; that costs quality.")
    ] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the size and write nothing.")] = False,
) -> None:
    """Write a model as another type of weights. Those that need an importance matrix are left out.

    The size is printed first. The file appears when it is complete, and no file is overwritten.
    """
    from cllm.backend.llama.conversion import predict_size, write_copy
    from cllm.backend.llama.gguf import GgufHeader
    from cllm.backend.llama.kernels import count_weights

    kind = kind.upper()
    if kind not in FILE_TYPES:
        raise ConfigError(f"there is no type {kind[:20]!r}; choose one of: {', '.join(FILE_TYPES)}")
    header = GgufHeader(resolve(model, offline=True))
    if (types := sorted(count_weights(header).keys() - _PLAIN)) and not requantize:
        raise ModelFileError(
            f"{header.path.name} is quantised already ({', '.join(types)}): quantise the original, or say "
            "--allow-requantize, which costs quality"
        )
    stem = ModelFiles((header.path.name,), 0, 1).stem
    own = parse_quant(stem)
    target = out or Path(f"{stem.replace(own, kind) if own and own in stem else f'{stem}-{kind}'}.gguf")
    if target.exists():
        raise ConfigError(f"{target} is there already: choose another OUT")
    if not target.parent.is_dir():
        raise ConfigError(f"{target} is in a folder that is not there")
    try:
        size = predict_size(header, FILE_TYPES[kind])
        echo(f"{header.path.name}: {format_size(header.file_bytes)}; as {kind} {format_size(size)}", err=True)
        if dry_run:
            return
        if size > (free := shutil.disk_usage(target.parent).free):
            raise ModelFileError(f"not enough space for {target}: {format_size(free)} are free")
        write_copy(header, target, FILE_TYPES[kind], QUANTIZE_S)
    except LibraryError as error:
        raise ModelFileError(f"{header.path.name} cannot be written as {kind}: {error}") from None
    except OSError as error:
        raise ModelFileError(f"{target} cannot be written: {error.strerror}") from None
    echo(f"wrote {target}, {format_size(target.stat().st_size)}; `cllm serve {target}` serves it", err=True)
