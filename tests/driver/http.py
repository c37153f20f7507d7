"""HTTP as no client library speaks it: the shape of a refusal, bare sockets, the check after a failure."""

from __future__ import annotations

import re
import socket
import threading
import time
from typing import Any, Self

import httpx

from tests.driver.server import PATIENCE_S, ROOT, Server, Stopwatch, make_client, wait_for

JSON = {"content-type": "application/json"}
LEAKS = (str(ROOT), "/home", "/root", "/tmp", "Traceback", ".py", ".gguf", "pydantic", 'File "', "canary")


def unharmed(server: Server) -> None:
    """After every failure mode: the server is alive, and nothing is leased or in use when it is idle."""
    assert server.client.get("/health").status_code == 200
    wait_for(server.idle, 20, "requests or KV cells are left after the failure")


class HealthWatch:
    """Asks a server for `/health` all the time, for a block: how long each answer took, in seconds.

    With the process id of the server, the time for which the machine was too busy to run it does not count.
    """

    def __init__(self, url: str, *pids: int) -> None:
        self.took: list[float] = []
        self._pids = pids
        self._client = make_client(base_url=url)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def _ask(self) -> None:
        """A failure ends it, which `__exit__` reports."""
        while not self._over.wait(0.01):
            watch = Stopwatch(*self._pids, threading.get_native_id())
            self._client.get("/health").raise_for_status()
            self.took.append(watch.seconds)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert kind is not None or self._thread.is_alive(), "/health failed"
        self._over.set()
        self._thread.join(PATIENCE_S)
        self._client.close()

    @property
    def median(self) -> float:
        return sorted(self.took)[len(self.took) // 2]


def refusal(answer: httpx.Response, status: int = 400, code: str | None = None) -> str:
    """The message of an error in the shape of its route; it leaks nothing."""
    assert answer.status_code == status, answer.text[:500]
    body = answer.json()
    if answer.request.url.path.startswith("/v1/"):
        assert set(body) == {"error"}
        error: dict[str, Any] = body["error"]
        assert set(error) == {"message", "type", "param", "code"}
        message, given = error["message"], error["code"]
        assert isinstance(error["type"], str)
    elif isinstance(body["error"], dict):  # llama-server's own routes
        assert set(body) == {"error"} and {"code", "message", "type"} <= set(body["error"])
        assert body["error"]["code"] == status
        message, given = body["error"]["message"], code or body["error"]["type"]
    else:
        assert set(body) == {"success", "error", "message"} and body["success"] is False
        message, given = body["message"], body["error"]
    assert re.fullmatch("[a-z_]+", given) and (code is None or given == code)
    assert isinstance(message, str) and message
    assert not [leak for leak in LEAKS if leak in message]
    return str(message)


def field_refused(server: Server, path: str, field: str, value: str, status: int = 400) -> str:
    """Send JSON text as a field beside what the route needs; it must be refused and named."""
    needed = {
        "/generate": '"prompt": "x"',
        "/completion": '"prompt": "x"',
        "/v1/completions": '"prompt": "x"',
        "/v1/chat/completions": '"messages": [{"role": "user", "content": "x"}]',
    }[path]
    kept = "" if needed.startswith(f'"{field}"') else needed + ", "
    body = f'{{{kept}"{field}": {value}}}'.encode()
    answer = server.client.post(path, content=body, headers=JSON)
    message = refusal(answer, status)
    if "not valid JSON" in message:  # as NaN and half a surrogate pair are
        return message
    assert field in message
    if path.startswith("/v1/"):
        assert answer.json()["error"]["param"] == field
    return message


def dial(server: Server) -> socket.socket:
    """A bare connection, with a limit on every wait."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def read_all(connection: socket.socket) -> bytes:
    """All that arrives until the server closes the connection."""
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def drip(connection: socket.socket, data: bytes, every_s: float, limit_s: float = 30.0) -> bytes:
    """Send a byte at a time until the server closes the connection; its answer."""
    connection.settimeout(every_s)
    end = time.monotonic() + limit_s
    for byte in data:
        assert time.monotonic() < end, "the slow request was never refused"
        try:
            connection.sendall(bytes([byte]))
            answer = connection.recv(65536)
            return answer + read_all(connection)
        except TimeoutError:
            continue
        except (ConnectionResetError, BrokenPipeError):
            return b""
    raise AssertionError("the server read all of the slow request")
