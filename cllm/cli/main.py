"""The command line. Each command is a file beside this one."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

import cllm

COMMANDS = {  # name: the file beside this one, and what it calls the command
    "serve": ("serve", "serve_command"),
    "run": ("run", "run_command"),
    "tune": ("tune", "tune_command"),
    "doctor": ("doctor", "doctor_command"),
    "build": ("build", "build_command"),
    "keys": ("keys", "keys_app"),
}


class Commands(TyperGroup):
    """Reads a command's file when it is asked for: a server need not load what draws plots."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name == "bench":
            found = _find_bench()
        elif cmd_name in COMMANDS:
            file, attribute = COMMANDS[cmd_name]
            found = getattr(import_module(f"cllm.cli.{file}"), attribute)
        else:
            return None
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False)
            alone.command(cmd_name)(found)
            found = alone
        command = typer.main.get_command(found)
        command.name = cmd_name
        return command


def _find_bench() -> Any:
    """The command of the repository's benchmarks (hidden). They are beside this package, not in it."""
    root = Path(cllm.__file__).parents[1]
    if not (root / "bench" / "__main__.py").is_file():
        typer.echo("cllm bench: benchmarks are in the repository, not in the package: `make bench`", err=True)
        raise typer.Exit(2)
    sys.path.append(str(root))
    return import_module("bench.__main__").bench_command


app = typer.Typer(
    cls=Commands,
    help="GGUF models for many users at once, on llama.cpp.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"cllm {cllm.__version__}")
        raise typer.Exit


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True)) -> None:
    pass


def main() -> None:
    """Entry point of `cllm`."""
    app()
