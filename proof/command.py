"""Options of a proof: `python -m proof NAME`, and the folders and models that several of them use."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench import command

ROOT = Path(__file__).parents[1]
TINY = ROOT / "build" / "tiny.gguf"  # made by `make proof`


def make_parser(
    module: str, about: str | None, *shared: str, **own: tuple[Any, str]
) -> argparse.ArgumentParser:
    """Make the parser of a module of this package. `--tiny` is one more of the shared options."""
    name = module.rpartition(".")[2].replace("_", "-")
    flags = [flag for flag in shared if flag != "--tiny"]
    if len(flags) < len(shared):
        own["tiny"] = TINY, "GGUF file of a tiny model"
    return command.make_parser(f"proof {name}", about, *flags, **own)
