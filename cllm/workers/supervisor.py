"""Supervisor of a worker process: start, silence limit, exit reason, back-off; blame and resumption.

The engine and the tokenizer are run by the same code (invariant: survives native death).
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from cllm.config import EngineConfig
from cllm.errors import CllmError, EngineDied, EngineNotReady
from cllm.messages import Died, Heartbeat
from cllm.types import Failure, FinishReason, Request, RequestOutput, Usage
from cllm.workers.channel import WorkerProcess

log = logging.getLogger(__name__)
WORKER_MODULE = "cllm.workers.engine_worker"
START_FAILED = EngineNotReady.code  # of a `Died`: no process was started, so none of its work is the cause


class Supervisor:
    """Runs one worker process at a time and passes its reports on.

    One thread does all that can wait, for the supervisor's whole life: it starts the process, reads, writes,
    waits for its end, and for the next order to start. So a restart needs no new thread, and no caller waits.
    """

    START_LIMIT_S = 120.0  # until the first heartbeat: a new interpreter on a busy machine
    SILENCE_LIMIT_S = 10.0  # heartbeats come every second from a thread that does nothing else
    STEP_LIMIT_S = 600.0  # no step of any size that fits a batch takes this long

    def __init__(
        self,
        role: str,
        config: EngineConfig,
        reports: Any,
        *,
        beat: Callable[[], None] = lambda: None,
        log_level: str = "info",
        module: str = WORKER_MODULE,
    ) -> None:
        """`reports` is the type of what the worker sends, in addition to `Heartbeat` and `Died`.

        `beat` is called at each heartbeat, about once a second.
        """
        self._beat = beat
        self._role = role
        self._command = (module, role, log_level)
        self._config = msgspec.msgpack.encode(config)
        self._decoder = msgspec.msgpack.Decoder(reports | Heartbeat | Died)
        self._changed = threading.Condition()
        self._due: float | None = None  # when the process is to be started (monotonic)
        self._receive: Callable[[Any], None]  # gets its reports
        self._process: WorkerProcess | None = None
        self.send: Callable[..., None] = lambda *_, **__: None  # `WorkerProcess.send` of the process
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self, receive: Callable[[Any], None], delay_s: float = 0.0) -> None:
        """Start a process after the delay; returns at once. What is sent meanwhile waits for it.

        `receive` gets its reports on the supervisor's thread, `Died` as the last of them, also when it cannot
        be started. Only after `Died` may it be called again. Raises EngineNotReady: there is no thread.
        """
        process = WorkerProcess(*self._command, silence_limit_s=self.START_LIMIT_S)
        process.send(self._config)
        with self._changed:
            if self._closed:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=f"cllm-{self._role}-supervisor", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise EngineNotReady(f"the {self._role} process cannot be started: {error}") from None
                self._thread = thread
            self._process, self.send = process, process.send
            self._due, self._receive = time.monotonic() + delay_s, receive
            self._changed.notify()

    def _run(self) -> None:
        while (process := self._next_process()) is not None:
            receive = self._receive
            died = self._supervise(process, receive)
            try:
                receive(died)
            except Exception:
                log.exception("the end of the %s process could not be handled", self._role)

    def _next_process(self) -> WorkerProcess | None:
        """Wait until a process is to be started; None when closed."""
        with self._changed:
            while not self._closed:
                left_s = self._due - time.monotonic() if self._due is not None else None
                if left_s is not None and self._process is not None and (self._process.killed or left_s <= 0):
                    self._due = None
                    return self._process
                self._changed.wait(left_s)
        return None

    def _supervise(self, process: WorkerProcess, receive: Callable[[Any], None]) -> Died:
        """Run a process to its end; how it ended."""
        try:
            process.open()
        except Exception as error:  # no memory, no process, no file descriptor is left: tried again later
            reason = getattr(error, "strerror", None) or type(error).__name__
            return Died(START_FAILED, f"the {self._role} process could not be started: {reason}")
        last_words: Died | None = None
        try:
            for frame in process.frames():
                match report := self._decoder.decode(frame):
                    case Heartbeat(step_age_s):
                        process.silence_limit_s = self.SILENCE_LIMIT_S
                        if step_age_s > self.STEP_LIMIT_S:
                            process.kill(f"it was in one step for {step_age_s:.0f} s")
                        self._beat()
                    case Died():
                        last_words = report
                        break  # it must exit now, whatever it still does
                    case _:
                        receive(report)
        except msgspec.MsgspecError as error:  # nothing after it can be trusted
            process.kill(f"it sent a report that cannot be decoded ({type(error).__name__})")
        except Exception:
            log.exception("a report of the %s process could not be handled", self._role)
            process.kill("its report could not be handled")
        process.close()
        return last_words or Died(EngineDied.code, process.exit_reason(), process.exit_signal)

    def kill(self) -> None:
        """End the process now, or do not start it; `Died` follows."""
        with self._changed:
            if self._process is not None:
                self._process.kill()
                self._changed.notify()

    def end(self) -> None:
        """Let the process exit and start no other; returns at once. Idempotent."""
        with self._changed:
            self._closed = True
            if self._process is not None:
                self._process.end()
            self._changed.notify()

    def close(self) -> None:
        """End the process and wait until it is gone. Idempotent."""
        self.end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(3 * WorkerProcess.END_LIMIT_S)


class Backoff:
    """Delays restarts that follow each other without progress in between."""

    MAX_IN_A_ROW = 5
    MAX_DELAY_S = 60.0
    STABLE_S = 60.0  # a run that was ready for longer is progress

    def __init__(self) -> None:
        self.count = 0  # restarts since the last progress
        self._ready_at: float | None = None

    @property
    def exhausted(self) -> bool:
        """Too many in a row: it is not expected to come back soon."""
        return self.count > self.MAX_IN_A_ROW

    def ready(self) -> None:
        """The process can work from now on."""
        self._ready_at = time.monotonic()

    def progress(self) -> None:
        """Work was finished, or the cause of a crash was found: this is no crash loop."""
        self.count = 0

    def next_delay(self) -> float:
        """The process has ended: count it, and say how long to wait before the next start."""
        if self._ready_at is not None and time.monotonic() - self._ready_at > self.STABLE_S:
            self.progress()
        self._ready_at = None
        delay_s = min(self.MAX_DELAY_S, 0.25 * 2 ** min(self.count, 10)) if self.count else 0.0
        self.count += 1
        return delay_s


class Attempt:
    """Work given to a worker process, and the number of crashes of the process while it had it.

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

    def clear(self) -> None:
        """It was not the cause of the crashes so far."""
        self.crashes, self.alone = 0, False


@dataclass(eq=False, repr=False)
class ResumableRequest(Attempt):
    """A request, its answer so far, and its usage over all engines that have computed it.

    A request that crashed an engine before is cleared of that by `CLEARING_TOKENS` more of its answer: what
    kills each time it is computed gets no further.
    """

    CLEARING_TOKENS = 16
    cancelled = False
    generated = 0  # tokens of the answer so far
    _resumed_at = 0  # number of them that came from engines that died
    _clearing_tokens = CLEARING_TOKENS

    request: Request
    resumption: Request | None = None  # what the next engine gets, once one has died: the answer goes on
    _answer: array[int] = field(default_factory=partial(array, "i"))  # without the tokens that it came with
    _usage: Usage | None = None  # as far as it is known
    _earlier: Usage | None = None  # the same, when the last engine died

    def add_tokens(self, output: RequestOutput) -> None:
        """Add the tokens of an output to the answer."""
        self._answer.extend(output.tokens)
        self.generated = len(self._answer)
        if output.usage_so_far is not None:
            self._usage = self.whole_usage(output.usage_so_far)

    def clear_by_progress(self) -> bool:
        """Clear it of earlier crashes, if it has come far enough since the last of them."""
        if self.generated < self._resumed_at + self._clearing_tokens:
            return False
        self._clearing_tokens *= 2  # one that kills now and then is found out all the same
        self.clear()
        return True

    def resume(self) -> None:
        """Its engine is gone: the next one goes on from here."""
        self._resumed_at = self.generated
        self._earlier = self._usage
        prefix = (*self.request.generated_prefix, *self._answer)
        self.resumption = msgspec.structs.replace(self.request, generated_prefix=prefix)

    def make_end(self, error: CllmError | None = None) -> RequestOutput:
        """The terminal output where no engine computes it: an error, or cancelled."""
        if error is None:
            return RequestOutput(request_id=self.request.id, finish_reason=FinishReason.CANCELLED)
        failure = Failure(error.code, error.message)
        return RequestOutput(request_id=self.request.id, finish_reason=FinishReason.ERROR, error=failure)

    def whole_usage(self, usage: Usage) -> Usage:
        """The usage over all engines that have computed it. What one took from its cache counts once."""
        if (earlier := self._earlier) is None:
            return usage
        return msgspec.structs.replace(
            usage,
            cached_tokens=earlier.cached_tokens,
            cached_from=earlier.cached_from,
            drafted_tokens=earlier.drafted_tokens + usage.drafted_tokens,
            accepted_tokens=earlier.accepted_tokens + usage.accepted_tokens,
            drafter=usage.drafter or earlier.drafter,
        )
