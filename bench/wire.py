"""HTTP/1.1 that notes what arrives and when, and the APIs that are spoken over it.

Nothing is parsed until the load is over: the client shares its cores with the server it measures. httpx costs
about seven times the CPU per streamed chunk (135–200 µs against 22 µs, eight streams on a busy two-core
machine).
"""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from bench.workloads.plan import BenchRequest

_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class Packet(NamedTuple):
    """Bytes as the socket gave them, and the `perf_counter` time at which it did."""

    at: float
    data: bytes


class Event(NamedTuple):
    """The payload of one server-sent event, and when its last byte arrived."""

    at: float
    payload: bytes


class Head(NamedTuple):
    """What a response's head says of its framing; without a length and not chunked, it ends at EOF."""

    status: int
    length: int | None
    chunked: bool

    @classmethod
    def parse(cls, head: bytes) -> Head:
        status_line, *lines = head.split(b"\r\n")
        fields = {
            name.strip().lower(): value.strip().lower()
            for name, _, value in (line.partition(b":") for line in lines)
        }
        length = fields.get(b"content-length")
        return cls(
            status=int(status_line.split(b" ", 2)[1]),
            length=None if length is None else int(length),
            chunked=fields.get(b"transfer-encoding") == b"chunked",
        )


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response, undecoded."""

    sent_at: float
    head: Head
    packets: tuple[Packet, ...]

    @property
    def ended_at(self) -> float:
        return self.packets[-1].at

    def body(self) -> bytes:
        return b"".join(data for _, data in self._parts())

    def events(self) -> Iterator[Event]:
        """Its server-sent events; comments and other fields are skipped."""
        pending = b""
        for at, data in self._parts():
            *blocks, pending = (pending + data.replace(b"\r\n", b"\n")).split(b"\n\n")
            for block in blocks:
                lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
                if lines:
                    yield Event(at, b"\n".join(lines))

    def _parts(self) -> Iterator[Packet]:
        """The body without its framing, each piece with the time of its last byte."""
        raw = b"".join(packet.data for packet in self.packets)
        ends = list(accumulate(len(packet.data) for packet in self.packets))
        position = raw.index(_HEAD_END) + len(_HEAD_END)
        if not self.head.chunked:
            for packet, end in zip(self.packets, ends, strict=True):
                if end > position:
                    yield Packet(packet.at, raw[max(position, end - len(packet.data)) : end])
            return
        while True:
            line_end = raw.index(b"\r\n", position)
            size = int(raw[position:line_end].split(b";")[0], 16)
            if size == 0:
                return
            position = line_end + 2 + size
            yield Packet(self.packets[bisect_left(ends, position)].at, raw[line_end + 2 : position])
            position += 2


async def post(
    address: Address, path: str, body: bytes, timeout_s: float, on_packet: Callable[[], None] | None = None
) -> Response:
    """Send JSON over a connection of its own and wait for the whole answer; connecting counts as sending.

    `on_packet` is called at everything that arrives.
    Every request gets a new connection because llama-server closes its own after a stream, unannounced.
    Raises OSError, or its kind TimeoutError.
    """
    sent_at = perf_counter()
    request = (
        f"POST {path} HTTP/1.1\r\nHost: {address.host}:{address.port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        transport, recorder = await loop.create_connection(lambda: _Recorder(on_packet), *address)
        try:
            transport.write(request)
            head = await recorder.ended
        finally:
            transport.close()
    return Response(sent_at, head, tuple(recorder.packets))


class _Recorder(asyncio.Protocol):
    """Keeps every packet with its time and finds the end of the response, parsing nothing but its head."""

    def __init__(self, on_packet: Callable[[], None] | None) -> None:
        self.packets: list[Packet] = []
        self._on_packet = on_packet
        self.ended: asyncio.Future[Head] = asyncio.get_running_loop().create_future()
        self._head: Head | None = None
        self._received = 0
        self._tail = b""

    def data_received(self, data: bytes) -> None:
        self.packets.append(Packet(perf_counter(), data))
        if self._on_packet is not None:
            self._on_packet()
        if self._is_complete(data) and self._head is not None and not self.ended.done():
            self.ended.set_result(self._head)

    def connection_lost(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        head = self._head
        if head is not None and head.length is None and not head.chunked:
            self.ended.set_result(head)
            return
        reason = str(error) if error else "the server closed the connection in mid-answer"
        self.ended.set_exception(ConnectionResetError(reason))

    def _is_complete(self, data: bytes) -> bool:
        """True when `data` ends the response."""
        if self._head is None:
            head, separator, data = b"".join(packet.data for packet in self.packets).partition(_HEAD_END)
            if not separator:
                return False
            self._head = Head.parse(head)
        self._received += len(data)
        if self._head.length is not None:
            return self._received >= self._head.length
        self._tail = (self._tail + data[-len(_LAST_CHUNK) :])[-len(_LAST_CHUNK) :]
        return self._head.chunked and self._tail == _LAST_CHUNK


class Piece(NamedTuple):
    """The content of one event of a stream. Counts are None where it holds none."""

    text: str = ""
    final: bool = False
    generated_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None


class Post(NamedTuple):
    """What to send, and where."""

    path: str
    body: bytes


class Api(Protocol):
    """One server's way to stream an answer. `exact` if it generates as many tokens as it is asked for."""

    @property
    def exact(self) -> bool: ...

    def post(self, request: BenchRequest, history: Sequence[str] | None = None) -> Post:
        """A completion or, with `history` (the user's and the model's turns, perhaps none yet), a chat."""

    def read(self, payload: bytes) -> Piece:
        """One event's payload. Raises ValueError for what is not JSON."""


class CllmApi:
    """`POST /generate_stream`. Knows no chats."""

    exact = True

    def post(self, request: BenchRequest, history: Sequence[str] | None = None) -> Post:
        assert history is None, "/generate_stream takes one prompt"
        body = _encode(
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            ignore_eos=request.ignore_eos,
            stream=True,
        )
        return Post("/generate_stream", body)

    def read(self, payload: bytes) -> Piece:
        event: dict[str, Any] = json.loads(payload)
        if "error" in event:
            return Piece(final=True, error=str(event["error"]))
        usage: dict[str, int] = event.get("usage") or {}
        return Piece(
            text=event.get("token", ""),
            final=bool(event.get("done")),
            generated_tokens=event.get("generated_tokens"),
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=usage.get("cached_tokens"),
            finish_reason=event.get("finish_reason"),
        )


class OpenAIApi:
    """`POST /v1/completions` and `/v1/chat/completions`.

    `ignore_eos` is no field of OpenAI's; cllm, llama-server and vLLM know it. For others: `exact` False.
    """

    def __init__(self, model: str = "default", exact: bool = True, **fields: object) -> None:
        """`fields` are more of each request's."""
        self.exact = exact
        self._model = model
        self._fields = fields

    def post(self, request: BenchRequest, history: Sequence[str] | None = None) -> Post:
        common: dict[str, object] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "ignore_eos": request.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._fields,
        }
        if history is None:
            return Post("/v1/completions", _encode(prompt=request.prompt, **common))
        messages = [
            {"role": "assistant" if number % 2 else "user", "content": text}
            for number, text in enumerate([*history, request.prompt])
        ]
        return Post("/v1/chat/completions", _encode(messages=messages, **common))

    def read(self, payload: bytes) -> Piece:
        if payload == b"[DONE]":
            return Piece(final=True)
        event: dict[str, Any] = json.loads(payload)
        if "error" in event:
            return Piece(final=True, error=str(event["error"]))
        choice: dict[str, Any] = (event.get("choices") or [{}])[0]
        usage: dict[str, Any] = event.get("usage") or {}
        delta: dict[str, Any] = choice.get("delta") or {}
        return Piece(
            text=choice.get("text") or delta.get("content") or "",
            generated_tokens=usage.get("completion_tokens"),
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            finish_reason=choice.get("finish_reason"),
        )


class ChatApi(OpenAIApi):
    """`POST /v1/chat/completions` only: a prompt is one user's message."""

    def post(self, request: BenchRequest, history: Sequence[str] | None = None) -> Post:
        return super().post(request, history or ())


def _encode(**fields: object) -> bytes:
    return json.dumps(fields).encode()
