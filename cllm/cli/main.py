"""The command line. Each command is a file beside this one."""

from __future__ import annotations

import typer

from cllm import __version__
from cllm.cli.bench import bench_command
from cllm.cli.build import build_command
from cllm.cli.doctor import doctor_command
from cllm.cli.keys import keys_app
from cllm.cli.run import run_command
from cllm.cli.serve import serve_command
from cllm.cli.tune import tune_command

app = typer.Typer(
    help="GGUF models for many users at once, on llama.cpp.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"cllm {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True)) -> None:
    pass


app.command("serve")(serve_command)
app.command("run")(run_command)
app.command("bench")(bench_command)
app.command("tune")(tune_command)
app.command("doctor")(doctor_command)
app.command("build")(build_command)
app.add_typer(keys_app, name="keys")


def main() -> None:
    """Entry point of `cllm`."""
    app()
