"""`cllm keys`: make, list and remove the API keys of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from typer import Argument, Option

from cllm.cli.terminal import print_columns
from cllm.server.keys import add_key, read_keys, remove_key
from cllm.types import TenantLimits

keys_app = typer.Typer(help="Manage the API keys of a server.", no_args_is_help=True)
LIMITS = msgspec.structs.fields(TenantLimits)[2:]  # after name and role
Name = Annotated[str, Argument(help="The tenant: a person or a program")]
File = Annotated[Path, Option("--file", help="The keys file", envvar="CLLM_API_KEYS")]
FILE = Path("cllm-keys.toml")


@keys_app.command("new")
def new_key(
    name: Name,
    admin: Annotated[bool, Option("--admin", help="It may use /debug, /admin, /metrics, /slots")] = False,
    file: File = FILE,
) -> None:
    """Make a key: printed once, kept as a hash. A running server takes it up on SIGHUP."""
    typer.echo(add_key(file, name, admin=admin))
    typer.echo(f"kept as a hash in {file}; serve with --api-keys {file}, or send SIGHUP if it runs", err=True)


@keys_app.command("list")
def list_keys(file: File = FILE) -> None:
    """List the keys of the file: name, role and limits. The keys themselves are not kept."""
    rows = []
    for tenant in read_keys(file).values():
        values = ((each, getattr(tenant, each.name)) for each in LIMITS)
        given = [f"{each.name} {value:g}" for each, value in values if value != each.default]
        rows.append((tenant.name, tenant.role, ", ".join(given)))
    print_columns(("name", "role", "limits"), rows)


@keys_app.command("rm")
def remove(name: Name, file: File = FILE) -> None:
    """Remove a key. A running server refuses it from the next SIGHUP on."""
    remove_key(file, name)
    typer.echo(f"{name} is removed from {file}; send SIGHUP to a server that runs", err=True)
