"""Survives native death: kill -9 of each process in turn."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

from tests.driver.server import SERVE, Server, StartServer, alive, get_children, wait_for

LONG = 4000


def kill_engine(server: Server) -> None:
    server.kill_worker("engine")


def test_crash_of_the_workers_while_idle(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--parallel", "2", "--threads", "1")
    for restarts in (1, 2):
        kill_engine(server)
        # Sent before it is back: it waits for the new engine instead of failing.
        assert server.generate("after", 4)["generated_tokens"] == 4
        assert server.metrics()["cllm_engine_restarts_total"] == restarts
    assert server.kv_is_zero()
    expected = server.generate("before and after", 8)["text"]
    old = server.kill_worker("tokenizer")
    assert server.generate("before and after", 8)["text"] == expected
    wait_for(lambda: not alive(old))
    assert server.child("tokenizer") != old
    assert server.metrics()["cllm_engine_restarts_total"] == restarts
    server.stop()


def test_a_tokenizer_worker_that_cannot_start_is_tried_again(
    start: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    """While its file is away, requests fail with a reason; once it is back they are answered again."""
    model = Path(shutil.copy(tiny_model, tmp_path / "mine.gguf"))
    few = "from cllm.workers.supervisor import Backoff; Backoff.MAX_IN_A_ROW = 1; "  # starts before it fails
    program = (few + SERVE[0], *SERVE[1:])
    server = start(str(model), "--parallel", "2", "--threads", "1", program=program)
    away = model.rename(tmp_path / "away.gguf")
    server.kill_worker("tokenizer")
    server.expect_failure("the tokenizer process ended|mine.gguf|failed to load model")  # while it is away
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
    lines = get_children(server.process.pid).items()
    return next(
        (pid for pid, line in lines if "cllm.workers.engine_worker" in line and " engine " in line), 0
    )


def test_the_workers_end_with_the_server(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--parallel", "2", "--threads", "1")
    children = get_children(server.process.pid)
    assert len(children) == 2
    with server.connect({"prompt": "running", "max_tokens": LONG, "temperature": 0}):
        wait_for(lambda: server.kv()["sequences"]["leased"] == 1)
        server.kill()
        wait_for(lambda: not any(map(alive, children)), 5, "children outlived the server")
