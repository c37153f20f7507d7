"""Answer log: the events of an answer that outlives its connection, for any number of readers.

A replayed stream is an answer whose reader was lost, a background answer one that needs no reader. No reader
stalls the engine: events are kept within limits, and each reader takes them at its own pace.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.types import Scope

from cllm.errors import CllmError, InvalidRequest, NotFound, SlowReader
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.limits import MAX_LOG_BYTES, MAX_LOGS_BYTES
from cllm.server.dialect import COMMENT, INTERNAL, HttpError
from cllm.server.middleware import LEASES

log = logging.getLogger(__name__)
SMALL_BYTES = 64 << 10  # of one log where all together have reached their limit
READ_AT_ONCE = 256  # events
LAST_EVENT = re.compile(r"(.{1,128})\.(\d{1,10})")
NO_STREAM = "there is no such stream: it was not kept (reconnect_s), or ended too long ago"
NOT_KEPT = "these events are not kept any more: the stream is too old or too long; send the request again"


class AnswerLog:
    """Events of one answer, numbered from `first`; the id of each is `ID.NUMBER`.

    Without a reader for `linger_s` an answer is cancelled, unless it is a background one; one that has ended
    is forgotten.
    """

    def __init__(
        self,
        logs: AnswerLogs,
        log_id: str,
        tenant: str,
        engine: EngineClient,
        streams: Sequence[AsyncOutputStream],
        linger_s: float,
        *,
        beat: bytes = COMMENT,
        first: int = 0,
        describe: Callable[[], Any] | None = None,
    ) -> None:
        """`describe` makes the answer so far of a background one."""
        self.id, self.tenant, self.beat, self.describe = log_id, tenant, beat, describe
        self.engine, self.streams = engine, streams
        self.ended = asyncio.Event()
        self.size = 0
        self.logs, self._linger_s = logs, linger_s
        self._begin = self._first = first  # of all events, and of those that are kept
        self._events: list[bytes] = []
        self._grown = asyncio.Event()
        self._readers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        logs.add(self)

    def start(self, chunks: AsyncIterator[bytes], scope: Scope) -> None:
        """Record the chunks of a stream to their end. The models of the request stay loaded until then."""
        leases = [*scope[LEASES]]
        scope[LEASES].clear()

        async def record() -> None:
            try:
                async for chunk in chunks:
                    self.append(chunk)
            except Exception as error:
                if not isinstance(error, CllmError):
                    log.exception("unexpected error in a stream", exc_info=error)
                    error = HttpError(500, "internal_error", INTERNAL)
                self.append(scope["state"]["dialect"].frame_error(error))
            finally:
                self.cancel()
                for lease in leases:
                    lease.release()
                self.ended.set()
                self._grown.set()
                self._set_timer()

        self._task = asyncio.ensure_future(record())
        self._set_timer()

    def append(self, chunk: bytes) -> None:
        """Add the events of a chunk. Where they are too many, the oldest are dropped."""
        before = self.size
        for event in chunk.split(b"\n\n")[:-1]:
            if not event.startswith(b":"):
                number = self._first + len(self._events)
                self._events.append(b"id: %b.%d\n%b\n\n" % (self.id.encode(), number, event))
                self.size += len(self._events[-1])
        self.logs.size += self.size - before
        if self.size > (MAX_LOG_BYTES if self.logs.make_room() else SMALL_BYTES):
            half = (len(self._events) + 1) // 2
            dropped = sum(map(len, self._events[:half]))
            del self._events[:half]
            self._first += half
            self.size -= dropped
            self.logs.size -= dropped
        self._grown.set()
        self._grown.clear()

    async def follow(self, after: int = -1) -> AsyncIterator[bytes]:
        """The events after number `after`, then those to come. Raises SlowReader where some are gone."""
        number = max(after + 1, self._begin)
        while True:
            if number < self._first:
                raise SlowReader(NOT_KEPT)
            begin = number - self._first
            if events := self._events[begin : begin + READ_AT_ONCE]:
                number += len(events)
                yield b"".join(events)
            elif self.ended.is_set():
                return
            else:
                await self._grown.wait()

    def cancel(self) -> None:
        for stream in self.streams:
            self.engine.cancel(stream.request_id)

    def enter(self) -> None:
        """Count a reader, until it leaves."""
        self._readers += 1
        self._set_timer()

    def leave(self) -> None:
        self._readers -= 1
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._readers and (self.ended.is_set() or self.describe is None):
            self._timer = asyncio.get_running_loop().call_later(self._linger_s, self._expire)

    def _expire(self) -> None:
        if self.ended.is_set():
            self.logs.remove(self)
        else:
            self.cancel()


class AnswerLogs:
    """The logs of all answers, by tenant and id, within `MAX_LOGS_BYTES`."""

    def __init__(self) -> None:
        self.size = 0
        self._logs: dict[tuple[str, str], AnswerLog] = {}

    def add(self, new: AnswerLog) -> None:
        if (old := self._logs.get((new.tenant, new.id))) is not None:
            self.remove(old)
        self._logs[new.tenant, new.id] = new

    def get(self, tenant: str, log_id: str) -> AnswerLog | None:
        return self._logs.get((tenant, log_id))

    def find(self, tenant: str, log_id: str, last: str | None = None) -> tuple[AnswerLog, int]:
        """A log, and the number of the event with the id `last`. Raises NotFound, InvalidRequest.

        An empty `log_id` is that of the event.
        """
        match = LAST_EVENT.fullmatch(last) if last else None
        if last and (match is None or (log_id and match[1] != log_id)):
            raise InvalidRequest("Last-Event-ID: must be the id of an event of this stream, as it was sent")
        if (found := self.get(tenant, log_id or (match[1] if match else ""))) is None:
            raise NotFound(NO_STREAM)
        return found, int(match[2]) if match else -1

    def make_room(self) -> bool:
        """Forget ended answers, the oldest first, to keep the limit of all logs. False if that fails."""
        if self.size > MAX_LOGS_BYTES:
            for each in [each for each in self._logs.values() if each.ended.is_set()]:
                if self.size > MAX_LOGS_BYTES:
                    self.remove(each)
        return self.size <= MAX_LOGS_BYTES

    def remove(self, old: AnswerLog) -> None:
        if self._logs.get((old.tenant, old.id)) is old:
            del self._logs[old.tenant, old.id]
            self.size -= old.size
            old.logs = AnswerLogs()  # what it still records does not count here
