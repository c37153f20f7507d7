"""Programs that tests start: forked from a process that has imported cllm, which takes a second each time."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from multiprocessing import current_process, forkserver, get_context
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import patch

PRELOADED = ["cllm.backend.llama.probe", "cllm.cli.serve", "cllm.llm", "cllm.testing"]
FORKED = ("cllm.cli.prepare", "cllm.backend.llama.dry_load")


class Program:
    """`python -c CODE ARGUMENTS` with these variables and no others, its output in a file, or in two.

    It has what tests need of `subprocess.Popen`. Its preparation is forked, too; its workers are new
    interpreters, as ever.
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


class _Popen(subprocess.Popen[Any]):
    """Forks for the preparation what would be `python -m MODULE`, where no other thread computes."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        module, alone = command[-1], threading.current_thread() is threading.main_thread()
        if module in FORKED and alone and threading.active_count() <= 2:  # one may wait for the parent's end
            options["preexec_fn"] = partial(_be, module, options.get("env") or os.environ)
        super().__init__(command, **options)


def _be(module: str, variables: Mapping[str, str]) -> NoReturn:
    """In a new process: what an interpreter does with `-m`. It must not return."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.update(variables)
    try:
        status = import_module(module).main()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        status = 1
    os._exit(status)


def _run(code: str, arguments: Sequence[str], variables: Mapping[str, str], output: str, errors: str) -> None:
    """In the new process: what an interpreter does with `-c`."""
    os.environ.clear()
    os.environ.update(variables)
    for path, stream in ((output, sys.stdout), (errors, sys.stderr)):
        with Path(path).open("ab") as file:
            os.dup2(file.fileno(), stream.fileno())
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have processes
    sys.argv = ["-c", *arguments]
    subprocess.Popen = _Popen  # type: ignore[assignment,misc]
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()
