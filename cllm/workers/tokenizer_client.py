"""Where native text work runs: beside the engine, so that hostile input can kill neither it nor us."""

from __future__ import annotations

import itertools
import logging
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import msgspec

from cllm.config import EngineConfig
from cllm.errors import CllmError, EngineDied, InvalidRequest, ShuttingDown, from_code
from cllm.text.chat_template import GUARD_LIMIT_S
from cllm.types import FIELDS, Vocabulary
from cllm.workers.channel import ChildProcess
from cllm.workers.messages import Died
from cllm.workers.tokenizer import (
    CheckConstraint,
    Detokenize,
    Numbered,
    NumberedAnswer,
    Refused,
    TokenizerAnswer,
    TokenizerTask,
    TokenizerWorker,
    TokenizeText,
)

log = logging.getLogger(__name__)


class TokenizerClient(Protocol):
    """Answers text tasks. The future fails with a CllmError when the task is refused."""

    def submit(self, task: TokenizerTask) -> Future[TokenizerAnswer]: ...

    def abort(self, future: Future[TokenizerAnswer]) -> None:
        """Give up on a task, even one that hangs."""

    def close(self) -> None: ...


def _settle(future: Future[TokenizerAnswer], answer: TokenizerAnswer) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(answer, Refused):
        error = from_code(answer.code, answer.message)
        if isinstance(error, InvalidRequest):
            error.field = answer.field
        future.set_exception(error)
    else:
        future.set_result(answer)


class LocalTokenizer:
    """Text work in the caller's thread: for the Python API."""

    def __init__(
        self, vocabulary: Vocabulary, template: str | None, *, tool_template: str | None = None
    ) -> None:
        self._worker = TokenizerWorker(vocabulary, template, tool_template=tool_template)
        self._lock = threading.Lock()  # the vocabulary must not be freed while somebody reads it
        self._closed = False

    def submit(self, task: TokenizerTask) -> Future[TokenizerAnswer]:
        future: Future[TokenizerAnswer] = Future()
        with self._lock:
            if self._closed:
                raise ShuttingDown("the model is closed")
            answer = self._worker.perform(task)
        _settle(future, answer)
        return future

    def abort(self, future: Future[TokenizerAnswer]) -> None:
        pass

    def close(self) -> None:
        with self._lock:
            self._closed = True


class _Pending:
    def __init__(self, task: TokenizerTask) -> None:
        self.task = task
        self.future: Future[TokenizerAnswer] = Future()
        self.sent = False
        self.deaths = 0  # of the process while it had the task

    @property
    def rejection_error(self) -> CllmError:
        """What is said when the process has died of it twice, the second time of it alone."""
        if isinstance(self.task, CheckConstraint):
            field = FIELDS[self.task.spec.kind]
            return InvalidRequest(f"{field}: it is too complex to be compiled", field=field)
        return EngineDied("this text could not be processed: the text process died of it")

    @property
    def renders(self) -> bool:
        """True when the model's chat template takes part."""
        return not isinstance(self.task, TokenizeText | Detokenize | CheckConstraint)


def _encoded(numbered: Numbered) -> bytes:
    """A task as bytes. Free-form parts (tools, template options) may hold what no message can carry."""
    try:
        return msgspec.msgpack.encode(numbered)
    except OverflowError:
        raise InvalidRequest("a number is out of range: whole numbers must fit into 64 bits") from None
    except UnicodeEncodeError:
        raise InvalidRequest("a text holds a lone surrogate: it must be valid Unicode") from None


class ProcessTokenizer:
    """Text work in a process of its own, replaced whenever it dies. A task that kills it twice is refused."""

    def __init__(
        self, config: EngineConfig, *, log_level: str = "info", module: str = "cllm.workers.engine_worker"
    ) -> None:
        self._config = config
        self._arguments = (module, "text", log_level)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._closed = False
        self._given_up = False  # the process is being killed for somebody who has gone: nobody else's fault
        self._child: ChildProcess | None = self._start()

    def _start(self) -> ChildProcess:
        child = ChildProcess(*self._arguments)
        child.send(msgspec.msgpack.encode(self._config))
        threading.Thread(target=self._read, args=(child,), name="cllm-text-answers", daemon=True).start()
        return child

    def submit(self, task: TokenizerTask) -> Future[TokenizerAnswer]:
        with self._lock:
            if self._closed:
                raise ShuttingDown("the server is shutting down")
            pending = _Pending(task)
            _encoded(Numbered(0, task))  # raises for what cannot be sent
            self._pending[next(self._numbers)] = pending
            if self._child is None:
                self._child = self._start()
            self._send_waiting()
            return pending.future

    def _send_waiting(self) -> None:
        """Send what is not sent yet; of those a process has died with, one at a time, to know of whom."""
        assert self._child is not None
        trial = any(pending.sent and pending.deaths for pending in self._pending.values())
        for number, pending in self._pending.items():
            if pending.sent or (pending.deaths and trial):
                continue
            trial = trial or pending.deaths > 0
            pending.sent = True
            self._child.send(msgspec.msgpack.encode(Numbered(number, pending.task)))

    def abort(self, future: Future[TokenizerAnswer]) -> None:
        with self._lock:
            for number, pending in list(self._pending.items()):
                if pending.future is future:
                    del self._pending[number]
                    if self._child is not None and pending.sent:
                        self._given_up = True
                        self._child.kill()  # it may hang in native code; the others are replayed

    def _read(self, child: ChildProcess) -> None:
        decoder = msgspec.msgpack.Decoder(NumberedAnswer | Died)
        for frame in child.frames():
            answer = decoder.decode(frame)
            if isinstance(answer, Died):
                log.error("the text process cannot start: %s", answer.message)
                continue
            with self._lock:
                pending = self._pending.pop(answer.number, None)
                if pending is not None and pending.deaths and child is self._child:
                    self._send_waiting()
            if pending is not None:
                _settle(pending.future, answer.answer)
        self._on_death(child)

    def _on_death(self, child: ChildProcess) -> None:
        failed: list[tuple[_Pending, CllmError]]
        with self._lock:
            if self._closed:
                failed = [(pending, pending.rejection_error) for pending in self._take(lambda _: True)]
            else:
                log.warning("the text process ended (%s): starting another", child.exit_reason())
                failed = self._blame(child)
                # With nobody waiting, the next task starts it: one that cannot start must not spin.
                self._child = self._start() if self._pending else None
                if self._child is not None:
                    self._send_waiting()
        for pending, error in failed:
            if pending.future.set_running_or_notify_cancel():
                pending.future.set_exception(error)

    def _blame(self, child: ChildProcess) -> list[tuple[_Pending, CllmError]]:
        """Who has to answer for the death; all others are to be sent again."""
        rejected: list[tuple[_Pending, CllmError]] = []
        if child.ended_by is signal.SIGPROF:
            # The template's own guard. It is the same for every conversation: none is tried again.
            message = f"the model's chat template was stopped: it computes for more than {GUARD_LIMIT_S:g} s"
            rejected = [
                (pending, InvalidRequest(message, field="messages"))
                for pending in self._take(lambda pending: pending.sent and pending.renders)
            ]
        elif not self._given_up:
            for pending in self._pending.values():
                pending.deaths += pending.sent
            rejected = [
                (pending, pending.rejection_error)
                for pending in self._take(lambda pending: pending.deaths > 1)
            ]
        self._given_up = False
        for pending in self._pending.values():
            pending.sent = False
        return rejected

    def _take(self, which: Callable[[_Pending], bool]) -> list[_Pending]:
        """Those of the pending tasks, taken out."""
        numbers = [number for number, pending in self._pending.items() if which(pending)]
        return [self._pending.pop(number) for number in numbers]

    def close(self) -> None:
        with self._lock:
            self._closed = True
        if self._child is not None:
            self._child.close()
