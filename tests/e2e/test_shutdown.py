"""SIGTERM while streaming: no new request, running ones finish or get an error event, exit code 0."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest

from cllm.server.serve import feed_watchdog, notify
from cllm.types import Health
from tests.driver.server import PATIENCE_S, StartServer, get_children

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


@pytest.fixture
def notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleQueue[bytes]]:
    """What a service manager is told. Its watchdog has a limit of 40 ms."""
    path, received = str(tmp_path / "notify"), SimpleQueue[bytes]()
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    monkeypatch.setenv("WATCHDOG_USEC", "40000")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)

        def read() -> None:  # at once: the kernel keeps ten and drops the rest
            for notice in iter(lambda: receiver.recv(64), b"end"):
                received.put(notice)

        thread = threading.Thread(target=read)
        thread.start()
        yield received
        receiver.connect(path)
        receiver.send(b"end")
        thread.join()


def test_service_manager_is_notified(
    notices: SimpleQueue[bytes], start: StartServer, tiny_model: Path
) -> None:
    server = start(str(tiny_model), "--parallel", "2", "--threads", "1")
    started = [notices.get(timeout=PATIENCE_S) for _ in range(4)]
    assert started.count(b"READY=1") == 1 and started.count(b"WATCHDOG=1") == 3
    children = get_children(server.process.pid)
    server.process.send_signal(signal.SIGTERM)
    assert set(iter(partial(notices.get, timeout=PATIENCE_S), b"STOPPING=1")) <= {b"WATCHDOG=1"}
    server.wait_gone(children)


def test_watchdog_starves_when_the_engine_has_failed(notices: SimpleQueue[bytes]) -> None:
    states = [Health.READY, Health.FAILED, Health.RESTARTING, Health.FAILED, Health.DRAINING]

    class Registry:
        @property
        def health(self) -> Health:
            if not states:
                notify("STOPPING=1")
                raise asyncio.CancelledError
            return states.pop(0)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(feed_watchdog(Registry()))  # type: ignore[arg-type]
    assert list(iter(partial(notices.get, timeout=PATIENCE_S), b"STOPPING=1")) == [b"WATCHDOG=1"] * 3


def test_a_service_manager_that_is_gone_does_no_harm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for address in (str(tmp_path / "nothing"), "@cllm-nothing", ""):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        notify("READY=1")
