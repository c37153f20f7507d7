"""SIGTERM while streaming: nobody new, the running ones finish or are told, exit code 0."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import httpx

from tests.e2e.conftest import StartServer
from tests.e2e.server import Server, children_of, text_of, wait_for

LONG = 4000


def refused(server: Server) -> bool:
    """True when a new request is turned away: 503, or nobody listens any more."""
    body = {"prompt": "too late", "max_tokens": 1}
    try:
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=60, trust_env=False)
    except httpx.TransportError:
        return True
    return answer.status_code == 503 and answer.json()["error"] == "shutting_down"


def test_a_stream_finishes_while_the_server_drains(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--parallel", "2", "--threads", "1", "--drain-s", "60")
    with server.open_stream("last words", 1000) as events:
        first = next(events)
        children = children_of(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "draining" in server.log_text)
        assert refused(server)
        rest = list(events)
    text_of([first, *rest])
    assert rest[-1]["finish_reason"] == "length" and rest[-1]["generated_tokens"] == 1000
    server.wait_gone(children)


def test_a_stream_gets_an_error_event_when_the_drain_is_over(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--parallel", "2", "--threads", "1", "--drain-s", "0.3")
    with server.open_stream("cut short", LONG) as events:
        next(events)
        children = children_of(server.process.pid)
        told = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        *_, last = events
        assert time.monotonic() - told < 0.3 + 2.0
    assert last.pop("id") and last.pop("message")
    assert last == {"error": "shutting_down", "done": True}
    server.wait_gone(children)


def test_sigint_ends_it_the_same_way(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--parallel", "2", "--threads", "1")
    children = children_of(server.process.pid)
    server.process.send_signal(signal.SIGINT)
    server.wait_gone(children)
    assert "Traceback" not in server.log_text


def test_an_idle_connection_does_not_hold_it_up(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--parallel", "2", "--threads", "1")
    assert server.client.get("/health").status_code == 200  # the client keeps the connection open
    children = children_of(server.process.pid)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 0
    server.wait_gone(children)
