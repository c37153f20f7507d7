"""Executor: where an engine and its tokenizer run. Here, in two supervised processes; for the HTTP process.

Nothing native is imported: hostile input can crash the workers, not the process that holds the queue.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from cllm.config import EngineConfig
from cllm.errors import CllmError, EngineDied, InvalidRequest, ShuttingDown, from_code
from cllm.types import TokenBound
from cllm.workers.messages import (
    Command,
    Died,
    Refused,
    Report,
    TokenizerAnswer,
    TokenizerCall,
    TokenizerReady,
    TokenizerReply,
    TokenizerTask,
    check_task,
)
from cllm.workers.supervisor import WORKER_MODULE, Backoff, Supervisor
from cllm.workers.tokenizer_queue import WAIT_LIMIT_S, Call, TokenizerQueue, busy_error

log = logging.getLogger(__name__)
Receive = Callable[[Report], None]


class TokenizerClient(Protocol):
    """Answers tokenizer tasks. The future fails with a CllmError when the task is refused."""

    def submit(self, task: TokenizerTask, tenant: str = "") -> Future[TokenizerAnswer]:
        """Raises a CllmError for a task that is refused at once. Tasks are fair between tenants."""

    def abort(self, future: Future[TokenizerAnswer]) -> None:
        """The caller has gone: a task that still waits is dropped, the answer of another ignored."""

    def close(self) -> None: ...


class Executor(Protocol):
    """Runs one engine at a time. Its reports to `receive`: Loading*, Ready, others*, Died."""

    restartable: bool

    @property
    def tokenizer(self) -> TokenizerClient:
        """The tokenizer of this model; of an engine in a thread only once it is Ready."""

    def start(self, receive: Receive) -> None:
        """Begin to load; returns at once. Only after `Died` may it be called again."""

    def send(self, command: Command) -> None:
        """Pass a command on. An engine that has ended drops it, and `Died` follows."""

    def stop(self) -> None:
        """End it and wait until nothing native is left. Idempotent."""


class ProcessExecutor:
    """The engine and the tokenizer, each in a worker process of its own."""

    restartable = True

    def __init__(self, config: EngineConfig, *, log_level: str = "info", module: str = WORKER_MODULE) -> None:
        self._engine = Supervisor(
            "engine", config, Report, heartbeats=True, log_level=log_level, module=module
        )
        self.tokenizer = ProcessTokenizer(config, log_level=log_level, module=module)
        self._encoder = msgspec.msgpack.Encoder()

    def start(self, receive: Receive) -> None:
        self.tokenizer.start()
        self._engine.start(receive)

    def send(self, command: Command) -> None:
        self._engine.send(self._encoder.encode(command))

    def stop(self) -> None:
        self._engine.close()
        self.tokenizer.close()


def settle(future: Future[Any], answer: object) -> None:
    """Give a future its answer; a refusal or an error is raised there. The caller may have gone."""
    if not future.running() and not future.set_running_or_notify_cancel():
        return
    if isinstance(answer, Refused):
        error = from_code(answer.code, answer.message)
        if isinstance(error, InvalidRequest):
            error.field = answer.field
        answer = error
    if isinstance(answer, CllmError):
        future.set_exception(answer)
    else:
        future.set_result(answer)


class ProcessTokenizer:
    """Tokenizer in a worker process, restarted after a crash. A task that crashes it alone is refused.

    The worker gets as many tasks as it has threads. The others wait here, where they can still be dropped and
    cost no time of their limit.
    """

    WATCH_S = 0.5  # between two looks at the time limits

    def __init__(self, config: EngineConfig, *, log_level: str = "info", module: str = WORKER_MODULE) -> None:
        reports = TokenizerReady | TokenizerReply | Died
        self._supervisor = Supervisor(
            "tokenizer", config, reports, heartbeats=False, log_level=log_level, module=module
        )
        self._backoff = Backoff()
        self._lock = threading.RLock()
        self._call_ids = itertools.count()
        self._queue = TokenizerQueue()
        self._running: dict[int, Call] = {}  # in the worker
        self.bound = TokenBound()  # of the vocabulary, once a worker has loaded it
        self._up = False  # a process runs
        self._ready = False  # it takes tasks
        self._restarting = False
        self._closed = False
        self._aborted = False  # the process is being killed because of a task that hangs: none is to blame
        self._watch_ends = threading.Event()
        self._watch: threading.Thread | None = None

    def start(self) -> None:
        """Start the process, before the first task or after a crash. Idempotent."""
        with self._lock:
            if not (self._up or self._restarting or self._closed):
                self._up = True
                self._supervisor.start(self._receive)

    def submit(self, task: TokenizerTask, tenant: str = "") -> Future[TokenizerAnswer]:
        call_id = next(self._call_ids)
        try:
            check_task(task, self)
            frame = msgspec.msgpack.encode(TokenizerCall(call_id, task))
        except OverflowError:  # free-form parts (tools, template options) may hold what no message can carry
            raise InvalidRequest("a number is out of range: whole numbers must fit into 64 bits") from None
        except UnicodeEncodeError:
            raise InvalidRequest("a text holds a lone surrogate: it must be valid Unicode") from None
        call = Call(call_id, task, frame, tenant)
        with self._lock:
            if self._closed:
                raise ShuttingDown("the server is shutting down")
            self._queue.put(call)
            if self._watch is None:
                self._watch = threading.Thread(target=self._keep_limits, name="tokenizer-limits", daemon=True)
                self._watch.start()
            if not self._up:
                self.start()
            self._dispatch()
        return call.future

    def _dispatch(self) -> None:
        """Send what the worker has room for."""
        while self._ready and (call := self._queue.take(self._running.values())) is not None:
            if call.future.running() or call.future.set_running_or_notify_cancel():
                call.sent_at = time.monotonic()
                self._running[call.call_id] = call
                self._supervisor.send(call.frame)

    def abort(self, future: Future[TokenizerAnswer]) -> None:
        with self._lock:
            for call in [call for call in self._queue if call.future is future]:
                self._queue.remove(call)
            for call in self._running.values():
                call.abandoned = call.abandoned or call.future is future
        future.cancel()

    def _keep_limits(self) -> None:
        """Refuse what waits too long. What takes too long in the worker hangs: refuse it, end the worker."""
        while not self._watch_ends.wait(self.WATCH_S):
            with self._lock:
                for call in self._queue.expired():
                    self._queue.remove(call)
                    settle(call.future, busy_error(f"this one waited for {WAIT_LIMIT_S:.0f} s"))
                slowest = max(self._running.values(), key=lambda call: call.overdue_s, default=None)
                if slowest is not None and slowest.overdue_s > 0 and not self._aborted:
                    del self._running[slowest.call_id]
                    settle(slowest.future, slowest.timeout_error())
                    self._aborted = True
                    self._supervisor.kill()  # the other tasks are sent again: they may only have been held up

    def _receive(self, report: TokenizerReady | TokenizerReply | Died) -> None:
        with self._lock:
            if isinstance(report, Died):
                self._up = self._ready = False
                if not self._closed:
                    self._on_crash(report)
                return
            if isinstance(report, TokenizerReady):
                self.bound = report.bound
                self._ready = True
                self._dispatch()
                return
            if self._backoff.count:
                self._backoff.progress()
            call = self._running.pop(report.call_id, None)
        if call is not None:
            settle(call.future, report.answer)
        with self._lock:
            self._dispatch()

    def _on_crash(self, died: Died) -> None:
        """Reject the tasks that are to blame, and send all others again."""
        log.warning("the tokenizer process ended: %s", died.message)
        present, self._running = [*self._running.values()], {}
        rejected = [] if self._aborted else [call for call in present if call.blame()]
        for call in rejected:
            settle(call.future, call.rejection_error(died.signal))
        for call in present:
            if call not in rejected and not call.abandoned:
                self._queue.put_back(call)
        if rejected or self._aborted:
            self._backoff.progress()
        self._aborted = False
        # Without a pending task the next one starts it: a process that cannot start must not spin.
        self._restarting = any(True for _ in self._queue) and self._backoff.schedule(self._restart)
        if not self._restarting:
            self._fail_all(EngineDied(died.message))

    def _restart(self) -> None:
        with self._lock:
            self._restarting = False
            self.start()
            self._dispatch()

    def _fail_all(self, error: CllmError) -> None:
        calls = [*self._running.values(), *self._queue]
        self._queue, self._running = TokenizerQueue(), {}
        for call in calls:
            settle(call.future, error)

    def close(self) -> None:
        self._watch_ends.set()
        with self._lock:
            self._closed = True
            self._fail_all(ShuttingDown("the server is shutting down"))
        self._supervisor.close()
