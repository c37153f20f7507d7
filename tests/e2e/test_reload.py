"""POST /admin/reload: another model takes over, and running requests do not notice."""

from __future__ import annotations

import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.driver.http import refusal
from tests.driver.server import PATIENCE_S, Server, StartServer, alive, get_children, stream_text, wait_for
from tests.tiny_models import make_dense, make_sliding_window

LONG = 1200  # tokens, which take longer than a reload


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_dense(folder / "one.gguf")
    make_sliding_window(folder / "two.gguf")
    (folder / "broken.gguf").write_bytes((folder / "one.gguf").read_bytes()[:3000])
    return folder


def start_on(start: StartServer, folder: Path, *more: str) -> Server:
    arguments = ("--parallel", "2", "--threads", "1", "--ctx-size", "8192", "--model-dir", str(folder))
    return start(str(folder / "one.gguf"), *arguments, *more)


def reload(server: Server, **body: str) -> dict[str, object]:
    answer = server.post("/admin/reload", body)
    assert answer.status_code == 200, answer.text
    reloaded = answer.json()
    assert isinstance(reloaded, dict)
    return reloaded


def engines(server: Server) -> set[int]:
    lines = get_children(server.process.pid).items()
    return {pid for pid, line in lines if "cllm.workers.engine_worker" in line and " engine " in line}


def test_streams_end_on_the_old_model_and_new_requests_go_to_the_new(
    start: StartServer, folder: Path
) -> None:
    server = start_on(start, folder)
    one = server.generate("hello", LONG)["text"]
    (old,) = engines(server)
    with ThreadPoolExecutor(1) as pool, server.open_stream("hello", LONG) as events:
        seen = [next(events)]
        # The other sequence is taken, too: this one waits in the old engine's queue.
        with server.open_stream("hello", LONG) as others:
            next(others)
            queued = pool.submit(server.generate, "hello", 20)
            wait_for(lambda: len(server.get("/debug/requests")["requests"]) == 3)
            reloaded = reload(server, model="two.gguf")
            assert server.get("/ready")["status"] == "ready"
            assert server.get("/v1/models")["data"][0]["id"] == reloaded["model"] != ""
            two = server.generate("hello", 20)["text"]
        seen += list(events)
        assert one.startswith(queued.result(PATIENCE_S)["text"]), (
            "tokens of the old model go to the old model"
        )
    assert stream_text(seen) == one
    assert not one.startswith(two), "another model says something else"
    wait_for(lambda: not alive(old), 30, "the old engine stayed")
    wait_for(lambda: len(get_children(server.process.pid)) == 2, 30, "the old tokenizer worker stayed")
    assert len(engines(server)) == 1
    metrics = server.metrics()
    assert metrics["cllm_requests_accepted_total"] == 5 and metrics["cllm_engine_restarts_total"] == 0
    # One account over both engines. The other stream was cancelled, unless it ended during a slow reload.
    finished = [
        metrics.get(f"cllm_requests_finished_total{{outcome={end}}}", 0) for end in ("length", "cancelled")
    ]
    assert sum(finished) == 5 and finished[0] >= 4
    assert metrics["cllm_ready"] == 1
    wait_for(server.idle)
    # And again, the same file; then it still restarts after a death.
    reload(server)
    assert server.generate("hello", 20)["text"] == two
    wait_for(lambda: len(engines(server)) == 1, 30)
    server.kill_worker("engine")
    assert server.generate("hello", 20)["text"] == two
    server.stop()


def test_what_cannot_be_loaded_leaves_the_old_one_serving(
    start: StartServer, folder: Path, tmp_path: Path
) -> None:
    server = start_on(start, folder)
    before = get_children(server.process.pid)
    shutil.copy(folder / "two.gguf", tmp_path / "outside.gguf")
    (folder / "link.gguf").symlink_to(tmp_path / "outside.gguf")
    for name in ("../one.gguf", "/etc/passwd", str(tmp_path / "outside.gguf"), "link.gguf", ".", "a\0b"):
        assert "--model-dir" in refusal(server.post("/admin/reload", {"model": name}), 403)
    missing = server.post("/admin/reload", {"model": "none.gguf"})
    assert missing.status_code == 409 and str(folder) not in missing.text
    broken = server.post("/admin/reload", {"model": "broken.gguf"})
    assert broken.status_code == 409 and "truncated" in broken.text and str(folder) not in broken.text
    assert server.generate("hello", 4)["generated_tokens"] == 4
    assert get_children(server.process.pid) == before
    server.stop()


def test_a_shutdown_ends_both(start: StartServer, folder: Path) -> None:
    server = start_on(start, folder, "--drain-s", "0.5")
    with ExitStack() as stack:
        opened = [stack.enter_context(server.open_stream("hello", 3 * LONG)) for _ in range(2)]
        for events in opened:
            next(events)
        reload(server, model="two.gguf")
        children = get_children(server.process.pid)
        assert len(children) == 4
        server.process.send_signal(signal.SIGTERM)
        assert "shutting_down" in {list(events)[-1].get("error") for events in opened}
    server.wait_gone(children)


def test_an_idle_model_sleeps_until_it_is_needed(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--parallel", "1", "--threads", "1", "--sleep-idle-s", "0.5")
    with server.open_stream("hello", 400) as events:  # longer than that
        assert sum(1 for _ in events) > 1
    before = server.generate("hello", 8)["text"]
    wait_for(lambda: server.get("/health")["engine"] == "sleeping")
    wait_for(lambda: not engines(server))
    assert server.get("/ready") == {"status": "sleeping"} and server.get("/props")["is_sleeping"]
    assert server.get("/v1/models")["data"] and not engines(server), "to ask does not wake it"
    with ThreadPoolExecutor(3) as pool:
        texts = [pool.submit(server.generate, "hello", 8) for _ in range(3)]
        assert {text.result()["text"] for text in texts} == {before}
    assert len(engines(server)) == 1 and server.finished("length") >= 5, "one engine, one count"
