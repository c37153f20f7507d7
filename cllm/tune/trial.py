"""Trial: one setting, measured in a throw-away process that may die of it.

One JSON line each way: a `TrialTask` goes in, a `Measurement` comes out of `cllm.tune.trial_worker`.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple, Self

import msgspec

from cllm.config import EngineConfig

BATCH1_REPEATS = 3  # a step of one request is short, so there are more of them
START_S = 600.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured. `long` of 0: short contexts only; `perplexity_tokens`: perplexity instead.

    `prompt`: how many tokens at the end of the longest context are timed as a prompt (0: none); the prefix
    before them is computed once and restored afterwards. `steps` of 0: no decode steps.
    """

    requests: int
    short: int = 32
    long: int = 800
    prompt: int = 64
    steps: int = 4
    perplexity_tokens: int = 0

    @property
    def decode_cells(self) -> int:
        """KV cells that decode steps fill behind a long context: alone, ragged, and all together."""
        return (BATCH1_REPEATS * self.steps + 1) + 2 * (self.steps + 1)


class TrialTask(msgspec.Struct, frozen=True, kw_only=True):
    """Measure this setting on this text (the speed of a mixture of experts depends on it)."""

    config: EngineConfig
    plan: Plan
    text: str


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Time that a setting takes, or the `problem` that prevented the measurement.

    `seconds` by case: of a prefill per token, otherwise per step (the median).
    """

    seconds: dict[str, float] = {}
    perplexity: float | None = None
    load_s: float = 0.0  # loading the model, where this setting needs that
    took_s: float = 0.0  # all the rest
    others: float | None = None  # cores that other programs used meanwhile
    problem: str = ""
    timed_out: bool = False  # the problem is that it takes too long


class Case(NamedTuple):
    """A part of the serving mix. `weight`: its tokens (of a prefill) or steps in the mix."""

    name: str
    title: str
    weight: int


CASES = (
    Case("prefill", "prefill", 2000),
    Case("one_short", "1 short", 60),
    Case("one_long", "1 long", 40),
    Case("all_short", "all short", 60),
    Case("ragged", "ragged", 60),
    Case("all_long", "all long", 40),
)


def mix_seconds(seconds: Mapping[str, float]) -> float:
    """Seconds for the mix, from seconds per token (prefill) or per step (the rest)."""
    return sum(case.weight * seconds[case.name] for case in CASES if case.name in seconds)


def sample_text() -> str:
    """The text to measure with, shipped with cllm."""
    return (files("cllm.tune") / "sample.txt").read_text(encoding="utf-8")


class TrialProcess:
    """Runs `command` (a trial program) and asks it. A context manager.

    A crash or a timeout is the result of its setting; the next setting gets a new process.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed in __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._stderr.close()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:  # closes its pipes and waits
                pass

    def ask(self, config: EngineConfig, plan: Plan, limit_s: float) -> Measurement:
        """Measure one setting within `limit_s`; a new process may take `START_S` more, to load the model."""
        started = time.monotonic()
        if self._process is None:
            limit_s += START_S
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,  # Ctrl-C is handled here, which then ends it
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        task = msgspec.json.encode(TrialTask(config=config, plan=plan, text=sample_text()))
        alarm = threading.Timer(limit_s, process.kill)
        alarm.start()
        try:
            process.stdin.write(task + b"\n")
            process.stdin.flush()
            return msgspec.json.decode(process.stdout.readline(), type=Measurement)
        except (OSError, msgspec.MsgspecError):
            timed_out = alarm.finished.is_set()
            problem = f"it took more than {limit_s:.0f} s" if timed_out else self._exit_reason(process)
            self._end()
            return Measurement(problem=problem, took_s=time.monotonic() - started, timed_out=timed_out)
        finally:
            alarm.cancel()

    def _exit_reason(self, process: subprocess.Popen[bytes]) -> str:
        try:
            code = process.wait(1)
        except subprocess.TimeoutExpired:
            return "it answered nonsense"
        if code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
        self._stderr.seek(0)
        last = self._stderr.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        return f"it exited with code {code}" + (f": {last}" if last else "")
