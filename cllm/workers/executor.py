"""Executor: where an engine and its tokenizer run. Here, in two supervised processes; for the HTTP process.

Nothing native is imported: hostile input can crash the workers, not the process that holds the queue.
"""

from __future__ import annotations

import itertools
import logging
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from operator import is_
from typing import Any, Protocol

import msgspec

from cllm.config import EngineConfig
from cllm.errors import CllmError, EngineDied, InvalidRequest, ShuttingDown, from_code
from cllm.text.chat_template import GUARD_LIMIT_S
from cllm.workers.messages import (
    CheckConstraint,
    Command,
    Detokenize,
    Died,
    Refused,
    Report,
    Submit,
    TokenizerAnswer,
    TokenizerCall,
    TokenizerReply,
    TokenizerTask,
    TokenizeText,
)
from cllm.workers.supervisor import START_FAILED, WORKER_MODULE, Attempt, Backoff, Supervisor

log = logging.getLogger(__name__)
Receive = Callable[[Report], None]


class TokenizerClient(Protocol):
    """Answers tokenizer tasks. The future fails with a CllmError when the task is refused."""

    def submit(self, task: TokenizerTask) -> Future[TokenizerAnswer]: ...

    def abort(self, future: Future[TokenizerAnswer]) -> None:
        """Give up on a task, even one that hangs."""

    def close(self) -> None: ...


class Executor(Protocol):
    """Runs one engine at a time. Its reports to `receive`: Loading*, Ready, others*, Died."""

    restartable: bool

    @property
    def tokenizer(self) -> TokenizerClient:
        """The tokenizer of this model; of an engine in a thread only once it is Ready."""

    def start(self, receive: Receive, delay_s: float = 0.0) -> None:
        """Begin to load, after the delay; returns at once. Only after `Died` may it be called again."""

    def send(self, command: Command) -> None:
        """Pass a command on, without waiting. An engine that has ended drops it, and `Died` follows.

        Raises InvalidRequest where no message can carry it, EngineNotReady where too much waits already.
        """

    def stop(self) -> None:
        """End it and wait until nothing native is left. Idempotent."""


class ProcessExecutor:
    """The engine and the tokenizer, each in a worker process of its own."""

    restartable = True

    def __init__(self, config: EngineConfig, *, log_level: str = "info", module: str = WORKER_MODULE) -> None:
        self._engine = Supervisor("engine", config, Report, log_level=log_level, module=module)
        self.tokenizer = ProcessTokenizer(config, log_level=log_level, module=module)

    def start(self, receive: Receive, delay_s: float = 0.0) -> None:
        self.tokenizer.start()
        self._engine.start(receive, delay_s)

    def send(self, command: Command) -> None:
        # Only a request can be refused: a cancel must reach the engine.
        self._engine.send(encode(command), refusable=isinstance(command, Submit))

    def stop(self) -> None:
        self._engine.end()  # both exit at the same time
        self.tokenizer.close()
        self._engine.close()


def encode(message: Command | TokenizerCall) -> bytes:
    """The frame of a message. Raises InvalidRequest where no frame can carry it."""
    try:
        return msgspec.msgpack.encode(message)
    except OverflowError:  # free-form parts (tools, template options) may hold anything
        raise InvalidRequest("a number is out of range: whole numbers must fit into 64 bits") from None
    except UnicodeEncodeError:
        raise InvalidRequest("a text holds a lone surrogate: it must be valid Unicode") from None


def settle(future: Future[Any], answer: object) -> None:
    """Give a future its answer; a refusal or an error is raised there. The caller may have gone."""
    if not future.set_running_or_notify_cancel():
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


class _Call(Attempt):
    retries_together = 0  # clients wait a few seconds for their text, and each start of a process takes one

    def __init__(self, task: TokenizerTask, frame: bytes) -> None:
        self.task = task
        self.frame = frame
        self.future: Future[TokenizerAnswer] = Future()
        self.sent = False

    def rejection_error(self, exit_signal: int) -> CllmError:
        """The answer when the process has crashed because of it."""
        if exit_signal == signal.SIGPROF:
            message = f"the model's chat template was stopped: it computes for more than {GUARD_LIMIT_S:g} s"
            return InvalidRequest(message, field="messages")
        if isinstance(self.task, CheckConstraint):
            field = self.task.spec.kind.field
            return InvalidRequest(f"{field}: it is too complex to be compiled", field=field)
        return EngineDied("this text could not be processed: the tokenizer process crashed on it")

    @property
    def renders(self) -> bool:
        """True when the model's chat template takes part."""
        return not isinstance(self.task, TokenizeText | Detokenize | CheckConstraint)


class ProcessTokenizer:
    """Tokenizer in a worker process, restarted after a crash. A task that crashes it alone is refused."""

    def __init__(self, config: EngineConfig, *, log_level: str = "info", module: str = WORKER_MODULE) -> None:
        self._supervisor = Supervisor("tokenizer", config, TokenizerReply, log_level=log_level, module=module)
        self._backoff = Backoff()
        self._lock = threading.RLock()
        self._call_ids = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._up = False  # a process runs, or will after the back-off
        self._closed = False
        self._aborted = False  # the process is being killed because of an aborted task: no other is to blame

    def start(self, delay_s: float = 0.0) -> None:
        """Start the process, before the first task or after a crash. Idempotent."""
        with self._lock:
            if not (self._up or self._closed):
                self._supervisor.start(self._receive, delay_s)
                self._up = True

    def submit(self, task: TokenizerTask) -> Future[TokenizerAnswer]:
        call_id = next(self._call_ids)
        call = _Call(task, encode(TokenizerCall(call_id, task)))
        with self._lock:
            if self._closed:
                raise ShuttingDown("the server is shutting down")
            self.start()
            self._calls[call_id] = call
            self._dispatch()
        return call.future

    def _dispatch(self) -> None:
        """Send what may be sent, oldest first."""
        running: _Call | None = None
        for call in tuple(self._calls.values()) if self._up else ():
            if not call.sent:
                if running is not None and (call.alone or running.alone):
                    return
                try:
                    self._supervisor.send(call.frame, refusable=True)
                except CllmError as error:
                    self._take(partial(is_, call))
                    settle(call.future, error)
                    continue
                call.sent = True
            running = call

    def abort(self, future: Future[TokenizerAnswer]) -> None:
        with self._lock:
            for call in self._take(lambda call: call.future is future):
                if call.sent and self._up:
                    self._aborted = True
                    self._supervisor.kill()  # it may hang in native code; the other tasks are sent again

    def _receive(self, report: TokenizerReply | Died) -> None:
        with self._lock:
            if isinstance(report, Died):
                self._up = False
                if not self._closed:
                    self._on_crash(report)
                return
            if self._backoff.count:
                self._backoff.progress()
            call = self._calls.pop(report.call_id, None)
            if call is None:
                return
            if call.crashes:
                self._dispatch()  # others waited for it to run alone
        settle(call.future, report.answer)

    def _on_crash(self, died: Died) -> None:
        """Reject the tasks that are to blame, and send all others again."""
        log.warning("the tokenizer process ended: %s", died.message)
        rejected: list[_Call] = []
        if died.signal == signal.SIGPROF:
            # The template's own guard. Every conversation goes through the template: none is tried again.
            rejected = self._take(lambda call: call.sent and call.renders)
        elif not self._aborted and died.code != START_FAILED:
            rejected = self._take(lambda call: call.sent and call.blame())
        for call in rejected:
            settle(call.future, call.rejection_error(died.signal))
        if rejected or self._aborted:
            self._backoff.progress()
        self._aborted = False
        for call in self._calls.values():
            call.sent = False
        # Without a pending task the next one starts it: a process that cannot start must not spin.
        if self._calls:
            delay_s = self._backoff.next_delay()
            if self._backoff.exhausted:
                self._fail_all(from_code(died.code, died.message))
                return
            self.start(delay_s)
            self._dispatch()

    def _take(self, which: Callable[[_Call], bool]) -> list[_Call]:
        """Remove those calls, and return them."""
        call_ids = [call_id for call_id, call in self._calls.items() if which(call)]
        return [self._calls.pop(call_id) for call_id in call_ids]

    def _fail_all(self, error: CllmError) -> None:
        for call in self._take(lambda _: True):
            settle(call.future, error)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._fail_all(ShuttingDown("the server is shutting down"))
        self._supervisor.close()
