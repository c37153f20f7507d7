"""The command line. Each command is a file beside this one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from cllm import __version__

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
        if cmd_name not in COMMANDS:
            return None
        file, attribute = COMMANDS[cmd_name]
        found = getattr(import_module(f"cllm.cli.{file}"), attribute)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False)
            alone.command(cmd_name)(found)
            found = alone
        command = typer.main.get_command(found)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=Commands,
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


def main() -> None:
    """Entry point of `cllm`."""
    app()
