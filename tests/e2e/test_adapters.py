"""LoRA adapters over HTTP: by name on every API, by id as llama-server has it, loaded and unloaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cllm import LLM
from tests.driver.http import refusal
from tests.driver.same_text import EXACT
from tests.driver.server import Server, StartServer, cllm, stream_text, wait_for
from tests.tiny_models import make_adapter, make_dense

PROMPT = "The ship sails at"
TOKENS = 12
INVOCATION = (60, 60, 62)  # "<<>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_dense(folder / "base.gguf")
    for seed, name in enumerate(("red", "blue", "late"), 1):
        make_adapter(folder / f"{name}.gguf", seed=seed)
    make_adapter(folder / "alora.gguf", seed=9, invocation=INVOCATION)
    make_adapter(folder / "foreign.gguf", architecture="qwen2")
    return folder


def arguments(folder: Path) -> tuple[str, ...]:
    adapters = ("--adapter", f"red={folder / 'red.gguf'}", "--adapter", f"blue={folder / 'blue.gguf'}:0.5")
    return (str(folder / "base.gguf"), "--parallel", "4", "--model-dir", str(folder), *adapters, *EXACT)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("log") / "log", *arguments(folder)) as server:
        yield server


def say(server: Server, model: str = "base", prompt: str = PROMPT, **fields: Any) -> str:
    text: str = server.generate(prompt, TOKENS, model=model, temperature=0, **fields)["text"]
    return text


def delete(server: Server, name: str) -> httpx.Response:
    return httpx.delete(f"{server.url}/admin/adapters/{name}", timeout=60)


def load(server: Server, name: str, file: str, **fields: Any) -> httpx.Response:
    return server.post("/admin/adapters", {"name": name, "file": file, **fields})


def test_a_name_after_the_model_chooses_an_adapter(server: Server) -> None:
    texts = [say(server, model) for model in ("base", "base:red", "base:blue")]
    assert len(set(texts)) == 3
    assert say(server, "anything:red") == texts[1]
    assert say(server, "qwen3:8b") == say(server, "base:latest") == texts[0]


@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        ("/v1/completions", {"prompt": PROMPT}, lambda found: found["choices"][0]["text"]),
        ("/completion", {"prompt": PROMPT, "n_predict": TOKENS}, lambda found: found["content"]),
        (
            "/api/generate",
            {
                "prompt": PROMPT,
                "raw": True,
                "stream": False,
                "options": {"num_predict": TOKENS, "temperature": 0},
            },
            lambda found: found["response"],
        ),
    ],
)
def test_every_api_knows_adapters(server: Server, path: str, body: dict[str, Any], read: Any) -> None:
    for model in ("base", "base:red"):
        given = {"model": model, "max_tokens": TOKENS, "temperature": 0, **body}
        answer = server.post(path, given)
        assert answer.status_code == 200, answer.text
        assert read(answer.json()) == say(server, model)


def test_chats_know_adapters(server: Server) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    common = {"messages": messages, "max_tokens": TOKENS, "temperature": 0}

    def ask(path: str, model: str) -> str:
        answer = server.post(path, {**common, "model": model}).json()
        return str(answer["choices"][0]["message"] if "choices" in answer else answer["content"])

    for path in ("/v1/chat/completions", "/v1/messages"):
        assert ask(path, "base:red") != ask(path, "base")


def test_an_unknown_adapter_of_the_model_is_not_found(server: Server) -> None:
    answer = server.post("/generate", {"model": "base:green", "prompt": PROMPT})
    assert "base has no adapter 'green'; choose one of: base:red, base:blue" in refusal(answer, 404)


def test_models_lists_adapters_with_their_parent(server: Server) -> None:
    listed = server.get("/v1/models")["data"]
    assert [(model["id"], model.get("parent")) for model in listed] == [
        ("base", None),
        ("base:red", "base"),
        ("base:blue", "base"),
    ]
    one = server.get("/v1/models/base:red")
    assert (one["id"], one["parent"]) == ("base:red", "base") and "parent" not in server.get(
        "/v1/models/base"
    )
    names = [model["name"] for model in server.get("/api/tags")["models"]]
    assert names == ["base:latest", "base:red", "base:blue"]


def test_lora_chooses_by_id_and_scale(server: Server) -> None:
    assert say(server, lora=[{"id": 0, "scale": 1.0}]) == say(server, "base:red")
    assert say(server, lora=[{"id": 1, "scale": 0.5}]) == say(server, "base:blue")
    assert say(server, "base:red", lora=[]) == say(server)
    both = say(server, lora=[{"id": 0, "scale": 1.0}, {"id": 1, "scale": 0.5}])
    assert both not in (say(server), say(server, "base:red"), say(server, "base:blue"))
    answer = server.post("/completion", {"prompt": PROMPT, "lora": [{"id": 7, "scale": 1}]})
    assert "lora: there is no adapter 7" in refusal(answer)


def test_llama_servers_route_sets_scales_for_all(server: Server) -> None:
    alone = say(server)
    shown = [(each["id"], each["path"], each["scale"]) for each in server.get("/lora-adapters")]
    assert shown == [(0, "red.gguf", 0.0), (1, "blue.gguf", 0.0)]
    try:
        assert server.post("/lora-adapters", [{"id": 0, "scale": 1}]).json() == {"success": True}
        assert say(server) == say(server, "base:red") != alone
        assert say(server, lora=[]) == alone
        assert "there is no adapter 9" in refusal(server.post("/lora-adapters", [{"id": 9, "scale": 1}]))
    finally:
        server.post("/lora-adapters", [])
    assert say(server) == alone


def test_an_adapter_is_loaded_and_unloaded_while_it_serves(server: Server) -> None:
    before = say(server)
    loaded = load(server, "late", "late.gguf", scale=0.5).json()
    assert (loaded["name"], loaded["model"], loaded["scale"]) == ("late", "base", 0.5)
    assert loaded in server.get("/admin/adapters")["adapters"]
    assert server.metrics()["cllm_memory_bytes{part=adapters}"] > 0
    assert say(server, "base:late") != before
    assert "there is an adapter late" in refusal(load(server, "late", "red.gguf"), 409)
    assert delete(server, "late").status_code == 200
    assert "choose one of" in refusal(server.post("/generate", {"model": "base:late", "prompt": "x"}), 404)
    assert "no adapter 'late' is loaded" in refusal(delete(server, "late"), 404)
    assert say(server) == before


def test_an_adapter_in_use_is_not_unloaded(server: Server) -> None:
    load(server, "late", "late.gguf").raise_for_status()
    expected = server.generate(PROMPT, 900, model="base:late", temperature=0)["text"]
    with server.open_stream(PROMPT, 900, model="base:late", temperature=0, cache_prompt=False) as events:
        seen = [next(events)]
        assert "adapter late has 1 requests" in refusal(delete(server, "late"), 409)
        seen += list(events)
    assert stream_text(seen) == expected
    wait_for(server.idle)
    assert delete(server, "late").status_code == 200


def test_files_that_do_not_suit_are_refused(server: Server, folder: Path) -> None:
    foreign, model = (load(server, "x", f"{name}.gguf") for name in ("foreign", "base"))
    assert foreign.status_code == model.status_code == 400
    assert "foreign.gguf is for 'qwen2', and this model is llama" in foreign.json()["message"]
    assert "is no LoRA adapter" in model.json()["message"] and str(folder) not in model.text
    assert "not a file in --model-dir" in refusal(load(server, "x", "../x.gguf"), 403)
    assert "name" in refusal(load(server, "a b", "late.gguf"))


def test_embeddings_are_of_the_base(server: Server) -> None:
    answer = server.post("/v1/embeddings", {"model": "base:red", "input": "x"})
    assert "embeddings are computed without adapters" in refusal(answer)


def test_answers_under_mixed_load_are_those_alone(server: Server) -> None:
    models = ("base", "base:red", "base:blue")
    asked = [(models[number % 3], f"{number // 6} {PROMPT}") for number in range(36)]
    alone = [say(server, *each, cache_prompt=False) for each in asked]
    with ThreadPoolExecutor(12) as pool:
        assert [*pool.map(lambda each: say(server, *each), asked)] == alone


def test_loads_and_unloads_do_not_disturb_a_stream(server: Server) -> None:
    expected = server.generate(PROMPT, 600, model="base:red", temperature=0)["text"]
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(server.generate, PROMPT, 600, model="base:red", temperature=0)
        for _ in range(10):
            load(server, "late", "late.gguf").raise_for_status()
            assert delete(server, "late").status_code == 200
        assert stream.result()["text"] == expected


def test_adapters_survive_a_crash_of_the_engine(start: StartServer, folder: Path) -> None:
    server = start(*arguments(folder))
    server.expect_failure("the engine died|ended by signal|crash")
    load(server, "late", "late.gguf").raise_for_status()
    expected = server.generate(PROMPT, 600, model="base:late", temperature=0)["text"]
    with server.open_stream(PROMPT, 600, model="base:late", temperature=0, cache_prompt=False) as events:
        seen = [next(events)]
        server.kill_worker("engine")
        seen += list(events)
    assert stream_text(seen) == expected


def test_a_file_that_changed_is_gone_after_a_crash(start: StartServer, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "models")
    server = start(*arguments(tmp_path / "models"))
    server.expect_failure("the engine died|ended by signal|crash|is not loaded any more")
    shutil.copy(folder / "blue.gguf", tmp_path / "models" / "red.gguf")
    server.kill_worker("engine")
    wait_for(lambda: len(server.get("/v1/models")["data"]) == 2 or None)
    assert "red.gguf has changed since it was loaded" in server.log_text


def test_an_alora_shares_the_prefix_of_the_base(server: Server) -> None:
    load(server, "alora", "alora.gguf").raise_for_status()
    prefix = "What stands before the invocation is computed once for all adapters. "
    say(server, prompt=prefix + "So it is.")
    data = server.generate(f"{prefix}<<>{PROMPT}", TOKENS, model="base:alora", temperature=0)
    assert data["usage"]["cached_tokens"] >= len(prefix) // 3
    again = say(server, "base:alora", f"{prefix}<<>{PROMPT}", cache_prompt=False)
    assert data["text"] == again != say(server, prompt=f"{prefix}<<>{PROMPT}")
    assert say(server, "base:alora", prefix) == say(server, prompt=prefix)
    assert delete(server, "alora").status_code == 200


def test_a_wrong_adapter_ends_the_start(folder: Path) -> None:
    wrong = cllm(
        "serve", str(folder / "base.gguf"), "--adapter", f"x={folder / 'foreign.gguf'}", "--port", "0"
    )
    assert wrong.returncode != 0 and "foreign.gguf is for 'qwen2'" in wrong.stderr
    unnamed = cllm("serve", str(folder / "base.gguf"), "--adapter", str(folder / "red.gguf"), "--port", "0")
    assert unnamed.returncode == 2 and "write NAME=FILE or NAME=FILE:SCALE" in unnamed.stderr


def test_llm_generates_with_an_adapter(folder: Path, server: Server) -> None:
    settings = {"parallel": 2, "ctx_size": 1024, "flash_attention": False, "threads": 1}
    with LLM(folder / "base.gguf", adapters={"red": folder / "red.gguf"}, **settings) as llm:
        (base,) = llm.generate([PROMPT], max_tokens=TOKENS, temperature=0)
        (red,) = llm.generate([PROMPT], max_tokens=TOKENS, temperature=0, adapter="red")
        assert base.text != red.text
        assert llm.chat(PROMPT, max_tokens=4, temperature=0, adapter="red").text
        with pytest.raises(Exception, match="no adapter 'green' is loaded"):
            llm.generate([PROMPT], adapter="green")
