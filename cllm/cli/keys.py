"""`cllm keys`: who may use a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cllm.cli.options import fail
from cllm.errors import ConfigError
from cllm.server.keys import add_key

keys_app = typer.Typer(help="API keys of a server.", no_args_is_help=True)

File = Annotated[Path, typer.Option("--file", help="The keys file", envvar="CLLM_API_KEYS")]


@keys_app.callback()
def _root() -> None:
    pass


@keys_app.command("new")
def new_command(
    name: Annotated[str, typer.Argument(help="Whose key it is")],
    admin: Annotated[
        bool, typer.Option("--admin", help="It may use /debug, /admin, /metrics, /slots")
    ] = False,
    file: File = Path("cllm-keys.toml"),
) -> None:
    """Make a key: printed once, kept as a hash. A running server takes it up on SIGHUP."""
    try:
        key = add_key(file, name, admin=admin)
    except ConfigError as error:
        raise fail(error) from None
    typer.echo(key)
    typer.echo(f"kept as a hash in {file}; serve with --api-keys {file}, or send SIGHUP if it runs", err=True)
