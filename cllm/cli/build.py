"""`cllm build`: the native library for this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from cllm.build import build


def build_command(
    force: Annotated[bool, typer.Option("--force", help="Build again even if one is there")] = False,
    portable: Annotated[bool, typer.Option("--portable", help="No flags for this CPU: slower, safe")] = False,
    compiler: Annotated[str, typer.Option(help="gcc, clang or zig; empty: the best found")] = "",
    with_server: Annotated[
        bool, typer.Option("--with-server", help="Also llama.cpp's own server, to compare with")
    ] = False,
) -> None:
    """Build llama.cpp with the flags this CPU and compiler call for (about three minutes, once)."""
    arguments = [f"--compiler={compiler}"] if compiler else []
    flags = {"--force": force, "--portable": portable, "--with-server": with_server}
    arguments += [flag for flag, wanted in flags.items() if wanted]
    raise typer.Exit(build.main(arguments))
