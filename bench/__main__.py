"""`python -m bench`: cllm beside llama-server and other OpenAI servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.run import Options, run_bench
from bench.workloads import built_in, find
from cllm.build.build import find_built
from cllm.cli.terminal import fail
from cllm.errors import SetupError


def bench_command(
    model: Annotated[Path | None, typer.Argument(help="GGUF file; none: the embedded model")] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help="Built-in workload or TOML file, again for more; none: all built-in"),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="A server to compare with, again for more: 'llama-server=PATH [FLAGS]', cllm=FLAGS, URL, "
            "NAME=URL or 'none'; without it, the llama-server built beside the library"
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller, two rounds: a look, not a figure")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for REPORT.md, report.json and plots")] = None,
    threads: Annotated[int, typer.Option(min=0, help="Compute threads of every server; 0: one per core")] = 0,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sample at this instead of the workload's own; mostly greedy")
    ] = None,
    cllm_flag: Annotated[
        list[str] | None,
        typer.Option(
            help="More flags of `cllm serve`, again for more; drafts off: --cllm-flag=--draft-tokens=0"
        ),
    ] = None,
    plain_library: Annotated[
        Path | None, typer.Option(help="Folder of another build of the library, for the bar on it in `long`")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder to keep the servers' logs in")] = None,
    show: Annotated[bool, typer.Option("--list", help="List the built-in workloads and end")] = False,
) -> None:
    """Measure throughput, latency and Python's share of a step, in rounds interleaved with other servers."""
    if show:
        for each in built_in().values():
            typer.echo(f"{each.name:10} {each.about}")
        return
    built = find_built()
    tools = None if built is None else built / "bin"
    if not peer and tools is not None and (tools / "llama-server").is_file():
        peer = [f"llama-server={tools / 'llama-server'}"]
    bench = tools / "llama-bench" if tools is not None else None
    options = Options(
        model=model,
        peers=tuple(each for each in peer or () if each != "none"),
        rounds=rounds,
        quick=quick,
        out=out,
        threads=threads,
        cllm_flags=tuple(cllm_flag or ()),
        llama_bench=bench if bench is not None and bench.is_file() else None,
        plain_library=plain_library,
        logs=logs,
    )
    try:
        definitions = find(workload or [])
        if temperature is not None:
            definitions = [definition.at_temperature(temperature) for definition in definitions]
        raise typer.Exit(run_bench(options, definitions))
    except SetupError as error:
        raise fail(error) from None


if __name__ == "__main__":
    typer.run(bench_command)
