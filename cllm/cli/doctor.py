"""`cllm doctor`: check CPU, native library, memory and model fit of this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Sequence
from io import StringIO
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from cllm import __version__
from cllm.backend.llama import library
from cllm.backend.llama.gguf import TABLES, GgufFile, GgufHeader
from cllm.backend.llama.kernels import choose_buffers, describe_types
from cllm.backend.llama.memory import MemoryFit
from cllm.backend.llama.placement import list_devices, offer_module
from cllm.backend.llama.probe import loaded_variant, run_probe, settings_to_try, unused_features
from cllm.backend.llama.threads import compute_threads, default_threads
from cllm.build.gpus import find_gpus
from cllm.build.module import choose_module, describe_time
from cllm.build.options import features, machine
from cllm.cli.checkup import Finding, ask_model, examine
from cllm.config import EngineConfig
from cllm.errors import CllmError, ConfigError
from cllm.models.resolve import find_mmproj, resolve


def doctor_command(
    model: Annotated[str, Argument(help="GGUF file; none: the embedded model", show_default=False)] = "",
    parallel: Annotated[int, Option(min=0, max=255)] = EngineConfig().parallel,
    ctx_size: Annotated[int, Option(min=0)] = EngineConfig().ctx_size,
    threads: Annotated[int, Option(min=0)] = 0,
    image: Annotated[
        Path | None, Option(help="Ask about this picture or sound, end to end", show_default=False)
    ] = None,
    mmproj: Annotated[str, Option(help="Multimodal projector of --image")] = "",
    full: Annotated[bool, Option("--full", help="Examine the files and serve the model: minutes.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the report as JSON.")] = False,
    html: Annotated[str, Option(metavar="FILE", help="Write the report as a page.")] = "",
) -> None:
    """Print CPU, library, threads, speed of the weights, memory, model fit and the start-up probe.

    With --full also what the model's files and a server of it do right (✓) and wrong (✗).
    """
    table = Table(show_header=False, box=None)
    healthy, findings = True, list[Finding]()
    found = features()
    table.add_row("cllm", f"{__version__}, Python {sys.version.split()[0]}")
    table.add_row("CPU", f"{machine()}, {default_threads()} cores usable")
    table.add_row("CPU features", " ".join(filter(found.__contains__, TABLES["notable"])) or "none of note")
    table.add_row("threads", str(threads or default_threads()))
    try:
        path = resolve(model, offline=True)
        folder = library.find()
        _library(folder, found, table)
        _gpus(folder, table)
        config = EngineConfig(model=str(path), parallel=parallel, ctx_size=ctx_size, threads=threads)
        config = choose_buffers(msgspec.structs.replace(config, mmproj=find_mmproj(path)))
        findings += examine(config) if full else ()
        header = GgufHeader(path)
        fit = MemoryFit(header, config, list_devices())
        trained = f"{len(header.tensors)} tensors, trained for {header.context_train} tokens"
        table.add_row("model", f"{header.path.name}: {header.architecture}, {trained}")
        _weights(header, config, table)
        table.add_row("placement", fit.describe_placement())
        table.add_row("context", fit.describe_context())
        table.add_row("memory", f"{fit.describe()}: {'fits' if fit.fits else 'DOES NOT FIT'}")
        table.add_row("when used", fit.describe_rest())
        healthy = fit.fits and _probe(fit.ready(config), table)
        if image is not None and healthy:
            ask_about(image, msgspec.structs.replace(config, mmproj=mmproj), table)
        findings += ask_model(fit.ready(config), fit) if full and healthy else ()
    except CllmError as error:
        table.add_row("[red]problem[/red]", str(error))
        healthy = False
    _report(table, findings, as_json=as_json, html=html)
    raise typer.Exit(0 if healthy and all(each.passed is not False for each in findings) else 1)


def _report(table: Table, findings: Sequence[Finding], *, as_json: bool, html: str) -> None:
    """Print the rows and the findings. What is shared does not name the user's folder."""
    for column in table.columns:
        column._cells = [str(cell).replace(str(Path.home()), "~") for cell in column.cells]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    machine = [" ".join(Text.from_markup(str(cell)).plain for cell in row) for row in rows]
    for finding in findings:
        mark = {True: "[green]✓[/green]", False: "[red]✗[/red]", None: "–"}[finding.passed]
        table.add_row(escape(finding.name), f"{mark} {escape(finding.detail)}")
    if as_json:
        report = msgspec.json.encode({"machine": machine, "findings": findings})
        print(msgspec.json.format(report).decode())
    else:
        Console().print(table)
    if html:
        page = Console(record=True, file=StringIO(), width=160)
        page.print(table)
        page.save_html(html)


def _library(folder: Path, features: Collection[str], table: Table) -> None:
    """Add rows on the library, and on the gain of one for this very CPU."""
    origin = "named by CLLM_LIBRARY" if "CLLM_LIBRARY" in os.environ else "built by `cllm build`"
    packaged = library.read_build_info(folder).get("variants", False)
    if packaged and "CLLM_LIBRARY" not in os.environ:
        origin = "of the package cllm-native"
    table.add_row("library", f"{folder} ({origin})")
    table.add_row("build", _build_info(folder))
    system_info = library.load(folder).api.llama_print_system_info().decode().strip()
    table.add_row("compiled for", system_info)
    own = "cllm's own" if library.load(folder).use_kernels() else "llama.cpp's"
    table.add_row("kernels", f"{own}, for attention and products on the CPU")
    if packaged:
        table.add_row("variant", loaded_variant() or "unknown")
        gain = "would gain a few percent at most: the variant uses all that this CPU has"
        if unused := unused_features(features, system_info):
            gain = f"would pay: this CPU has {', '.join(unused)}, which the variant does not use"
        table.add_row("`cllm build`", f"{gain} ({describe_time('cpu')})")


def _build_info(folder: Path) -> str:
    """The options of the build, from its `build.json`."""
    if not (info := library.read_build_info(folder)):
        return "not built by cllm: `cllm build` makes one for this CPU"
    shown = ", ".join(f"{key} {value}" for key, value in info.items() if key != "cpu_features")
    if info.get("portable"):
        shown += " [red](not for this CPU: slow; `cllm build --force` tries again)[/red]"
    return shown


def _gpus(folder: Path, table: Table) -> None:
    """Add what the drivers report, the module for it, and the devices that the library has with it."""
    drivers = find_gpus()
    rows = [*map(str, drivers.gpus), *(f"[red]{problem}[/red]" for problem in drivers.problems)]
    for row in rows or ["none"]:
        table.add_row("GPU", row)
    if (module := choose_module(library.modules_for(folder), drivers)) is not None:
        table.add_row("GPU module", str(module.path.parent))
        table.add_row("", _build_info(module.path.parent))
    elif (offer := offer_module(drivers)) is not None:
        table.add_row("GPU module", offer)
    for device in list_devices():
        memory = f"{device.free / 2**30:.1f} of {device.total / 2**30:.1f} GiB free"
        shared = ", shared with the host" if device.integrated else ""
        table.add_row("device", f"{device.name}: {device.description}, {memory}{shared}")


def _weights(header: GgufHeader, config: EngineConfig, table: Table) -> None:
    """Add what the tensor types of the model cost on this CPU, and which would be faster."""
    for row in describe_types(header, compute_threads(config)):
        table.add_row("weights", row)
    table.add_row("", "repacked" if config.extra_buffers else "plain, which is faster here than repacked")


def _probe(config: EngineConfig, table: Table) -> bool:
    """Probe the settings as `cllm serve` would; returns whether one works."""
    for name, attempt in settings_to_try(config):
        result = run_probe(attempt)
        if result.passed:
            table.add_row("probe", f"{name}: works, {result.tokens_per_second:.0f} steps/s")
            return True
        table.add_row("probe", f"{name}: {result.detail}")
    return False


def ask_about(file: Path, config: EngineConfig, table: Table) -> None:
    """Ask about a picture or sound, end to end, twice: then it is not encoded. Raises CllmError."""
    from cllm.llm import LLM  # with the server's modules

    if not (mmproj := find_mmproj(Path(config.model), config.mmproj)):
        raise ConfigError("there is no mmproj beside the model: name one with --mmproj")
    metadata = GgufFile(Path(mmproj)).metadata
    table.add_row("mmproj", " ".join(str(metadata[name]) for name in metadata if name.endswith("tor_type")))
    parts = [{"type": "image_url", "image_url": file}, {"type": "text", "text": "What is this?"}]
    with LLM(config=msgspec.structs.replace(config, mmproj=mmproj)) as llm:
        for row in ("answer", "again"):
            begin = time.monotonic()
            reply = llm.chat([{"role": "user", "content": parts}], max_tokens=32, temperature=0)
            usage, took = reply.usage, time.monotonic() - begin
            tokens = f"{usage.prompt_tokens - usage.cached_tokens} of {usage.prompt_tokens} tokens new"
            table.add_row(row, f"{reply.text!r} after {took:.1f} s, {tokens}")
