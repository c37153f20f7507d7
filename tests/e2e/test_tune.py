"""The first start measures, the second remembers; neither is required."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cllm.backend.llama.library import find
from tests.driver.server import Server, StartServer, cllm, wait_for

MEASURING = "measuring which settings"
SMALL = ("--parallel", "2", "--ctx-size", "2048", "--threads", "1", "--tune-budget-s", "2")


@pytest.fixture
def own_cache(tmp_path: Path) -> dict[str, Any]:
    """Variables that let it tune, into a cache of its own."""
    return {"CLLM_TUNE": "1", "CLLM_CACHE_DIR": str(tmp_path / "cache"), "CLLM_LIBRARY": str(find())}


def records(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "tune").glob("*.json"))


def test_the_first_start_measures_and_the_second_remembers(
    start: StartServer, tiny_model: Path, tmp_path: Path, own_cache: dict[str, Any]
) -> None:
    untuned = start(str(tiny_model), *SMALL, "--no-tune", **own_cache)
    assert MEASURING not in untuned.log_text and not records(tmp_path)
    assert untuned.get("/model/info")["limits"]["batch_tokens"] == 512
    untuned.stop()
    first = start(str(tiny_model), *SMALL, **own_cache)
    assert MEASURING in first.log_text and "tuned: " in first.log_text
    assert first.generate("tuned", 4)["generated_tokens"] == 4
    first.stop()
    (file,) = records(tmp_path)
    record = json.loads(file.read_text())
    assert record["options"] and record["identity"]["fixed"] == "threads=1"
    # A result that shows, and that no busy neighbour has made provisional.
    file.write_text(json.dumps({**record, "settings": {"batch_tokens": 96}, "provisional": ""}))
    second = start(str(tiny_model), *SMALL, **own_cache)
    assert MEASURING not in second.log_text
    assert second.get("/model/info")["limits"]["batch_tokens"] == 96
    second.stop()


def test_an_interrupt_skips_it(tiny_model: Path, tmp_path: Path, own_cache: dict[str, Any]) -> None:
    # With time enough: an interrupt that comes when all was measured already is one of the server.
    unhurried = (*SMALL[:-1], "60")
    server = Server(tmp_path / "log", str(tiny_model), *unhurried, **own_cache)
    try:
        wait_for(lambda: MEASURING in server.log_text)
        os.kill(server.process.pid, signal.SIGINT)
        with server:
            assert "tuning skipped" in server.log_text, server.log_text
            assert server.get("/health")
        assert not records(tmp_path)
    finally:
        server.kill()


def test_tune_and_doctor_show_what_was_found(
    tiny_model: Path, tmp_path: Path, own_cache: dict[str, Any]
) -> None:
    assert "not yet" in cllm("doctor", str(tiny_model), **own_cache).stdout
    page = tmp_path / "page.html"
    arguments = (str(tiny_model), "--parallel", "2", "--ctx-size", "2048", "--threads", "1")
    done = cllm("tune", *arguments, "--budget-s", "2", "--kv-types", "--html", str(page), **own_cache)
    assert done.returncode == 0, done.stderr
    for word in ("flash attention", "KV layout", "batch tokens", "poll", "K/V types", "perplexity", "█", "●"):
        assert word in done.stdout, done.stdout
    assert "flash attention" in page.read_text() and "█" in page.read_text()
    (file,) = records(tmp_path)
    found = {**json.loads(file.read_text()), "provisional": ""}
    file.write_text(json.dumps(found))
    again = cllm("tune", *arguments, **own_cache)
    assert "remembered" in again.stderr and "flash attention" in again.stdout
    seen = cllm("doctor", str(tiny_model), **own_cache)
    assert seen.returncode == 0 and "tuned" in seen.stdout and "█" in seen.stdout
