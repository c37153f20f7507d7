"""The throw-away process that measures, seen from outside: asked, timed, and started anew when it dies."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Self

import msgspec

from cllm.config import EngineConfig
from cllm.tune.trial import Measurement, Plan, TrialTask

START_S = 600.0


def sample_text() -> str:
    """The text that we ship to measure with; it is ours."""
    return (files("cllm.tune") / "sample.txt").read_text(encoding="utf-8")


class TrialProcess:
    """Runs `command` (a trial program) while there is something to ask. A context manager.

    A death or a silence of one setting is its result; the next one gets a new process.
    """

    def __init__(self, command: Sequence[str], text: str | None = None) -> None:
        self._command = tuple(command)
        self._text = sample_text() if text is None else text
        self._process: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # what the processes write on standard error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._said.close()

    def end(self) -> None:
        """End the process, whatever it is doing. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:  # closes its pipes and waits
                pass

    def ask(self, config: EngineConfig, plan: Plan, limit_s: float) -> Measurement:
        """Measure one setting within `limit_s`; a new process may take `START_S` more, to load the model."""
        started = time.monotonic()
        limit_s += START_S if self._process is None else 0.0
        process = self._process or self._start()
        assert process.stdin is not None
        task = msgspec.json.encode(TrialTask(config=config, plan=plan, text=self._text))
        try:
            process.stdin.write(task + b"\n")
            process.stdin.flush()
            answer = self._read_line(process, started + limit_s)
        except TimeoutError:
            self.end()
            return Measurement(problem=f"it took more than {limit_s:.0f} s", took_s=limit_s, timed_out=True)
        except OSError:
            answer = b""
        try:
            return msgspec.json.decode(answer, type=Measurement)
        except msgspec.MsgspecError:
            problem = self._obituary(process)
            self.end()
            return Measurement(problem=problem, took_s=time.monotonic() - started)

    def _start(self) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C is for us, who then end it.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,
        )
        return self._process

    def _read_line(self, process: subprocess.Popen[bytes], deadline: float) -> bytes:
        """Up to the end of a line, or of the output. Raises TimeoutError."""
        assert process.stdout is not None
        descriptor, line = process.stdout.fileno(), b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            piece = os.read(descriptor, 65536)
            if not piece:
                break
            line += piece
        return line

    def _obituary(self, process: subprocess.Popen[bytes]) -> str:
        try:
            code = process.wait(1)
        except subprocess.TimeoutExpired:
            return "it answered nonsense"
        if code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
        self._said.seek(0)
        last = self._said.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        return f"it exited with code {code}" + (f": {last}" if last else "")
