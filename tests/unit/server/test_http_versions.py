"""HTTP as older and simpler clients speak it, over real sockets: HTTP/1.0, half-closed, `Expect`, HEAD."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from cllm.config import ServerConfig
from cllm.server.connection import GuardedConnection, ReadTurns, limit_connections
from cllm.server.dialects import TABLE
from cllm.server.keys import KeyRing
from cllm.server.middleware import RequestMiddleware

HOST = b"Host: localhost\r\n"
POST = b"POST / HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"


class App:
    """Answers with its path; below `/slow` when it may, below `/stream` in pieces of unknown length."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.asked = asyncio.Event()
        self.left = asyncio.Event()
        self.received: list[bytes] = []  # the body of each request

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.received.append(b"")
        more = True
        while more:
            message = await receive()
            self.received[-1] += message.get("body", b"")
            more = message.get("more_body", False)
        self.asked.set()
        if scope["path"].startswith("/slow"):
            watcher = asyncio.ensure_future(self._watch(receive))
            await self.may.wait()
            watcher.cancel()
        body = json.dumps([scope["method"], scope["path"]]).encode()
        if scope["path"].endswith("stream"):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for piece in (b"data: 1\n\n", b"data: 2\n\n"):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                if scope["path"] == "/held/stream":
                    watcher = asyncio.ensure_future(self._watch(receive))
                    await self.may.wait()
                    watcher.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _watch(self, receive: Any) -> None:
        if (await receive())["type"] == "http.disconnect":
            self.left.set()
            self.may.set()


class Peer:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, data: bytes) -> bytes:
        """Send, and read until the server closes the connection."""
        self.writer.write(data)
        return await self.reader.read()


Connect = Callable[[], Coroutine[Any, Any, Peer]]


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[Connect]:
    settings = ServerConfig(max_body_mb=1)
    layer = RequestMiddleware(app, settings, KeyRing("", ""), TABLE, lambda code: None)
    config = uvicorn.Config(layer, log_config=None, lifespan="off", ws="none", server_header=False)
    limits, state = limit_connections(settings), ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: GuardedConnection(limits, ReadTurns(), config, state, {}), "127.0.0.1", 0
    )
    peers: list[Peer] = []

    async def connect() -> Peer:
        peers.append(Peer(*await asyncio.open_connection(*server.sockets[0].getsockname())))
        return peers[-1]

    try:
        yield connect
    finally:
        for peer in peers:
            peer.writer.close()
        server.close()


def run(scenario: Callable[[App, Connect], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        app = App()
        async with asyncio.timeout(30), serving(app) as connect:
            await scenario(app, connect)

    asyncio.run(limited())


@pytest.mark.parametrize("path", [b"/x", b"/stream"])
def test_http_1_0_gets_no_chunks_and_its_end_is_the_connections(path: bytes) -> None:
    async def scenario(app: App, connect: Connect) -> None:
        answer = await (await connect()).ask(b"GET %b HTTP/1.0\r\n\r\n" % path)
        head, body = answer.split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 200 ") and b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert body == (b"data: 1\n\ndata: 2\n\n" if path == b"/stream" else b'["GET", "/x"]')

    run(scenario)


def test_http_1_1_gets_chunks() -> None:
    async def scenario(app: App, connect: Connect) -> None:
        answer = await (await connect()).ask(
            b"GET /stream HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n"
        )
        assert b"transfer-encoding: chunked" in answer and answer.endswith(b"\r\n0\r\n\r\n")

    run(scenario)


@pytest.mark.parametrize(
    "head",
    [
        b"GET %b HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET %b HTTP/1.0\r\n\r\n",
        POST + b"Content-Length: 2\r\n\r\n{}",
    ],
    ids=["1.1", "1.0", "post"],
)
@pytest.mark.parametrize("path", [b"/x", b"/slow", b"/slow/stream"])
def test_a_client_that_closes_its_sending_side_gets_its_answer(head: bytes, path: bytes) -> None:
    async def scenario(app: App, connect: Connect) -> None:
        peer = await connect()
        data = head.replace(b"POST /", b"POST " + path) if head.startswith(b"POST") else head % path
        peer.writer.write(data)
        peer.writer.write_eof()
        await app.asked.wait()
        await asyncio.sleep(0.1)
        app.may.set()
        answer = await peer.reader.read()
        continued = b"HTTP/1.1 100 Continue\r\n\r\n"
        assert answer.removeprefix(continued).startswith(b"HTTP/1.1 200 "), answer
        assert not (continued in answer and b"1.0" in data), "unknown to HTTP/1.0"
        assert (b"data: 2" if b"stream" in path else path) in answer
        assert not app.left.is_set()

    run(scenario)


@pytest.mark.parametrize("path", [b"/slow", b"/held/stream"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_client_that_has_left_is_noticed(path: bytes, version: bytes) -> None:
    async def scenario(app: App, connect: Connect) -> None:
        peer = await connect()
        peer.writer.write(b"GET %b HTTP/%b\r\n%b\r\n" % (path, version, HOST))
        await app.asked.wait()
        if b"stream" in path:
            await peer.reader.readuntil(b"data: 1\n\n")
        peer.writer.close()
        async with asyncio.timeout(5):
            await app.left.wait()

    run(scenario)


def test_the_first_of_pipelined_requests_hears_that_the_client_has_left() -> None:
    async def scenario(app: App, connect: Connect) -> None:
        peer = await connect()
        peer.writer.write(
            b"GET /held/stream HTTP/1.1\r\n" + HOST + b"\r\nGET /y HTTP/1.1\r\n" + HOST + b"\r\n"
        )
        await peer.reader.readuntil(b"data: 1")
        peer.writer.transport.abort()
        async with asyncio.timeout(5):
            await app.left.wait()

    run(scenario)


def test_what_is_no_http_is_not_answered_in_the_middle_of_a_response() -> None:
    async def scenario(app: App, connect: Connect) -> None:
        peer = await connect()
        peer.writer.write(b"GET /held/stream HTTP/1.1\r\n" + HOST + b"\r\n")
        await peer.reader.readuntil(b"data: 1\n\n\r\n")
        peer.writer.write(b"no HTTP\r\n\r\n")
        assert await peer.reader.read() == b""
        assert app.left.is_set()

    run(scenario)


def test_nothing_is_left_in_a_stream_but_a_comment() -> None:
    async def scenario(app: App, connect: Connect) -> None:
        peer = await connect()
        peer.writer.write(b"GET /held/stream HTTP/1.1\r\n" + HOST + b"\r\n")
        begun = await peer.reader.readuntil(b"data: 1\n\n\r\n")
        peer.writer.write_eof()
        comment = await peer.reader.readuntil(b":\n\n\r\n")
        app.may.set()
        rest = await peer.reader.read()
        assert begun.startswith(b"HTTP/1.1 200") and comment == b"3\r\n:\n\n\r\n"
        assert rest == b"9\r\ndata: 2\n\n\r\n0\r\n\r\n"

    run(scenario)


def test_a_refusal_comes_before_100_continue_and_closes() -> None:
    async def scenario(app: App, connect: Connect) -> None:
        expect = b"Expect: 100-continue\r\n"
        large = await (await connect()).ask(POST + expect + b"Content-Length: 1048577\r\n\r\n")
        assert large.startswith(b"HTTP/1.1 413 ") and b"connection: close" in large
        packed = POST + expect + b"Content-Encoding: gzip\r\nContent-Length: 9\r\n\r\n"
        refused = await (await connect()).ask(packed)
        assert refused.startswith(b"HTTP/1.1 415 ") and b"compressed" in refused
        assert not app.asked.is_set()

        peer = await connect()
        peer.writer.write(POST + expect + b"Content-Length: 2\r\n\r\n")
        assert await peer.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        peer.writer.write(b"{}")
        head = await peer.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ") and b"connection: close" not in head

    run(scenario)


def test_a_body_over_the_limit_is_refused_by_its_length_alone() -> None:
    async def scenario(app: App, connect: Connect) -> None:
        peer = await connect()
        peer.writer.write(POST + b"Content-Length: 1048577\r\n\r\n")
        assert (await peer.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")
        body = await peer.reader.readuntil(b"}")
        assert b"1048576 bytes" in body
        peer.writer.write(b"x" * 1048577 + b"GET /next HTTP/1.1\r\n" + HOST + b"\r\n")  # read and dropped
        assert b"/next" in await peer.reader.readuntil(b"]")

    run(scenario)


@pytest.mark.parametrize(
    ("hosts", "status"),
    [(b"", 400), (HOST * 2, 400), (HOST, 200), (b"Host: \r\n", 200), (b"Host: evil\r\n", 403)],
)
def test_http_1_1_needs_one_host(hosts: bytes, status: int) -> None:
    async def scenario(app: App, connect: Connect) -> None:
        answer = await (await connect()).ask(b"GET / HTTP/1.1\r\nConnection: close\r\n" + hosts + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 %d " % status)

    run(scenario)


def test_head_is_get_without_the_body() -> None:
    async def scenario(app: App, connect: Connect) -> None:
        answer = await (await connect()).ask(b"HEAD /x HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n")
        head, body = answer.split(b"\r\n\r\n", 1)
        assert body == b"" and b"content-length: %d" % len(b'["GET", "/x"]') in head

    run(scenario)


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAA\r\n"


@pytest.mark.parametrize("split", [False, True], ids=["one packet", "byte by byte"])
@pytest.mark.parametrize("chunked", [False, True], ids=["sized", "chunked"])
def test_an_upgrade_that_is_not_taken_is_ignored(split: bool, chunked: bool) -> None:
    """Java's HttpClient and `curl --http2` offer one with each request without TLS."""

    async def scenario(app: App, connect: Connect) -> None:
        peer = await connect()
        sized = b'Content-Length: 7\r\n\r\n{"a":1}'
        pieces = b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n4\r\n":1}\r\n0\r\n\r\n'
        request = POST + OFFER + (pieces if chunked else sized)
        for number in (1, 2):  # the connection lives on
            for part in [bytes([each]) for each in request] if split else [request]:
                peer.writer.write(part)
                if split:
                    await peer.writer.drain()
            head = await peer.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ") and b"connection: close" not in head
            assert await peer.reader.readexactly(len(b'["POST", "/"]')) == b'["POST", "/"]'
            assert app.received == [b'{"a":1}'] * number

    run(scenario)


def test_pipelined_requests_may_all_offer_an_upgrade() -> None:
    async def scenario(app: App, connect: Connect) -> None:
        request = b"GET /x HTTP/1.1\r\n" + HOST + OFFER + b"\r\n"
        last = b"GET /y HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n"
        answer = await (await connect()).ask(request * 9 + last)
        assert answer.count(b"HTTP/1.1 200 ") == 10 and answer.endswith(b'["GET", "/y"]')

    run(scenario)
