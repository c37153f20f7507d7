"""The host: a port in use, no file descriptors left."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.driver.http import dial, read_all, unharmed
from tests.driver.server import PATIENCE_S, SERVE, Server, StartServer, environment, get_children, wait_for


@pytest.mark.failure_mode("port-in-use")
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_port_in_use(tiny_model: Path, host: str) -> None:
    """One line, before a library is probed or a model loaded: the only process is the one that says it."""
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-c", *SERVE, str(tiny_model), "--host", host, "--port", str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(CLLM_LOG_LEVEL="debug"),
        )
        children: set[int] = set()

        def ended() -> bool:
            children.update(get_children(process.pid))
            return process.poll() is not None

        wait_for(ended)
        out, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2 and out == "" and not children
    (line,) = error.splitlines()
    assert line.startswith("cllm: ") and str(port) in line and "in use" in line


DESCRIPTORS = 120


@pytest.fixture(scope="module")
def narrow_server(start_for_module: StartServer) -> Server:
    """Started with few descriptors, and no way to get more."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS})); "
    return start_for_module(program=(limit + SERVE[0], *SERVE[1:]))


@pytest.fixture
def narrow(narrow_server: Server) -> Iterator[Server]:
    yield narrow_server
    unharmed(narrow_server)


def fill(server: Server, stack: ExitStack, count: int) -> list[socket.socket]:
    connections = [stack.enter_context(dial(server)) for _ in range(count)]
    for connection in connections:
        connection.settimeout(5)
    return connections


def serves(server: Server) -> bool:
    """True when a new connection is taken and answered."""
    try:
        return httpx.get(server.url + "/health", trust_env=False, verify=False, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.failure_mode("descriptors-exhausted")
def test_more_connections_than_descriptors(narrow: Server) -> None:
    """Connections within the limit stay, the others get 503; a running stream does not notice."""
    assert "file descriptors allow" in narrow.log_text
    alone = narrow.generate("go on", 100)["text"]
    with narrow.open_stream("go on", 100) as events, ExitStack() as stack:
        seen = [next(events)]
        connections = fill(narrow, stack, 3 * DESCRIPTORS)
        refused = [read_all(connection) for connection in connections[-DESCRIPTORS:]]
        assert all(answer == b"" or answer.startswith(b"HTTP/1.1 503 ") for answer in refused)
        assert any(b"too_many_connections" in answer and b"retry-after" in answer for answer in refused)
        seen += list(events)
    assert "".join(event["token"] for event in seen) == alone
    assert narrow.process.poll() is None


@pytest.mark.failure_mode("descriptors-exhausted")
def test_the_workers_can_still_be_replaced(narrow: Server) -> None:
    """Descriptors are reserved for them: with every connection taken, the tokenizer worker restarts."""
    with narrow.open_stream("go on", 1, ignore_eos=True) as events:
        list(events)
    keep = httpx.Client(base_url=narrow.url, trust_env=False, timeout=PATIENCE_S)
    with keep, ExitStack() as stack:
        assert keep.get("/health").status_code == 200
        fill(narrow, stack, 2 * DESCRIPTORS)
        narrow.kill_worker("tokenizer")
        answer = keep.post("/generate", json={"prompt": "still", "max_tokens": 2})
        assert answer.status_code == 200, answer.text


@pytest.mark.failure_mode("descriptors-exhausted")
def test_the_accept_loop_survives_when_there_is_no_descriptor_at_all(start_for_module: StartServer) -> None:
    """Our own limit off, the system's hits: accepting fails, is logged or not, and goes on."""
    limit = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (90, 90)); "
        "import cllm.server.connection as c; c.SPARE_DESCRIPTORS = -1000; "
    )
    server = start_for_module(program=(limit + SERVE[0], *SERVE[1:]))
    with ExitStack() as stack:
        for _ in range(200):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", server.port))
        time.sleep(1)
        assert server.process.poll() is None
    wait_for(lambda: serves(server))
    unharmed(server)
