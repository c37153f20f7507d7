"""Where native text work runs: beside the engine, so that hostile input can kill neither it nor us."""

from __future__ import annotations

import itertools
import logging
import threading
from concurrent.futures import Future
from typing import Protocol

import msgspec

from cllm.config import EngineConfig
from cllm.engine.child import ChildProcess
from cllm.engine.messages import Died
from cllm.errors import CllmError, EngineDied, InvalidRequest, ShuttingDown, from_code
from cllm.text.work import Numbered, NumberedAnswer, Refused, TextAnswer, TextTask, TextWorker
from cllm.types import Vocabulary

log = logging.getLogger(__name__)


class TextHost(Protocol):
    """Answers text tasks. The future fails with a CllmError when the task is refused."""

    def submit(self, task: TextTask) -> Future[TextAnswer]: ...

    def abort(self, future: Future[TextAnswer]) -> None:
        """Give up on a task, even one that hangs."""

    def close(self) -> None: ...


def _settle(future: Future[TextAnswer], answer: TextAnswer) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(answer, Refused):
        error = from_code(answer.code, answer.message)
        if isinstance(error, InvalidRequest):
            error.field = answer.field
        future.set_exception(error)
    else:
        future.set_result(answer)


class LocalText:
    """Text work in the caller's thread: for the Python API."""

    def __init__(self, vocabulary: Vocabulary, template: str | None) -> None:
        self._worker = TextWorker(vocabulary, template)
        self._lock = threading.Lock()  # the vocabulary must not be freed while somebody reads it
        self._closed = False

    def submit(self, task: TextTask) -> Future[TextAnswer]:
        future: Future[TextAnswer] = Future()
        with self._lock:
            if self._closed:
                raise ShuttingDown("the model is closed")
            answer = self._worker.perform(task)
        _settle(future, answer)
        return future

    def abort(self, future: Future[TextAnswer]) -> None:
        pass

    def close(self) -> None:
        with self._lock:
            self._closed = True


class _Pending:
    def __init__(self, task: TextTask) -> None:
        self.task = task
        self.future: Future[TextAnswer] = Future()
        self.deaths = 0


def _encoded(numbered: Numbered) -> bytes:
    """A task as bytes. Free-form parts (tools, template options) may hold what no message can carry."""
    try:
        return msgspec.msgpack.encode(numbered)
    except OverflowError:
        raise InvalidRequest("a number is out of range: whole numbers must fit into 64 bits") from None
    except UnicodeEncodeError:
        raise InvalidRequest("a text holds a lone surrogate: it must be valid Unicode") from None


class ChildText:
    """Text work in a process of its own, replaced whenever it dies. A task that kills it twice is refused."""

    def __init__(self, config: EngineConfig, *, log_level: str = "info", module: str = "cllm.child") -> None:
        self._config = config
        self._arguments = (module, "text", log_level)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._closed = False
        self._child: ChildProcess | None = self._start()

    def _start(self) -> ChildProcess:
        child = ChildProcess(*self._arguments)
        child.send(msgspec.msgpack.encode(self._config))
        threading.Thread(target=self._read, args=(child,), name="cllm-text-answers", daemon=True).start()
        return child

    def submit(self, task: TextTask) -> Future[TextAnswer]:
        with self._lock:
            if self._closed:
                raise ShuttingDown("the server is shutting down")
            pending = _Pending(task)
            number = next(self._numbers)
            frame = _encoded(Numbered(number, task))
            self._pending[number] = pending
            if self._child is None:
                self._child = self._start()
            self._child.send(frame)
            return pending.future

    def abort(self, future: Future[TextAnswer]) -> None:
        with self._lock:
            for number, pending in list(self._pending.items()):
                if pending.future is future:
                    del self._pending[number]
                    if self._child is not None:
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
            if pending is not None:
                _settle(pending.future, answer.answer)
        self._on_death(child)

    def _on_death(self, child: ChildProcess) -> None:
        failed: list[_Pending] = []
        with self._lock:
            if self._closed:
                failed, self._pending = list(self._pending.values()), {}
            else:
                log.warning("the text process ended (%s): starting another", child.obituary())
                for number, pending in list(self._pending.items()):
                    pending.deaths += 1
                    if pending.deaths > 1:
                        failed.append(self._pending.pop(number))
                # With nobody waiting, the next task starts it: one that cannot start must not spin.
                self._child = self._start() if self._pending else None
                for number, pending in self._pending.items():
                    assert self._child is not None
                    self._child.send(msgspec.msgpack.encode(Numbered(number, pending.task)))
        error: CllmError = EngineDied("this text could not be processed: the text process died of it")
        for pending in failed:
            if pending.future.set_running_or_notify_cancel():
                pending.future.set_exception(error)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        if self._child is not None:
            self._child.close()
