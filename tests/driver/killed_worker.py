"""Workers whose engine kills itself (SIGKILL) at an exact place of its answers.

`KILLED` goes before the code of a server's program. The file named by the variable `KILL_PLAN` says where:
while it exists, an engine waits until so many requests are there, holds back each that has had so many
tokens, and dies when all have (or have ended). What was reported until then reached the parent, nothing else.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from cllm.core.engine_core import EngineCore
from cllm.core.prefill_budget import PrefillBudget
from cllm.core.sequence import Sequence
from cllm.core.spec_decode import DecodeStep
from cllm.messages import Report, StepReport
from cllm.workers.engine_worker import EngineWorker

KILLED = "from tests.driver import killed_worker; killed_worker.replace_workers(); "
WAIT_S = 30.0


class KillPlan(msgspec.Struct):
    """When to kill the engine; what it had said then is added when that is done."""

    requests: int
    tokens: int
    said: dict[str, int] = {}  # tokens by request id

    def write(self, path: Path) -> None:
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self))
        new.rename(path)  # appears whole


def read_done(path: Path) -> KillPlan:
    """The plan that was carried out."""
    return msgspec.json.decode(path.with_suffix(".done").read_bytes(), type=KillPlan)


def replace_workers() -> None:
    """In the parent: start this module's workers instead of those it names."""
    from cllm.workers.supervisor import Supervisor

    start = Supervisor.__init__

    def start_killed(self: Supervisor, *arguments: Any, **named: Any) -> None:
        start(self, *arguments, **named)
        module, *others = self._command
        os.environ["KILLED_MODULE"] = module
        self._command = (__name__, *others)  # type: ignore[assignment]

    Supervisor.__init__ = start_killed  # type: ignore[method-assign]


class KilledEngine:
    """Watches the engine of this process, and kills it when it is time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._plan = msgspec.json.decode(path.read_bytes(), type=KillPlan) if path.exists() else None
        self._said: dict[str, int] = {}
        self._ended: set[str] = set()
        self._computes = False

    def waits(self, core: EngineCore) -> bool:
        """Not all requests are there yet, or what they need is not prepared. Looked at before each step."""
        if self._plan is None and self._path.exists():
            self._plan = msgspec.json.decode(self._path.read_bytes(), type=KillPlan)
        if self._plan is None or self._computes:
            return False
        live = core.scheduler.live.values()
        self._computes = len(live) == self._plan.requests and all(one.startable for one in live)
        return not self._computes

    def holds(self, sequence: Sequence) -> bool:
        """It has had its tokens, and waits for the others."""
        generated = len(sequence.tokens) - len(sequence.request.prompt)
        return self._plan is not None and generated >= self._plan.tokens

    def follow(self, report: Report) -> None:
        """A report was sent."""
        if self._plan is None or not isinstance(report, StepReport):
            return
        for output in report.outputs:
            self._said[output.request_id] = self._said.get(output.request_id, 0) + len(output.tokens)
            if output.finish_reason is not None:
                self._ended.add(output.request_id)
        going = [count for name, count in self._said.items() if name not in self._ended]
        if len(self._said) == self._plan.requests and min(going, default=0) >= self._plan.tokens:
            self._plan.said = self._said
            self._plan.write(self._path.with_suffix(".done"))
            self._path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(WAIT_S)  # until it arrives


def watch_engine(killed: KilledEngine) -> None:
    step, emit, schedule = EngineCore.step, EngineWorker._emit, PrefillBudget.schedule_tokens

    def step_or_wait(self: EngineCore, *, follow: bool = False) -> None:
        if killed.waits(self):
            time.sleep(0.001)
        else:
            step(self, follow=follow)

    def emit_and_follow(self: EngineWorker, report: Report) -> None:
        emit(self, report)
        killed.follow(report)

    def schedule_or_hold(
        self: PrefillBudget, running: Iterable[Sequence], urgency: Callable[[Sequence], int]
    ) -> dict[str, int]:
        return schedule(self, [sequence for sequence in running if not killed.holds(sequence)], urgency)

    EngineCore.step, EngineWorker._emit = step_or_wait, emit_and_follow  # type: ignore[method-assign]
    PrefillBudget.schedule_tokens = schedule_or_hold  # type: ignore[method-assign]


def main(arguments: list[str]) -> int:
    if os.environ["KILLED_MODULE"] == "cllm.testing":
        from cllm.testing import main as run_worker
    else:
        from cllm.workers.engine_worker import main as run_worker
    if arguments[1] == "engine":
        watch_engine(KilledEngine(Path(os.environ["KILL_PLAN"])))
        DecodeStep.MIN_GAIN = 0.0  # where drafts are on, they are made whether they pay or not
    return run_worker(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
