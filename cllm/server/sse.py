"""Server-sent events, the end of requests whose client has disconnected, and the wait for a model.

While a model is loaded for a request that streams, the head of its stream is sent, and comments. What the
route answers then is a stream that goes on, or an error, which is the stream's last frame.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cllm.chat.reply import BlockEvent, ReplyBuilder
from cllm.chat.session import ChatSession
from cllm.errors import ClientGone, SlowReader
from cllm.frontend.async_calls import merged
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.engine_registry import ModelLease
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.server.answer_log import AnswerLog
from cllm.server.dialect import COMMENT, EVENTS, encode_named, respond
from cllm.server.middleware import DIRECT_SEND, ROUTE_SEND, wait_for_disconnect
from cllm.types import Failure, RequestOutput

MAX_SCORED = 2_000  # tokens with log-probabilities that are rendered on the event loop
BEAT_S = 4.0  # of silence, after which a stream shows that it is alive
HEAD_AFTER_S = 1.0  # an error that is known by then has a status of its own
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
Made = TypeVar("Made")
StreamEvent = dict[str, Any]  # clients listen for it by its `type`, which also decides what else it has


async def cancel_on_disconnect(
    engine: EngineClient, streams: Sequence[AsyncOutputStream], receive: Receive
) -> None:
    """Wait until the client has disconnected, then cancel its requests."""
    await wait_for_disconnect(receive)
    for stream in streams:
        engine.cancel(stream.request_id)


async def collect(
    engine: EngineClient, streams: Sequence[AsyncOutputStream], http: Request
) -> list[list[RequestOutput]]:
    """All outputs of each request.

    Raises the first error a request ended with, and ClientGone if the client disconnected; requests that
    still run are cancelled.
    """
    http.scope["state"]["queue_position"] = max(stream.queue_position for stream in streams)
    outputs: list[list[RequestOutput]] = [[] for _ in streams]
    watcher = asyncio.ensure_future(cancel_on_disconnect(engine, streams, http.receive))
    try:
        async for index, output in merged(streams):
            if output.error is not None:
                raise output.error.error()
            outputs[index].append(output)
        if watcher.done():
            raise ClientGone("the client disconnected")
        return outputs
    except BaseException:
        for stream in streams:
            engine.cancel(stream.request_id)
        raise
    finally:
        watcher.cancel()


async def render(collected: Iterable[Sequence[RequestOutput]], make: Callable[[], Made]) -> Made:
    """What is made of outputs: here, or on a thread where many of their tokens are scored."""
    each = (output for outputs in collected for output in outputs)
    scored = sum(len(output.logprobs) + len(output.prompt_logprobs) for output in each)
    return await asyncio.to_thread(make) if scored > MAX_SCORED else make()


class EventStream(Response):
    """The outputs of requests as server-sent events. When it ends, requests that still run are cancelled.

    A stream that can be reconnected to is read from its log, where the requests go on without this reader.

    The head is sent at once, before any output: a failure is an event, unless it is known already. While
    there is nothing to send, a `beat` is: clients and proxies give up a connection that stays silent. A
    client that reads nothing for `slow_reader_s` (of the app's state) is disconnected.
    """

    def __init__(
        self,
        engine: EngineClient,
        streams: Sequence[AsyncOutputStream],
        events: AsyncIterator[bytes],
        beat: bytes = COMMENT,
        media_type: str = EVENTS,
        log: AnswerLog | None = None,
    ) -> None:
        headers = {name.decode(): value.decode() for name, value in STREAM_HEADERS}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._engine = engine
        self._streams = streams
        self._events = events
        self._beat = beat
        self._log = log
        self._beating: asyncio.Future[None] | None = None  # the write of a beat
        self._wrote_at = time.monotonic()  # when the last write began
        self._writing = True  # it has not ended; the head is the first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._log is None:
            position = max(stream.queue_position for stream in self._streams)
            scope.setdefault("state", {})["queue_position"] = position
        self._keep(scope)
        streams = self._streams if self._log is None else ()
        sender = asyncio.ensure_future(self._send(scope, receive, send))
        watcher = asyncio.ensure_future(cancel_on_disconnect(self._engine, streams, receive))
        try:
            await self._watch({sender, watcher}, scope, send)
        finally:
            for task in filter(None, (watcher, sender, self._beating)):
                task.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await sender
            for stream in streams:
                self._engine.cancel(stream.request_id)
            if self._log is not None:
                self._log.leave()

    @classmethod
    def follow(cls, log: AnswerLog, after: int = -1) -> EventStream:
        """The events of a log that follow number `after`."""
        return cls(log.engine, log.streams, log.follow(after), log.beat, log=log)

    def _keep(self, scope: Scope) -> None:
        """Read the events from a log, if the request asked for one."""
        app, state = scope["app"].state, scope["state"]
        asked = state.get("reconnect_s")
        linger_s: float = app.reconnect_s if asked is None else asked
        if self._log is None and linger_s and self.media_type == EVENTS and self._failure is None:
            name, tenant = self._streams[0].request_id.removesuffix("-0-0"), state["tenant"].name
            beat, events = self._beat, self._events
            self._log = AnswerLog(app.logs, name, tenant, self._engine, self._streams, linger_s, beat=beat)
            self._log.start(events, scope)
            self._events = self._log.follow()
        if self._log is not None:
            self.headers["X-Stream-Id"] = self._log.id
            self._log.enter()

    @property
    def _failure(self) -> Failure | None:
        return next((stream.failure for stream in self._streams if stream.failure is not None), None)

    async def _watch(self, tasks: set[asyncio.Future[None]], scope: Scope, send: Send) -> None:
        """Return when one of the tasks has ended, or when the client reads nothing; beat meanwhile."""
        limit_s: float = scope["app"].state.slow_reader_s
        while True:
            silent_s = 0.0 if self._writing else time.monotonic() - self._wrote_at
            wait_s = min(limit_s / 4, BEAT_S - silent_s)
            if (await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED))[0]:
                return
            silent_s = time.monotonic() - self._wrote_at
            if self._writing and silent_s > limit_s:
                self._engine.metrics.slow_readers.inc()
                return
            if not self._writing and silent_s >= BEAT_S:
                self._wrote_at, self._writing = time.monotonic(), True
                self._beating = asyncio.ensure_future(self._write_beat(scope.get(DIRECT_SEND, send)))

    async def _write_beat(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._beat, "more_body": True})
        self._wrote_at, self._writing, self._beating = time.monotonic(), False, None

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._log is None and (failure := self._failure) is not None:
            await respond(scope, failure.error())(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._writing = False
        send = scope.get(DIRECT_SEND, send)
        try:
            async for chunk in self._events:
                await self._write(send, chunk)
        except SlowReader as error:
            await self._write(send, scope["state"]["dialect"].frame_error(error))
        await self._write(send, b"", more=False)

    async def _write(self, send: Send, body: bytes, *, more: bool = True) -> None:
        while self._beating is not None:
            await self._beating
        self._wrote_at, self._writing = time.monotonic(), True
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._writing = False


def resume_stream(http: Request, stream_id: str = "") -> EventStream:
    """The events of a stream that follow the one of `Last-Event-ID`. Raises NotFound, InvalidRequest."""
    last = http.headers.get("last-event-id") or http.query_params.get("last_event_id")
    return EventStream.follow(*http.app.state.logs.find(http.scope["state"]["tenant"].name, stream_id, last))


async def wait_for_load(
    http: Request, loading: Coroutine[Any, Any, ModelLease], *, stream: bool
) -> ModelLease:
    """Wait for a lease; a `stream` shows that it is alive. Raises ClientGone where the client leaves."""
    task = asyncio.ensure_future(loading)
    leaving = asyncio.ensure_future(wait_for_disconnect(http.receive))
    state, send = http.scope["state"], http.scope[ROUTE_SEND]
    try:
        while not task.done():
            beat_s = BEAT_S if state.get("streaming") else HEAD_AFTER_S
            await asyncio.wait(
                (task, leaving), timeout=beat_s if stream else None, return_when=asyncio.FIRST_COMPLETED
            )
            if leaving.done() and not task.done():
                raise ClientGone("the client disconnected")
            if stream and not task.done():
                if not state.get("streaming"):
                    headers = [(b"content-type", f"{EVENTS}; charset=utf-8".encode()), *STREAM_HEADERS]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    state["streaming"] = True
                await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
        return task.result()
    except BaseException:
        task.add_done_callback(_release)
        task.cancel()
        raise
    finally:
        leaving.cancel()


def _release(task: asyncio.Task[ModelLease]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().release()


# Replies in blocks, as `/v1/responses` and `/v1/messages` have them, whole or as named events -----------


def make_event(kind: str, /, **fields: Any) -> StreamEvent:
    return {"type": kind, **fields}


class BlockRenderer(ABC):
    """Renders one reply while it is built. A whole response is what its events add up to."""

    beat: ClassVar[bytes] = COMMENT  # what a stream sends while there is nothing to send

    def __init__(self, reply: ReplyBuilder) -> None:
        self._reply = reply

    @abstractmethod
    def start(self) -> list[StreamEvent]:
        """The events before any output."""

    @abstractmethod
    def render(self, changes: Sequence[BlockEvent], output: RequestOutput) -> list[StreamEvent]:
        """The events of a step, in order; the reply has its changes already."""

    @abstractmethod
    def body(self) -> msgspec.Struct:
        """The response as far as it has come."""

    async def chunks(self, session: ChatSession) -> AsyncIterator[bytes]:
        """The encoded events, as they arrive."""
        yield encode_events(*self.start())
        async for _, changes, output in session.steps():
            if rendered := self.render(changes, output):
                yield encode_events(*rendered)

    async def respond(self, http: Request, session: ChatSession, *, stream: bool) -> Any:
        """The HTTP response, whole or streamed."""
        if stream:
            return EventStream(session.engine, session.streams, self.chunks(session), self.beat)
        outputs = await collect(session.engine, session.streams, http)

        def make() -> Any:
            session.finish(outputs)
            return self.whole()

        return await render(outputs, make)

    def whole(self) -> Any:
        """The response to a call that does not stream, its reply finished."""
        return self.body()


def encode_events(*events: StreamEvent) -> bytes:
    return b"".join(encode_named(event["type"], event) for event in events)
