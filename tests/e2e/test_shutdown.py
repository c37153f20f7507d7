"""SIGTERM while streaming: no new request, running ones finish or get an error event, exit code 0."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.driver.server import StartServer, get_children

LONG = 4000


def test_sigint_ends_it_the_same_way(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--parallel", "2", "--threads", "1")
    children = get_children(server.process.pid)
    server.process.send_signal(signal.SIGINT)
    server.wait_gone(children)
    assert "Traceback" not in server.log_text


def test_an_idle_connection_does_not_hold_it_up(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--parallel", "2", "--threads", "1")
    assert server.client.get("/health").status_code == 200  # the client keeps the connection open
    children = get_children(server.process.pid)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 0
    server.wait_gone(children)
