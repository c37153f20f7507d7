"""`cllm service`: run the server as a systemd unit of this user: install, status, remove."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from cllm.errors import SetupError
from cllm.names import is_name, path_below

_KEPT = ("CLLM_CACHE_DIR", "CLLM_LIBRARY", "HF_HOME", "HF_ENDPOINT")  # where things are; never a secret
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
service_app = typer.Typer(help="Run the server as a systemd unit of this user.", no_args_is_help=True)

Name = Annotated[str, Option("--name", help="The unit's name")]
Print = Annotated[bool, Option("--print", help="Print what would be done; change nothing")]


def make_unit(arguments: Sequence[str], directory: Path) -> str:
    """The unit's text: `cllm serve` with these arguments, in this folder, by this Python."""
    command = " ".join(map(_quote, (sys.executable, "-m", "cllm", "serve", *arguments)))
    found = (f"{name}={os.environ[name]}" for name in _KEPT if os.environ.get(name))
    kept = "".join(f"Environment={_quote(each)}\n" for each in found)
    values = {"command": command, "directory": str(directory).replace("%", "%%"), "kept": kept}
    unit = Path(__file__).with_name("service.txt").read_text(encoding="utf-8")
    return re.sub(r"#.*\n|{(\w+)}", lambda found: values[found[1]] if found[1] else "", unit)


def _quote(word: str) -> str:
    """A word of a command line, as systemd reads it."""
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{word}"' if not word or any(character in word for character in " \t'\"\\;") else word


def unit_path(name: str) -> Path:
    """Return the path of a user's unit. Raise BadParameter for a name that can be none."""
    if not is_name(name):
        raise typer.BadParameter(f"{name!r}: up to 64 letters, digits, '.', '-' and '_'", param_hint="--name")
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return path_below(Path(home, "systemd", "user").expanduser(), f"{name}.service")


@service_app.command("install", context_settings=_PASSED_ON)
def install(context: typer.Context, name: Name = "cllm", show: Print = False) -> None:
    """Start `cllm serve` with the arguments that follow, now and at each login."""
    path, unit = unit_path(name), make_unit(context.args, Path.cwd())
    if show:
        typer.echo(f"# {path}\n{unit}")
    else:
        _check()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(unit, encoding="utf-8")
    _run("daemon-reload", f"enable {name}", f"restart {name}", show=show)
    if not show:
        typer.echo(
            f"installed {path}; its log: journalctl --user -u {name} -f; "
            "to run without a login: loginctl enable-linger",
            err=True,
        )


@service_app.command("status")
def status(name: Name = "cllm") -> None:
    """Show the unit's state and its last lines."""
    _check()
    raise typer.Exit(subprocess.run(["systemctl", "--user", "--no-pager", "status", name]).returncode)


@service_app.command("remove")
def remove(name: Name = "cllm", show: Print = False) -> None:
    """Stop the unit and delete it. Models and cache stay."""
    path = unit_path(name)
    if not show:
        if not path.exists():
            raise SetupError(f"no unit {name} is installed: there is no {path}")
        _check()
    _run(f"disable --now {name}", show=show)
    if show:
        typer.echo(f"# rm {path}")
    else:
        path.unlink()
    _run("daemon-reload", show=show)


def _check() -> None:
    if shutil.which("systemctl") is None:
        raise SetupError("systemd is not here (no systemctl); `cllm service install --print` shows the unit")


def _run(*commands: str, show: bool) -> None:
    """Run commands of systemctl, or `show` them."""
    for command in commands:
        if show:
            typer.echo(f"# systemctl --user {command}")
            continue
        done = subprocess.run(["systemctl", "--user", *command.split()], capture_output=True, text=True)
        if done.returncode != 0:
            reason = done.stderr.strip() or f"it ended with code {done.returncode}"
            raise SetupError(f"`systemctl --user {command}` failed: {reason}")
