"""The disk tier over HTTP: a server that is started again has what the one before it computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.driver.server import Server, StartServer, wait_for

PROMPT = "a long prefix that is worth keeping, " * 20


def complete(server: Server, prompt: str = PROMPT) -> tuple[str, int]:
    """The text, and how many tokens of the prompt came from the cache."""
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0}
    answer: dict[str, Any] = server.post("/v1/completions", body).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_what_was_computed_comes_back_after_a_restart(
    start: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    arguments = (str(tiny_model), "--threads", "1", "--cache-dir", str(tmp_path), "--cache-disk-mb", "64")
    server = start(*arguments)
    text, cached = complete(server)
    assert cached == 0
    server.stop()
    (path,) = tmp_path.glob("kv/*/*")
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    server = start(*arguments)
    again, cached = complete(server)
    assert again == text and cached > 64
    assert server.metrics()["cllm_prefix_disk_loads_total"] == 1
    assert PROMPT not in server.log_text and str(tmp_path) not in server.log_text

    # What was written behind outlives the engine process.
    complete(server, "another " * 90)
    wait_for(lambda: len(list(tmp_path.glob("kv/*/*.kv"))) == 2)
    server.kill_worker("engine")
    wait_for(lambda: "disk cache: 2 prefixes" in server.log_text)
    wait_for(lambda: server.client.get("/ready").status_code == 200)
    assert complete(server, "another " * 90)[1] > 64

    server.post("/admin/cache/clear", {})
    assert list(tmp_path.glob("kv/*/*")) == []
    assert complete(server) == (text, 0)
    server.stop()
