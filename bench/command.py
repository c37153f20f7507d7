"""Commands beside `python -m bench`: their options, the server under test, how they end."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.client import BadAnswer
from bench.peers import RunningPeer, ServerSettings, cllm_peer, log_folder, running
from bench.report import write_report
from bench.server_log import find_failures
from cllm.errors import CllmError

_SHARED: dict[str, dict[str, Any]] = {
    "--model": {"type": Path, "help": "GGUF file (default: the embedded model)"},
    "--threads": {"type": int, "default": 0, "help": "of the server (default: one per core)"},
    "--parallel": {"type": int, "default": 8, "help": "sequences (default 8)"},
    "--out": {"type": Path, "help": "folder to write the report (Markdown and JSON) into"},
    "--logs": {"type": Path, "help": "folder to keep the servers' logs in"},
    "--command": {"type": shlex.split, "help": "what to start instead of the installed cllm"},
}


def make_parser(
    module: str, about: str | None, *shared: str, **own: tuple[Any, str]
) -> argparse.ArgumentParser:
    """Make the parser of `python -m MODULE`: some of the shared options, and its own.

    Of its own, a default and a description are given by name. False is a switch, [] may be given again.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    for flag in shared:
        parser.add_argument(flag, **_SHARED[flag])
    for name, (default, what) in own.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true", help=what)
        elif default == []:
            parser.add_argument(flag, action="append", default=[], help=f"{what}; again for more")
        else:
            said = "" if default == "" else f" (default {default})"
            parser.add_argument(flag, type=type(default), default=default, help=what + said)
    return parser


@contextmanager
def serving(
    name: str,
    settings: ServerSettings,
    command: Sequence[str] | None = None,
    logs: Path | None = None,
    flags: Sequence[str] = (),
    *,
    fails: bool = False,
) -> Iterator[RunningPeer]:
    """`cllm serve` for this block, its log in `logs`, if that is to be kept. Raises SetupError.

    Raises BadAnswer if it logged an error or lost a worker, unless the block has it fail.
    """
    with log_folder(logs) as folder:
        log = folder / f"{name}.log"
        with running(cllm_peer(settings, command, flags=flags), log) as server:
            yield server
        failures = find_failures(log.read_text(errors="replace"))
        if failures and not fails:
            raise BadAnswer(f"the server failed, {len(failures)} lines: {failures[0]}")


def conclude(name: str, text: str, data: object, out: Path | None, *, failed: bool) -> int:
    """Print the report, write it where it is wanted; the exit code."""
    print(text)
    if out is not None:
        write_report(out, name, text, data)
    return 1 if failed else 0


def run_command(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, run: Callable[..., int]
) -> int:
    """Call `run` with the options, by name, for its exit code; 2 and one line where it cannot measure."""
    options = parser.parse_args(arguments)
    try:
        return run(**vars(options))
    except (CllmError, BadAnswer, httpx.HTTPError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
