"""Bad input: HTTP requests and bodies that are wrong before any field is read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.driver.http import JSON, dial, drip, read_all, refusal, unharmed
from tests.driver.server import PATIENCE_S, Server, StartServer

ROUTES = (
    "/generate",
    "/generate_stream",
    "/encode",
    "/completion",
    "/v1/completions",
    "/v1/chat/completions",
)
OK = {"prompt": "x", "max_tokens": 1}


def send(server: Server, route: str, body: bytes) -> httpx.Response:
    return server.client.post(route, content=body, headers=JSON)


@pytest.mark.failure_mode("body-not-json")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("more", [b"", b"x" * 300_000], ids=["small", "large"])
@pytest.mark.parametrize("body", [b"", b"{prompt: x", b'{"prompt": "x', b'{"prompt": "\xff\xfe', b"\0"])
def test_a_body_that_is_no_json(tiny: Server, route: str, body: bytes, more: bytes) -> None:
    refusal(send(tiny, route, body + more))


@pytest.mark.failure_mode("body-not-an-object")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("body", [b"[]", b"null", b'"x"', b"5", b"true"])
def test_a_body_that_is_no_object(tiny: Server, route: str, body: bytes) -> None:
    refusal(send(tiny, route, body))


@pytest.mark.failure_mode("json-too-deep")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("depth", [65, 1000, 1_000_000])
@pytest.mark.parametrize("brackets", [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
def test_json_nested_too_deep(tiny: Server, route: str, depth: int, brackets: tuple[str, str]) -> None:
    inner = brackets[0] * depth + "1" + brackets[1] * depth
    body = f'{{"prompt": "x", "text": "x", "messages": [], "max_tokens": 1, "other": {inner}}}'
    refusal(send(tiny, route, body.encode()))


@pytest.mark.failure_mode("body-too-large")
@pytest.mark.parametrize("route", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("chunked", [False, True], ids=["sized", "chunked"])
def test_a_body_over_8_mib(tiny: Server, route: str, chunked: bool) -> None:
    chunks = [b'{"prompt": "', *[b"x" * (1 << 20)] * 8, b'"}']
    answer = tiny.client.post(
        route, content=iter(chunks) if chunked else b"".join(chunks), headers=JSON, timeout=PATIENCE_S
    )
    assert str(8 << 20) in refusal(answer, 413)


@pytest.mark.failure_mode("body-too-large")
def test_a_large_body_is_counted_while_it_streams(tiny: Server) -> None:
    """The answer comes although the body never ends."""
    with dial(tiny) as connection:
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(8):
            connection.sendall(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
        time.sleep(0.2)  # all that is allowed has arrived; the byte after it comes alone
        connection.sendall(b"1\r\nx\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.failure_mode("headers-too-large")
@pytest.mark.parametrize("where", ["a value", "many", "the target"])
def test_headers_over_32_kib(tiny: Server, where: str) -> None:
    headers = {"a value": {"x-long": "x" * 33000}, "many": {f"x-{n}": "y" * 90 for n in range(400)}}
    path = "/generate" + ("?" + "q" * 33000 if where == "the target" else "")
    answer = tiny.client.post(path, json=OK, headers=headers.get(where, {}))
    assert str(32 << 10) in refusal(answer, 431)


@pytest.mark.failure_mode("headers-too-large")
def test_a_header_without_end(tiny: Server) -> None:
    with dial(tiny) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 40000)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 431 ") and b"headers_too_large" in answer


# Slow clients ---------------------------------------------------------------------------------------

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def hasty_server(start_for_module: StartServer) -> Server:
    server = start_for_module("--header-timeout-s", "0.5", "--body-timeout-s", "1", "--keep-alive-s", "0.5")
    server.client.headers["connection"] = "close"  # no race with the end of an idle connection
    return server


@pytest.fixture
def hasty(hasty_server: Server) -> Iterator[Server]:
    yield hasty_server
    unharmed(hasty_server)


def refused_late(answer: bytes) -> None:
    """A 408 and nothing after it, or nothing at all."""
    assert answer == b"" or (answer.startswith(b"HTTP/1.1 408 ") and answer.count(b"HTTP/1.1") == 1), answer


@pytest.mark.failure_mode("slow-request")
@pytest.mark.parametrize("sent", [b"", b"POST", HEAD], ids=["nothing", "a word", "all but the end"])
def test_slow_header_half_open(hasty: Server, sent: bytes) -> None:
    with dial(hasty) as connection:
        connection.sendall(sent)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    refused_late(answer)


@pytest.mark.failure_mode("slow-request")
def test_slow_second_header_of_a_connection(hasty: Server) -> None:
    """The limit holds after an answer too, and empty lines do not start a request."""
    with dial(hasty) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        refused_late(drip(connection, b"\r\n" * 500, 0.1))


@pytest.mark.failure_mode("slow-request")
def test_slow_body_half_open(hasty: Server) -> None:
    with dial(hasty) as connection:
        connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    refused_late(answer)
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert body["error"]["code"] == "request_timeout" and "1 s" in body["error"]["message"]


@pytest.mark.failure_mode("slow-request")
@pytest.mark.parametrize(
    ("begin", "drops"),
    [
        (b"GET /health HTTP/1.1\r\nX: ", b"x"),
        (HEAD + b"Content-Length: 9999\r\n\r\n", b" "),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    ],
    ids=["header", "sized", "chunked"],
)
def test_slow_request_drips(hasty: Server, begin: bytes, drops: bytes) -> None:
    with dial(hasty) as connection:
        connection.sendall(begin)
        refused_late(drip(connection, drops * 500, 0.1))


@pytest.mark.failure_mode("slow-request")
def test_an_idle_connection_is_closed(hasty: Server) -> None:
    with dial(hasty) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 200 ") == 1 and b"408" not in answer


@pytest.mark.failure_mode("slow-request")
def test_a_long_answer_is_not_a_slow_request(hasty: Server) -> None:
    """The limits are on what a client sends: a stream longer than all of them goes on, stray bytes or not."""
    body = json.dumps({"prompt": "go on", "max_tokens": 4000, "ignore_eos": True}).encode()
    with dial(hasty) as connection:
        connection.sendall(
            b"POST /generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body + b"\r\n"
        )
        began, data = time.monotonic(), b""
        while time.monotonic() < began + 2 and b'"done":true' not in data:
            data = data[-100:] + connection.recv(65536)
            assert data and b"request_timeout" not in data


@pytest.mark.failure_mode("slow-request")
def test_slow_clients_delay_no_other_client(hasty: Server) -> None:
    sockets = [dial(hasty) for _ in range(100)]
    try:
        for connection in sockets:
            connection.sendall(b"POST /generate HTTP/1.1\r\n")
        assert hasty.generate("beside them", 2)["generated_tokens"] == 2
    finally:
        for connection in sockets:
            connection.close()


# Wrong method, path, content type -------------------------------------------------------------------


@pytest.mark.failure_mode("unknown-route")
@pytest.mark.parametrize("route", ROUTES)
def test_wrong_method_path_and_content_type(tiny: Server, route: str) -> None:
    refusal(tiny.client.get(route), 405)
    refusal(tiny.client.put(route, json=OK), 405)
    refusal(tiny.client.delete(route), 405)
    refusal(tiny.post(route + "/nothing", OK), 404)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = tiny.client.post(route, content=b"{}", headers={"content-type": kind})
        assert "application/json" in refusal(answer, 415)


@pytest.mark.failure_mode("unknown-route")
@pytest.mark.parametrize(
    "path", ["/nothing", "/v1/nothing", "/%2e%2e/etc/passwd", "/..%2f..%2fetc/passwd", "/debug%00/kv"]
)
def test_an_unknown_path(tiny: Server, path: str) -> None:
    refusal(tiny.client.get(path), 404)


@pytest.mark.failure_mode("unknown-route")
def test_no_websocket(tiny: Server) -> None:
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-key": "eA==" * 6}
    refusal(tiny.client.get("/generate", headers={**upgrade, "sec-websocket-version": "13"}), 405)
