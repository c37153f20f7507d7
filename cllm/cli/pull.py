"""`cllm pull`, `cllm search` and `cllm recommend`: models from the hubs."""

from __future__ import annotations

import json
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from typer import Argument, Option

from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.memory import available_memory
from cllm.backend.llama.placement import DEVICE_RESERVE, list_devices
from cllm.cli.terminal import AsJson, print_columns
from cllm.errors import ConfigError, HubError, LibraryError, ModelFileError, NotEnoughMemory
from cllm.models.files import HubReference, ModelFiles, format_size, group_files, parse_hub
from cllm.models.fit import TABLE, ModelFit, ModelTable, recommend
from cllm.models.hub import SearchHit, make_hub
from cllm.models.pull import HubModel, Pull, PullOptions, find_model, free_bytes, is_offline
from cllm.models.store import find_stored
from cllm.names import make_visible

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)i?b?(?:/s)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def pull_command(
    reference: Annotated[
        str, Argument(metavar="REF", help="hf:USER/REPO[:QUANT][@REVISION], ms:USER/REPO[:QUANT] or a URL")
    ],
    to: Annotated[Path | None, Option("--to", metavar="DIR", help="Store it in DIR, not in a cache.")] = None,
    limit: Annotated[
        str, Option(metavar="RATE", help="Bytes a second, as 5M or 500K.", show_default=False)
    ] = "",
    dry_run: Annotated[bool, Option("--dry-run", help="Say what it would pull, and if that fits.")] = False,
    offline: Annotated[bool, Option("--offline", help="Only look whether it is here.")] = False,
    force: Annotated[bool, Option("--force", help="Pull what does not fit the memory here, too.")] = False,
    connections: Annotated[int, Option(min=1, max=32, metavar="N", help="Ranges at a time.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Get a model from Hugging Face or ModelScope; continues where it was interrupted.

    Prints the path of the (first) file. `cllm serve REF` takes the same references, and pulls by itself.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        options = PullOptions(to and to.expanduser(), parse_rate(limit), connections)
        found = _parse(reference)
        stored = find_stored(found) if to is None else None
        if is_offline(offline):
            if stored is None:
                raise ModelFileError(f"{found} is not on this machine, and --offline pulls nothing")
            result = _make_result(stored.path)
        else:
            result = _pull(found, options, console, dry_run=dry_run, force=force)
    except KeyboardInterrupt:
        console.print("interrupted; the same command continues, `cllm rm` of it removes what is here")
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps({"reference": str(found), **result}))
    elif result["path"]:
        typer.echo(result["path"])


def _make_result(path: Path | str = "", missing: int = 0, fetched: int = 0, s: float = 0.0) -> dict[str, Any]:
    """The result of a pull, with bytes that it would fetch (in a dry run, without a path) or has fetched."""
    return {"path": str(path), "missing": missing, "fetched": fetched, "seconds": round(s, 3)}


def _parse(text: str) -> HubReference:
    if reference := parse_hub(text):
        return reference
    hint = f"`cllm search {text}` may find some"
    with suppress(ConfigError):
        if not Path(text).exists() and parse_hub(f"hf:{text}"):
            hint = f"is hf:{text} meant?"
    raise ConfigError(f"{text!r} names no model of a hub (hf:USER/REPO, ms:USER/REPO or a URL); {hint}")


def parse_rate(text: str) -> float:
    """Bytes a second, from a number with a unit; 0 for none."""
    match = _RATE.fullmatch(text.strip()) if text else None
    if text and (match is None or float(match[1]) <= 0):
        raise ConfigError(f"--limit {text}: give bytes a second as 5M, 500K or 1.5G")
    return float(match[1]) * _UNITS[match[2].lower()] if match else 0.0


def _pull(
    reference: HubReference, options: PullOptions, console: Console, *, dry_run: bool, force: bool
) -> dict[str, Any]:
    with make_hub(reference) as hub:
        model = find_model(hub, reference)
        pull = Pull(hub, reference, model, options)
        missing, free = pull.missing_bytes(), free_bytes(pull.folder)
        files = f"{len(model.files)} files, " if len(model.files) > 1 else ""
        console.print(f"{model.chosen.stem}: {files}{format_size(model.chosen.size)} from {hub.endpoint}")
        if missing < model.chosen.size:
            here = "all of it is" if not missing else f"{format_size(model.chosen.size - missing)} are"
            console.print(f"here    {here} already in {pull.folder}")
        room = "enough" if missing <= free else "TOO LITTLE"
        console.print(f"disk    {format_size(missing)} to fetch, {format_size(free)} free: {room}")
        if dry_run:
            with tempfile.TemporaryDirectory(prefix="cllm-") as folder:
                head = pull.read_heads(Path(folder))
                _print_choices(model, _report_fit(head, console) if head else None)
            return _make_result(missing=missing)
        began = time.monotonic()
        path = pull.run(partial(_check_fit, model=model, console=console, force=force))
        seconds = time.monotonic() - began
        if missing:
            speed = format_size(missing / max(seconds, 0.001))
            console.print(f"pulled  {format_size(missing)} in {seconds:.0f} s ({speed}/s), verified")
        return _make_result(path, fetched=missing, s=seconds)


def _report_fit(head: Path, console: Console) -> ModelFit | None:
    """None where the native library, whose sums these are, is not there or cannot load such a model."""
    try:
        fit = ModelFit(GgufHeader(head))
    except (LibraryError, ModelFileError) as error:
        console.print(make_visible(f"memory  not checked: {error}"), markup=False)
        return None
    console.print(f"memory  {fit.describe()}")
    return fit


def _check_fit(head: Path, *, model: HubModel, console: Console, force: bool) -> None:
    """Raises NotEnoughMemory for a model that would not run here, unless it is wanted all the same."""
    fit = _report_fit(head, console)
    if fit is not None and not fit.fits and not force:
        raise NotEnoughMemory(
            f"{model.chosen.stem} would not run on this machine; {fit.suggest(model.models)}. "
            "--force pulls it all the same"
        )


def _print_choices(model: HubModel, fit: ModelFit | None) -> None:
    fitting = fit.fitting(model.models) if fit else []
    rows = []
    for choice in sorted(model.models, key=lambda choice: choice.size):
        fits = "" if fit is None else "fits" if choice in fitting else "does not fit"
        mark = "*" if choice == model.chosen else ""
        rows.append((mark, choice.quant or choice.stem, format_size(choice.size), fits))
    print_columns(("", "quant", "size", "memory"), rows)


def search_command(
    words: Annotated[list[str], Argument(metavar="WORDS", help="Words of the model's name")],
    hub: Annotated[str, Option(metavar="HUB", help="hf (Hugging Face) or ms (ModelScope).")] = "hf",
    count: Annotated[int, Option(min=1, max=50, metavar="N", help="Results at most.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Search a hub for GGUF models; the most downloaded first."""
    if hub not in ("hf", "ms"):
        raise ConfigError(f"--hub {hub}: there are hf (Hugging Face) and ms (ModelScope)")
    with make_hub(HubReference(hub, "")) as opened:
        hits = opened.search(" ".join(words), count)
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(partial(_list_models, hub), hits))
    found = list(zip(hits, models, strict=True))
    if as_json:
        typer.echo(json.dumps([_as_dict(hub, *each) for each in found], indent=2))
        return
    if not found:
        raise ModelFileError(f"no GGUF repository on this hub matches {' '.join(words)!r}; try fewer words")
    rows = [(f"{hub}:{hit.repo}", f"{hit.downloads:,}", _describe(files)) for hit, files in found]
    print_columns(("reference", "downloads", "quants"), rows)


def _list_models(hub: str, hit: SearchHit) -> list[ModelFiles]:
    try:
        with make_hub(HubReference(hub, hit.repo)) as opened:
            files = opened.list_files("").files
    except HubError:  # gated, or gone meanwhile
        return []
    return group_files({file.path: file.size for file in files})


def _describe(models: list[ModelFiles]) -> str:
    """The only model, or how many there are with the smallest and the largest."""
    ordered = sorted(models, key=lambda model: model.size)
    ends = [f"{model.quant or model.stem} {format_size(model.size)}" for model in ordered]
    return f"{len(ends)}: {ends[0]} – {ends[-1]}" if len(ends) > 1 else "".join(ends)


def _as_dict(hub: str, hit: SearchHit, models: list[ModelFiles]) -> dict[str, object]:
    quants = [{"quant": model.quant, "size": model.size, "files": list(model.names)} for model in models]
    counts = {"downloads": hit.downloads, "likes": hit.likes}
    return {"reference": f"{hub}:{hit.repo}", **counts, "quants": quants}


def recommend_command(
    memory: Annotated[
        float, Option(min=0, metavar="GB", help="Memory to fill. 0: what is free here, on GPUs if any.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Recommend three models that fit the memory here, from a table of this version. Asks no hub."""
    room, where, gpus = int(memory * 1e9), "asked for", []
    if not room:
        gpus = [device for device in list_devices() if not device.integrated]
        where = "free on the GPUs here" if gpus else "free here, and no GPU"
        room = sum(max(0, device.free - DEVICE_RESERVE) for device in gpus) or available_memory() or 0
    if not room:
        raise ConfigError("the free memory of this machine is unknown: give it as --memory GB")
    table = msgspec.json.decode(TABLE.read_bytes(), type=ModelTable)
    found = recommend(table, room, gpu=bool(gpus or memory))
    if not found and not as_json:
        raise NotEnoughMemory(
            f"no model of the table fits {format_size(room)}; `cllm serve` has one of 0.1 GB"
        )
    if as_json:
        rows = [
            {"for": name, "reference": each.reference, "size": each.size}
            | {"requests": each.requests, "tokens": each.tokens, "weights": each.model.weights}
            for name, each in found.items()
        ]
        typer.echo(json.dumps({"memory": room, "date": table.date, "models": rows}, indent=2))
        return
    typer.echo(f"{format_size(room)} {where}. Of the table of {table.date}; `cllm search` finds others.")
    for name, each in found.items():
        plural = "" if each.requests == 1 else "s"
        context = f"{each.requests} request{plural} of up to {each.tokens} tokens"
        weights = f"{each.model.weights / 1e9:.1f} billion weights"
        typer.echo(f"\n{name}: {format_size(each.size)}, {weights}; {context}")
        typer.echo(f"  cllm pull {each.reference}")
