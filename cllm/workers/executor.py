"""Executor: an engine, its tokenizer and, with an mmproj, its media encoder in supervised worker processes.

Nothing native is imported: hostile input can crash the workers, not the process that holds the queue.
"""

from __future__ import annotations

import itertools
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from cllm import messages
from cllm.config import EngineConfig
from cllm.errors import CllmError, EngineDied, InvalidRequest, ShuttingDown, TokenizerBusy, from_code
from cllm.text.chat_template import GUARD_LIMIT_S
from cllm.text.prompt import Chat
from cllm.types import Failure, TokenBound
from cllm.workers.supervisor import START_FAILED, WORKER_MODULE, Attempt, Backoff, Supervisor

log = logging.getLogger(__name__)
THREADS = 2  # of the worker: a long prompt must not hold up the short ones behind it
MEDIA_AT_ONCE = 8  # pictures in the media worker, of several tasks or of a single one that has more
LARGE_BYTES = 64 << 10  # takes some 30 ms; at most THREADS - 1 such tasks are in the worker at a time
MAX_WAITING_BYTES = 128 << 20
WAIT_LIMIT_S = 30.0
TEXT_LIMIT_S = 30.0  # in the worker; tokenising 8 MiB takes a few seconds: what takes longer hangs
GRAMMAR_LIMIT_S = 120.0  # the worker itself ends one by its CPU time; a busy machine must not
MEDIA_LIMIT_S = 300.0  # a large picture takes seconds on a CPU, and a request may have many
Receive = Callable[[messages.Report], None]
_SUBMISSIONS = msgspec.msgpack.Decoder(messages.Submit)


class ProcessExecutor:
    """Runs one engine at a time, its tokenizer and its media encoder, each in a process of its own."""

    media: ProcessTokenizer | None = None  # only for a model with an mmproj

    def __init__(
        self,
        config: EngineConfig,
        *,
        log_level: str = "info",
        module: str = WORKER_MODULE,
        engine_module: str = "",
    ) -> None:
        """With an `engine_module`, the engine worker is that: replicas of a cluster compute, for instance."""
        self._engine = Supervisor(
            "engine", config, messages.Report, log_level=log_level, module=engine_module or module
        )
        self.tokenizer = ProcessTokenizer(config, log_level=log_level, module=module)
        if config.mmproj:
            self.media = ProcessTokenizer(config, role="media", log_level=log_level, module=module)
        self._beside = [self.tokenizer, *filter(None, [self.media])]

    def start(self, receive: Receive, delay_s: float = 0.0) -> None:
        """Begin to load, after the delay; returns at once. Only after `Died` may it be called again.

        `receive` gets the engine's reports: LoadProgress*, Ready, others*, Died.
        """
        for worker in self._beside:
            worker.start()
        self._engine.start(receive, delay_s)

    def send(self, command: messages.Command) -> None:
        """Pass a command on, without waiting. An engine that has ended drops it, and `Died` follows.

        Raises InvalidRequest where no message can carry it, EngineNotReady where too much waits already.
        """
        # Only a request can be refused: a cancel must reach the engine.
        self._engine.send(encode(command), refusable=isinstance(command, messages.Submit))

    def stop(self) -> None:
        """End it and wait until nothing native is left. Idempotent."""
        self._engine.end()  # all exit at the same time
        for worker in self._beside:
            worker.end()
        for worker in self._beside:
            worker.close()
        self._engine.close()


def encode(message: messages.Command | messages.TokenizerCall) -> bytes:
    """The frame of a message. Raises InvalidRequest where none can carry it, or the engine not read it."""
    try:
        frame = msgspec.msgpack.encode(message)
        if isinstance(message, messages.Submit):
            _SUBMISSIONS.decode(frame)  # else the engine would end, and be sent it again
        return frame
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the engine does not take this request: {error}") from None
    except OverflowError:  # free-form parts (tools, template options) may hold anything
        raise InvalidRequest("a number is out of range: whole numbers must fit into 64 bits") from None
    except UnicodeEncodeError:
        raise InvalidRequest("a text holds a lone surrogate: it must be valid Unicode") from None


def settle(future: Future[Any], answer: object) -> None:
    """Give a future its answer; a refusal or an error is raised there. The caller may have gone."""
    if not future.running() and not future.set_running_or_notify_cancel():
        return
    if isinstance(answer, Failure):
        answer = answer.error()
    if isinstance(answer, CllmError):
        future.set_exception(answer)
    else:
        future.set_result(answer)


class PendingTask(Attempt):
    """A task on its way to a worker and back. Its time limit begins when the worker gets it."""

    retries_together = 0  # clients wait a few seconds for their text, and each start of a process takes one

    def __init__(self, call_id: int, task: messages.TokenizerTask, frame: bytes, tenant: str = "") -> None:
        self.call_id = call_id
        self.frame = frame
        self.tenant = tenant
        self.future: Future[messages.TokenizerAnswer] = Future()
        self.made_at = time.monotonic()
        self.sent_at = 0.0
        self.abandoned = False  # its caller has gone
        inputs = task.inputs if isinstance(task, messages.Prepare) else ()
        chats = [each for each in inputs if isinstance(each, Chat)]
        self._renders = bool(chats) or isinstance(task, messages.RenderChat)
        self._grammar_field = "tools" if any(chat.tools for chat in chats) else ""
        if isinstance(task, messages.Prepare) and task.constraint is not None:
            self._grammar_field = task.constraint.field
        long = len(frame) > LARGE_BYTES
        self.limit_s = GRAMMAR_LIMIT_S if self._grammar_field else TEXT_LIMIT_S
        self.size = 1  # of the worker's capacity
        self._what = "text"
        if isinstance(task, messages.EncodeMedia):
            self._what, self.limit_s = "picture", MEDIA_LIMIT_S
            self.size, long = len(task.pictures), False
        # One grammar is compiled at a time: a second one would wait for it on the other thread.
        self.large = bool(self._grammar_field) or long

    @property
    def overdue_s(self) -> float:
        """How long it has been in the worker beyond its limit."""
        return time.monotonic() - self.sent_at - self.limit_s

    def timeout_error(self) -> CllmError:
        """The answer when it hangs in the worker."""
        advice = "shorten it" if self._what == "text" else "send a smaller one"
        message = f"the {self._what} could not be processed within {self.limit_s:.0f} s: {advice}"
        return InvalidRequest(message)

    def rejection_error(self, exit_signal: int) -> CllmError:
        """The answer when the process has crashed because of it."""
        if exit_signal == signal.SIGPROF and self._renders:
            message = f"the model's chat template was stopped: it computes for more than {GUARD_LIMIT_S:g} s"
            return InvalidRequest(message, field="messages")
        if self._grammar_field:
            message = f"{self._grammar_field}: it is too complex to be compiled"
            return InvalidRequest(message, field=self._grammar_field)
        worker = "tokenizer" if self._what == "text" else "media"
        return EngineDied(f"this {self._what} could not be processed: the {worker} process crashed on it")


def busy_error(what: str) -> TokenizerBusy:
    return TokenizerBusy(f"too much text or pictures wait to be processed: {what}; try again in a moment")


class ProcessTokenizer:
    """Tokenizer in a worker process, restarted after a crash. A task that crashes it alone is refused.

    The worker gets as many tasks as it has threads. The others wait here, where they can still be dropped and
    cost no time of their limit: a line for each tenant, and the tenants take turns. With the role of `media`,
    the tasks have pictures, and these count.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        role: str = "tokenizer",
        log_level: str = "info",
        module: str = WORKER_MODULE,
    ) -> None:
        self._role = role
        self._capacity = MEDIA_AT_ONCE if role == "media" else THREADS
        reports = messages.TokenizerReady | messages.TokenizerReply
        self._supervisor = Supervisor(
            role, config, reports, beat=self._keep_limits, log_level=log_level, module=module
        )
        self._backoff = Backoff()
        self._lock = threading.RLock()
        self._call_ids = itertools.count()
        self._lines: dict[str, deque[PendingTask]] = {}  # that wait, in the order of their tenants' turns
        self._again: deque[PendingTask] = deque()  # were in a worker that ended; they go first
        self._bytes = 0  # of all lines
        self._running: dict[int, PendingTask] = {}  # in the worker
        self.bound = TokenBound()  # of the vocabulary, once a worker has loaded it
        self._up = False  # a process runs, or will after the back-off
        self._ready = False  # it takes tasks
        self._closed = ""  # why it takes no more tasks
        self._aborted = False  # the process is being killed because of a task that hangs: none is to blame

    def start(self, delay_s: float = 0.0) -> None:
        """Start the process, before the first task or after a crash. Idempotent."""
        with self._lock:
            if not (self._up or self._closed):
                self._supervisor.start(self._receive, delay_s)
                self._up = True

    def submit(self, task: messages.TokenizerTask, tenant: str = "") -> Future[messages.TokenizerAnswer]:
        """Queue a task; tasks are fair between tenants. The future fails with a CllmError when it is refused.

        Raises a CllmError for a task that is refused at once: TokenizerBusy when too much waits, unless this
        tenant has less than its share of it.
        """
        call_id = next(self._call_ids)
        messages.check_task(task, self)
        call = PendingTask(call_id, task, encode(messages.TokenizerCall(call_id, task)), tenant)
        with self._lock:
            if self._closed:
                raise ShuttingDown(self._closed)
            self.start()
            if self._bytes + len(call.frame) > MAX_WAITING_BYTES:
                held = sum(len(each.frame) for each in (call, *self._lines.get(tenant, ())))
                if held > MAX_WAITING_BYTES / len({*self._lines, tenant}):
                    raise busy_error(f"the limit is {MAX_WAITING_BYTES >> 20} MiB")
            self._lines.setdefault(tenant, deque()).append(call)
            self._bytes += len(call.frame)
            self._dispatch()
        return call.future

    def _dispatch(self) -> None:
        """Send what the worker has room for."""
        running = self._running
        while self._ready and not any(call.alone for call in running.values()):
            room = sum(call.large for call in running.values()) < THREADS - 1
            fitting = (call for line in self._lines.values() for call in line if room or not call.large)
            call = self._again[0] if self._again else next(fitting, None)
            used = sum(each.size for each in running.values())
            if call is None or (running and (call.alone or used + call.size > self._capacity)):
                return
            self._remove(call)
            if call.future.running() or call.future.set_running_or_notify_cancel():
                call.sent_at = time.monotonic()
                running[call.call_id] = call
                self._supervisor.send(call.frame)

    def _remove(self, call: PendingTask) -> None:
        """Take a task out of those that wait; its tenant's next turn is after all others'."""
        if call in self._again:
            self._again.remove(call)
            return
        line = self._lines.pop(call.tenant)
        line.remove(call)
        self._bytes -= len(call.frame)
        if line:
            self._lines[call.tenant] = line

    def _waiting(self) -> list[PendingTask]:
        return [*self._again, *(call for line in self._lines.values() for call in line)]

    def abort(self, future: Future[messages.TokenizerAnswer]) -> None:
        """Drop a task that still waits, or ignore its answer: the caller has gone."""
        with self._lock:
            for call in [call for call in self._waiting() if call.future is future]:
                self._remove(call)
            for call in self._running.values():
                call.abandoned = call.abandoned or call.future is future
        future.cancel()

    def _keep_limits(self) -> None:
        """Refuse what waits too long. What takes too long in the worker hangs: refuse it, end the worker.

        Called at each heartbeat of the worker.
        """
        with self._lock:
            # Each picture before it takes as long as its own: clients wait longer for one than for text.
            limit_s = WAIT_LIMIT_S if self._role == "tokenizer" else MEDIA_LIMIT_S
            oldest = time.monotonic() - limit_s
            for call in [call for call in self._waiting() if not call.sent_at and call.made_at < oldest]:
                self._remove(call)
                settle(call.future, busy_error(f"this one waited for {limit_s:.0f} s"))
            slowest = max(self._running.values(), key=lambda call: call.overdue_s, default=None)
            if slowest is not None and slowest.overdue_s > 0 and not self._aborted:
                del self._running[slowest.call_id]
                settle(slowest.future, slowest.timeout_error())
                self._aborted = True
                self._supervisor.kill()  # the other tasks are sent again: they may only have been held up

    def _receive(self, report: messages.TokenizerReady | messages.TokenizerReply | messages.Died) -> None:
        with self._lock:
            if isinstance(report, messages.Died):
                self._up = self._ready = False
                if not self._closed:
                    self._on_crash(report)
                return
            if isinstance(report, messages.TokenizerReady):
                self.bound = report.bound
                self._ready = True
                self._dispatch()
                return
            self._backoff.progress()
            call = self._running.pop(report.call_id, None)
        if call is not None:
            settle(call.future, report.answer)
        with self._lock:
            self._dispatch()

    def _on_crash(self, died: messages.Died) -> None:
        """Reject the tasks that are to blame, and send all others again."""
        log.warning("the %s process ended: %s", self._role, died.message)
        present, self._running = [*self._running.values()], {}
        innocent = self._aborted or died.code == START_FAILED
        rejected = [] if innocent else [call for call in present if call.blame()]
        for call in rejected:
            settle(call.future, call.rejection_error(died.signal))
        for call in present:
            if call not in rejected and not call.abandoned:
                self._again.append(call)
        if rejected or self._aborted:
            self._backoff.progress()
        self._aborted = False
        # Without a pending task the next one starts it: a process that cannot start must not spin.
        if self._again or self._lines:
            delay_s = self._backoff.next_delay()
            if self._backoff.exhausted:
                self._fail_all(from_code(died.code, died.message))
                return
            self.start(delay_s)
            self._dispatch()

    def _fail_all(self, error: CllmError) -> None:
        calls = [*self._running.values(), *self._waiting()]
        self._running.clear()
        self._again.clear()
        self._lines.clear()
        self._bytes = 0
        for call in calls:
            settle(call.future, error)

    def end(self, why: str = "the server is shutting down") -> None:
        """Fail the tasks that are left, and accept no more; returns at once."""
        with self._lock:
            self._closed = self._closed or why
            self._fail_all(ShuttingDown(self._closed))
        self._supervisor.end()

    def close(self) -> None:
        self.end()
        self._supervisor.close()
