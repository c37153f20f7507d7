"""`cllm bench`: measure, beside llama.cpp's own server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cllm.backend.llama.build import find_built
from cllm.bench.run import run_bench
from cllm.cli.options import fail
from cllm.errors import SetupError


def bench_command(
    model: Annotated[Path | None, typer.Argument(help="GGUF file; none: the embedded model")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller workloads: a look, not a figure")] = False,
    peer: Annotated[
        Path | None, typer.Option(help="llama-server to compare with; none: the one built beside the library")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the report (Markdown and JSON)")] = None,
) -> None:
    """Measure throughput, latency and Python's share of a step, interleaved with llama-server."""
    if peer is None and (built := find_built()) is not None and (built / "bin" / "llama-server").is_file():
        peer = built / "bin" / "llama-server"
    try:
        raise typer.Exit(run_bench(model, rounds, quick, peer, out))
    except SetupError as error:
        raise fail(error) from None
