"""Supervisor of a worker process: start, silence limit, exit reason, back-off, and blame for a crash.

The engine and the tokenizer are run by the same code (invariant: survives native death).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from cllm.config import EngineConfig
from cllm.workers.channel import WorkerProcess
from cllm.workers.messages import Died, Heartbeat

log = logging.getLogger(__name__)
WORKER_MODULE = "cllm.workers.engine_worker"


class Supervisor:
    """Runs one worker process at a time and passes its reports on."""

    START_LIMIT_S = 120.0  # until the first heartbeat: a new interpreter on a busy machine
    SILENCE_LIMIT_S = 10.0  # heartbeats come every second from a thread that does nothing else
    STEP_LIMIT_S = 600.0  # no step of any size that fits a batch takes this long

    def __init__(
        self,
        role: str,
        config: EngineConfig,
        reports: Any,
        *,
        heartbeats: bool,
        log_level: str = "info",
        module: str = WORKER_MODULE,
    ) -> None:
        """`reports` is the type of what the worker sends; one without `heartbeats` may be silent for ever."""
        self._command = (module, role, log_level)
        self._config = msgspec.msgpack.encode(config)
        self._decoder = msgspec.msgpack.Decoder(reports)
        self._start_limit_s = self.START_LIMIT_S if heartbeats else None
        self._process: WorkerProcess | None = None

    def start(self, receive: Callable[[Any], None]) -> None:
        """Start a process. `receive` gets its reports on a thread of its own, `Died` as the last of them.

        Only after `Died` may it be called again.
        """
        process = WorkerProcess(*self._command, silence_limit_s=self._start_limit_s)
        self._process = process
        self.send(self._config)
        name = f"cllm-{process.role}-reports"
        threading.Thread(target=self._read, args=(process, receive), name=name, daemon=True).start()

    def _read(self, process: WorkerProcess, receive: Callable[[Any], None]) -> None:
        last_words: Died | None = None
        for frame in process.frames():
            report = self._decoder.decode(frame)
            match report:
                case Heartbeat(step_age_s):
                    process.silence_limit_s = self.SILENCE_LIMIT_S
                    if step_age_s > self.STEP_LIMIT_S:
                        log.error("the engine has been in one step for %.0f s: killing it", step_age_s)
                        process.kill()
                case Died():
                    last_words = report
                case _:
                    receive(report)
        receive(last_words or Died("engine_died", process.exit_reason(), process.exit_signal))

    def send(self, frame: bytes) -> None:
        """Send a frame. A worker that has ended drops it, and `Died` follows."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.channel.send(frame)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process and wait until it is gone. Idempotent."""
        if self._process is not None:
            self._process.close()


class Backoff:
    """Delays restarts that follow each other without progress in between, and says when to give up."""

    MAX_IN_A_ROW = 5

    def __init__(self) -> None:
        self.count = 0  # restarts since the last progress

    def progress(self) -> None:
        """Work was finished, or the cause of a crash was found: this is no crash loop."""
        self.count = 0

    def schedule(self, restart: Callable[..., None], *arguments: Any) -> bool:
        """Call `restart` after the delay, on a thread of its own. False: too many in a row, give up."""
        if self.count >= self.MAX_IN_A_ROW:
            return False
        delay = min(8.0, 0.25 * 2**self.count) if self.count else 0.0
        self.count += 1
        timer = threading.Timer(delay, restart, arguments)
        timer.daemon = True
        timer.start()
        return True


class Attempt:
    """Work given to a worker process, and how often the process crashed while it had it.

    Any of the work that was there may be the cause. All of it is retried together `retries_together` times,
    then each alone. What crashes the process alone is rejected.
    """

    retries_together = 1
    crashes = 0
    alone = False  # it must run by itself, so that another crash has one possible cause

    def blame(self) -> bool:
        """Count a crash. True: it ran alone and is the cause."""
        was_alone = self.alone
        self.crashes += 1
        self.alone = self.crashes > self.retries_together
        return was_alone
