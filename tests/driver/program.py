"""Programs that tests start: forked from a process that has imported cllm, which takes a second each time."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, get_context
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

PRELOADED = ["cllm.cli.serve", "cllm.testing"]


class Program:
    """`python -c CODE ARGUMENTS` with these variables and no others, its output in a file, or in two.

    It has what tests need of `subprocess.Popen`. What it starts itself are new interpreters, as ever.
    """

    def __init__(
        self,
        code: str,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        output: Path,
        errors: Path | None = None,
    ) -> None:
        output.touch()
        given = (code, tuple(arguments), dict(variables), str(output), str(errors or output))
        with _as_a_shell(variables):
            forkserver.set_forkserver_preload(PRELOADED)
            # A daemon: one that a test forgot ends with the tests.
            self._process = get_context("forkserver").Process(target=_run, args=given, daemon=True)
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextmanager
def _as_a_shell(variables: Mapping[str, str]) -> Iterator[None]:
    """What is imported may read variables; and nothing of this program is to be imported there."""
    with patch.dict(os.environ, variables), patch.dict(sys.modules, __main__=ModuleType("__main__")):
        yield


def _run(code: str, arguments: Sequence[str], variables: Mapping[str, str], output: str, errors: str) -> None:
    """In the new process: what an interpreter does with `-c`."""
    os.environ.clear()
    os.environ.update(variables)
    for path, stream in ((output, sys.stdout), (errors, sys.stderr)):
        with Path(path).open("ab") as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = ["-c", *arguments]
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()
