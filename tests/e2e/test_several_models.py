"""Several models in one server: loaded when asked for, swapped by memory, each in its own workers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.driver.http import refusal
from tests.driver.server import Server, find_workers, wait_for
from tests.tiny_models import make_dense, make_sliding_window

CONFIG = """
[models.kept]
model = "{folder}/one.gguf"
aliases = ["first", "gpt-4o"]
keep = true
defaults = {{ max_tokens = 3 }}

[models.swapped]
model = "{folder}/two.gguf"
context = 256
slots = 3

[models.other]
model = "{folder}/three.gguf"

[models.huge]
model = "{folder}/one-copy.gguf"
ctx-size = 8000000
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    make_dense(folder / "one.gguf")
    make_sliding_window(folder / "two.gguf")
    make_dense(folder / "three.gguf", seed=3)
    shutil.copy(folder / "one.gguf", folder / "one-copy.gguf")
    file = folder / "cllm.toml"
    file.write_text(CONFIG.format(folder=folder))
    common = ("--threads", "1", "--parallel", "2", "--cache-ram-mb", "8", "--swap-space-mb", "8")
    limits = ("--ctx-size", "2048", "--models-memory-mb", "700")
    cache = ("--cache-disk-mb", "64", "--cache-dir", str(folder / "cache"))
    with Server(folder / "server.log", "--config", str(file), *common, *limits, *cache) as server:
        yield server


def status(server: Server) -> dict[str, Any]:
    return {model["name"]: model for model in server.get("/admin/models")["models"]}


def test_models_are_loaded_when_asked_for_and_swapped_by_memory(server: Server) -> None:
    before = server.generate("hello", 8, model="kept")["text"]
    assert status(server)["kept"]["state"] == "ready" and status(server)["other"]["state"] == "unloaded"
    assert len(find_workers(server.process.pid, "engine")) == 1
    prompt = "a prompt that is long enough to be worth a place in the cache, " * 2
    first = server.generate(prompt, 4, model="swapped")
    assert server.generate("hello", 8, model="oth")["text"] != before, "a beginning that no other has"
    answer = server.get("/admin/models")
    states = {model["name"]: model["state"] for model in answer["models"]}
    assert states == {"kept": "ready", "swapped": "unloaded", "other": "ready", "huge": "unloaded"}
    assert 0 < answer["memory_bytes"]["host"] <= answer["memory_limit_bytes"]["host"] == 700 << 20
    assert len(find_workers(server.process.pid, "engine")) == 2
    assert server.generate("hello", 8, model="FIRST")["text"] == before
    assert server.generate("hello", 8)["text"] == before, "without a name: the first"
    body = {"model": "gpt-4o", "prompt": "hello", "temperature": 0}
    completed = server.post("/v1/completions", body).json()
    assert completed["model"] == "gpt-4o" and completed["usage"]["completion_tokens"] == 3, "its own defaults"
    with ThreadPoolExecutor(4) as pool:
        again = list(pool.map(lambda _: server.generate(prompt, 4, model="swapped"), range(4)))
    assert {each["text"] for each in again} == {first["text"]}
    # A prefix of so small a model may be computed sooner than it is read; `proof/models.py` shows its use.
    assert re.search(r"disk cache: [1-9]\d* prefixes", server.log_text), "written at the unload"


def test_refusals_and_lists(server: Server) -> None:
    message = refusal(server.post("/generate", {"prompt": "x", "model": "none"}), 404)
    assert "'none' is not served here; choose one of: kept, swapped, other, huge" in message
    message = refusal(server.post("/generate", {"prompt": "x", "model": "huge"}), 507)
    assert "huge does not fit" in message and "MiB" in message
    listed = {model["id"]: model for model in server.get("/v1/models")["data"]}
    assert list(listed) == ["kept", "swapped", "other", "huge"]
    assert listed["kept"]["loaded"] and not listed["huge"]["loaded"]
    huge = listed["huge"]
    assert huge["meta"]["n_vocab"] == listed["kept"]["meta"]["n_vocab"]
    assert huge["meta"]["n_params"] == listed["kept"]["meta"]["n_params"]
    assert huge["max_model_len"] == huge["meta"]["n_ctx_train"] and "completion" in huge["capabilities"]
    assert huge["created"] > 1_600_000_000
    assert server.get("/v1/models/gpt-4o")["root"] == "kept"
    for path in ("/health", "/ready", "/debug/kv", "/slots"):
        assert server.client.get(path, params={"model": "kept"}).status_code == 200
        assert server.client.get(path, params={"model": "none"}).status_code == 404
    metrics = server.metrics()
    assert metrics["cllm_ready{model=kept}"] == 1
    assert metrics["cllm_requests_finished_total{model=kept,outcome=length}"] >= 1


def test_a_crash_of_one_engine_does_not_touch_another(server: Server) -> None:
    loaded = server.post("/admin/models/load", {"model": "swapped"}).json()
    assert loaded["state"] == "ready" and loaded["context"] == 256 and loaded["slots"] == 3
    assert loaded["memory_bytes"]["host"] > 0 and loaded["last_used"]
    with server.open_stream("hello", 400, model="kept") as events:
        next(events)
        server.kill_worker("engine")
        assert server.generate("hello", 4, model="swapped")["generated_tokens"] == 4
        assert list(events)[-1]["finish_reason"] == "length"
    metrics = server.metrics()
    restarts = [metrics[f"cllm_engine_restarts_total{{model={name}}}"] for name in ("kept", "swapped")]
    assert restarts == [0, 1]


def test_a_model_is_unloaded_by_hand_unless_a_request_needs_it(server: Server) -> None:
    with server.open_stream("hello", 1000, model="other") as events:
        next(events)
        assert "has 1 requests" in refusal(server.post("/admin/models/unload", {"model": "other"}), 409)
    wait_for(lambda: server.post("/admin/models/unload", {"model": "other"}).status_code == 200)
    assert status(server)["other"]["state"] == "unloaded"
