"""kill -9 of everything in turn: law 8."""

from __future__ import annotations

import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.e2e.conftest import StartServer
from tests.e2e.server import Server, alive, children_of, wait_for

LONG = 4000


def kill_engine(server: Server) -> None:
    os.kill(server.child("engine"), signal.SIGKILL)


def ready_status(server: Server) -> int:
    return server.client.get("/ready").status_code


def test_death_of_the_engine_in_mid_stream(start: StartServer, tiny_model: Path) -> None:
    """The stream gets an error event within 2 s; whoever has sent nothing is answered all the same."""
    server = start(str(tiny_model), "--parallel", "1", "--threads", "1")
    expected = [server.generate(f"queued {number}", 8)["text"] for number in range(5)]
    assert ready_status(server) == 200
    with ThreadPoolExecutor(5) as pool, server.open_stream("begun", LONG) as events:
        next(events)
        queued = [pool.submit(server.generate, f"queued {number}", 8) for number in range(5)]
        wait_for(lambda: len(server.get("/debug/requests")["requests"]) == 6)
        old = server.child("engine")
        killed = time.monotonic()
        os.kill(old, signal.SIGKILL)
        *_, last = events
        assert time.monotonic() - killed < 2.0
        wait_for(lambda: ready_status(server) == 503, 5, "/ready never said 503")
        assert last.pop("id") and last.pop("message")
        assert last == {"error": "engine_died", "done": True}
        assert server.client.get("/health").status_code == 200
        wait_for(lambda: ready_status(server) == 200)
        assert [future.result()["text"] for future in queued] == expected
    assert server.child("engine") != old
    assert server.generate("queued 0", 8)["text"] == expected[0]
    metrics = server.metrics()
    assert metrics["cllm_engine_restarts_total"] == 1
    assert metrics["cllm_requests_finished_total{outcome=error}"] == 1
    assert metrics["cllm_requests_finished_total{outcome=length}"] == 11
    assert metrics["cllm_requests_accepted_total"] == 12
    assert server.kv_is_zero()
    server.stop()


def test_death_of_the_engine_while_idle(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--parallel", "2", "--threads", "1")
    for restarts in (1, 2):
        kill_engine(server)
        # Sent before it is back: it waits for the new engine instead of failing.
        assert server.generate("after", 4)["generated_tokens"] == 4
        assert server.metrics()["cllm_engine_restarts_total"] == restarts
    assert server.kv_is_zero()
    server.stop()


def test_a_request_that_is_there_at_every_death_is_poison(start: StartServer) -> None:
    """Replayed once with its neighbours and once alone; the third death is its own. They are answered."""
    server = start("--parallel", "2", "--batch-tokens", "128")
    prompt = "This takes seconds to read. " * 550

    def in_engine() -> bool:
        requests = server.get("/debug/requests")["requests"]
        return any(it["place"] == "engine" and it["prompt_tokens"] > 1000 for it in requests)

    with ThreadPoolExecutor(2) as pool:
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
        poison = pool.submit(httpx.post, f"{server.url}/generate", json=body, timeout=90, trust_env=False)
        wait_for(in_engine)
        neighbour = pool.submit(server.generate, "1, 2, 3,", 4)
        wait_for(lambda: len(server.get("/debug/requests")["requests"]) == 2)
        for _ in range(3):
            wait_for(in_engine)
            kill_engine(server)
            wait_for(lambda: ready_status(server) == 503)
        answer = poison.result()
        assert neighbour.result()["generated_tokens"] == 4
    assert answer.status_code == 500
    assert answer.json()["error"] == "poison_request"
    assert server.generate("1, 2, 3,", 4)["generated_tokens"] == 4
    assert server.kv_is_zero()


def test_death_of_the_text_process(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--parallel", "2", "--threads", "1")
    expected = server.generate("before and after", 8)["text"]
    old = server.child("text")
    os.kill(old, signal.SIGKILL)
    assert server.generate("before and after", 8)["text"] == expected
    wait_for(lambda: not alive(old))
    assert server.child("text") != old
    assert server.metrics()["cllm_engine_restarts_total"] == 0
    server.stop()


def test_a_text_process_that_cannot_start_is_no_end(
    start: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    """While its file is away, requests fail with a reason; once it is back they are answered again."""
    model = Path(shutil.copy(tiny_model, tmp_path / "mine.gguf"))
    server = start(str(model), "--parallel", "2", "--threads", "1")
    away = model.rename(tmp_path / "away.gguf")
    os.kill(server.child("text"), signal.SIGKILL)
    body = {"prompt": "x", "max_tokens": 4, "temperature": 0}
    answer = server.post("/generate", body)
    assert answer.status_code >= 500 and answer.json()["error"]
    assert server.get("/health")["status"] == "ok"
    away.rename(model)
    wait_for(lambda: server.post("/generate", body).status_code == 200)
    server.stop()


def test_an_engine_that_dies_while_loading_is_one_line(tiny_model: Path, tmp_path: Path) -> None:
    server = Server(tmp_path / "log", str(tiny_model), "--threads", "1", CLLM_LOG_LEVEL="warning")
    try:
        pid = wait_for(lambda: engine_of(server))
        os.kill(pid, signal.SIGKILL)
        assert server.process.wait(60) == 2
    finally:
        server.kill()
    assert "Traceback" not in server.log_text
    assert [line for line in server.log_text.splitlines() if line.startswith("cllm: ")]


def engine_of(server: Server) -> int:
    """The engine child of a server that is still starting; 0: none yet."""
    lines = children_of(server.process.pid).items()
    return next((pid for pid, line in lines if "cllm.child" in line and " engine " in line), 0)


def test_death_of_the_server_takes_its_children_along(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--parallel", "2", "--threads", "1")
    children = children_of(server.process.pid)
    assert len(children) == 2
    with server.connect({"prompt": "running", "max_tokens": LONG, "temperature": 0}):
        wait_for(lambda: server.kv()["sequences"]["leased"] == 1)
        server.kill()
        wait_for(lambda: not any(map(alive, children)), 5, "children outlived the server")


def test_a_hung_engine_is_replaced(start: StartServer, tiny_model: Path) -> None:
    """No heartbeat for ten seconds: not ready, another child, and the waiting request is answered."""
    server = start(str(tiny_model), "--parallel", "2", "--threads", "1")
    expected = server.generate("hung", 8)["text"]
    hung = server.child("engine")
    os.kill(hung, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.generate, "hung", 8)
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
        wait_for(lambda: ready_status(server) == 503, 30)
        assert waiting.result()["text"] == expected
    assert not alive(hung)
    assert server.metrics()["cllm_engine_restarts_total"] == 1
    server.stop()
