"""Scripts written for llama-server run unchanged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.driver.server import Server, StartServer, parse_events

LLAMA = ("from cllm.cli.main import main; main()", "llama-server")
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
FIELDS = {  # of an answer of /completion
    *("index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated"),
    *("generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word"),
    *("tokens_cached", "cached_from", "timings"),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    """The tiny model, which has no chat template, served by llama-server's command line."""
    folder = tmp_path_factory.mktemp("llama")
    saves, keys = folder / "saves", folder / "keys"
    saves.mkdir()
    keys.write_text("# ours\nother-key\n")
    words = (
        f"-m {tiny_model} -a tiny-one,other -c 2048 -t 1 -n 5 --temp 0 --seed 3 --slot-save-path {saves} "
        f"--metrics --props --api-key-file {keys} --cors-origins localhost --rpc none --jinja -fa on "
        "--host 127.0.0.1 -v -b 16 --tags small,fast"
    )
    with Server(folder / "log", *words.split(), program=LLAMA, CLLM_CACHE_DISK_MB="64") as server:
        server.client.headers["Authorization"] = "Bearer other-key"
        yield server


def stream(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, without the last mark of OpenAI's."""
    with server.client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = (line for line in answer.iter_lines() if line != "data: [DONE]" and not line.startswith(":"))
        return list(parse_events(lines))


def completion(server: Server, prompt: Any, n_predict: int = 8, **fields: Any) -> dict[str, Any]:
    answer = server.post(
        "/completion", {"prompt": prompt, "n_predict": n_predict, "temperature": 0, **fields}
    )
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_completion_has_its_fields_and_equals_the_native_route(tiny: Server) -> None:
    answer = completion(tiny, "The capital of France is")
    assert answer["content"] == tiny.generate("The capital of France is", 8, temperature=0)["text"]
    assert (answer["stop"], answer["stop_type"], answer["tokens_predicted"]) == (True, "limit", 8)
    timings = answer["timings"]
    assert set(answer) == FIELDS and all(isinstance(value, int | float) for value in timings.values())
    assert timings["predicted_n"] == 8 and answer["tokens"] == []
    assert (
        answer["prompt"] == "The capital of France is" and answer["generation_settings"]["temperature"] == 0
    )
    assert timings["prompt_ms"] > 0 and timings["predicted_ms"] > 0 and timings["predicted_per_second"] > 0


def test_control_tokens_are_parsed_in_raw_prompts_as_llama_server_does(embedded: Server) -> None:
    body = {"content": embedded.get("/props")["eos_token"]}
    assert len(embedded.post("/tokenize", body).json()["tokens"]) == 1
    assert len(embedded.post("/tokenize", {**body, "parse_special": False}).json()["tokens"]) > 1


def test_minus_one_means_no_limit_and_a_stop_word_ends_it(tiny: Server) -> None:
    text = completion(tiny, "Count: 1, 2, 3, 4,", 60)["content"]
    stop = text[-4:]
    answer = completion(tiny, "Count: 1, 2, 3, 4,", -1, stop=[stop])
    assert answer["stop_type"] == "word" and answer["stopping_word"] == stop
    assert answer["content"] == text[: text.index(stop)]


def test_biases_of_long_texts_reach_the_engine(tiny: Server) -> None:
    """They are few, and become more tokens than there may be entries: that was the end of two engines."""
    engine = tiny.child("engine")
    completion(tiny, "Hi", 2, logit_bias={str(number) + "x" * 100: 1.0 for number in range(20, 50)})
    assert tiny.child("engine") == engine


def test_several_prompts_are_several_answers(tiny: Server) -> None:
    tokens = tiny.post("/tokenize", {"content": "1+1="}).json()["tokens"]
    body = {"prompt": ["1+1=", tokens, ["1+", *tokens[2:]]], "n_predict": 3, "temperature": 0}
    answers = tiny.post("/completion", body).json()
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    assert len({answer["content"] for answer in answers}) == 1 and answers[1]["prompt"] == "1+1="
    events = stream(tiny, "/completion", body)
    assert sorted(event["index"] for event in events if event["stop"]) == [0, 1, 2]


def test_a_stream_has_one_token_an_event_where_probabilities_are_asked_for(tiny: Server) -> None:
    body = {"prompt": "a a a a a a a a", "n_predict": 12, "temperature": 0, "n_probs": 2}
    *pieces, last = stream(tiny, "/completion", body)
    assert [len(piece["tokens"]) for piece in pieces] == [1] * 12
    assert [len(piece["completion_probabilities"]) for piece in pieces] == [1] * 12
    assert "completion_probabilities" not in last
    whole = completion(tiny, "a a a a a a a a", 12, n_probs=2)
    assert "".join(piece["content"] for piece in pieces) == whole["content"]


def test_progress_and_timings_in_a_stream(llama: Server) -> None:
    body = {"prompt": "x " * 300, "n_predict": 2, "return_progress": True, "timings_per_token": True}
    events = stream(llama, "/completion", {**body, "cache_prompt": False})
    reports = [event for event in events if "prompt_progress" in event]
    pieces = [event for event in events if event not in reports]  # a busy reader gets both tokens in one
    assert events[: len(reports)] == reports, "they come before the first token"
    progress = reports[-1]["prompt_progress"]
    assert progress["processed"] == progress["total"] == reports[-1]["tokens_evaluated"] > 300
    assert pieces and all(piece["timings"]["prompt_ms"] > 0 for piece in pieces)


def test_a_line_that_is_indented_by_too_little_ends_it(tiny: Server) -> None:
    lines = {"regex": r"    a\n  b\n    c{200}"}
    whole = completion(tiny, "A poem:\n", 300, **lines)
    assert whole["content"].startswith("    a\n  b\n    ccc")
    answer = completion(tiny, "A poem:\n", 300, n_indent=4, **lines)
    assert answer["stop_type"] == "limit" and len(answer["content"]) < len("    a\n  b\n    ccc")


def test_the_command_line_says_what_a_request_leaves_out(llama: Server) -> None:
    first, second = (completion(llama, "abc", -1, temperature=None) for _ in range(2))
    assert first["content"] == second["content"] and first["tokens_predicted"] == 5
    settings = first["generation_settings"]
    assert (settings["temperature"], settings["seed"]) == (0, 3)
    assert completion(llama, "abc", 2)["tokens_predicted"] == 2
    props = llama.get("/props")
    (model,) = llama.get("/v1/models")["data"]
    assert props["model_alias"] == "tiny-one" == model["id"]
    assert (model["aliases"], model["tags"]) == (["tiny-one", "other"], ["small", "fast"])
    assert llama.get("/v1/models/other")["root"] == "tiny-one"
    assert props["default_generation_settings"]["params"]["n_predict"] == 5
    assert props["default_generation_settings"]["n_ctx"] == 2048 and props["total_slots"] == 4
    assert props["model_path"].endswith(".gguf") and props["modalities"]["vision"] is False
    assert (
        llama.post("/v1/chat/completions", {"messages": CHAT["messages"]}).json()["usage"][
            "completion_tokens"
        ]
        == 5
    )
    assert "ignored: --rpc" in llama.log_text


def test_a_model_without_a_template_speaks_chatml(llama: Server) -> None:
    prompt = llama.post("/apply-template", {"messages": CHAT["messages"]}).json()["prompt"]
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_chat_has_its_shape(llama: Server) -> None:
    whole = llama.post("/chat/completions", CHAT).json()
    assert whole["system_fingerprint"].startswith("b")
    assert whole["__verbose"]["prompt"].startswith("<|im_start|>user"), "--verbose"
    first, *_ = stream(llama, "/chat/completions", CHAT)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    first, *_ = stream(llama, "/v1/chat/completions", CHAT)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "__verbose" not in llama.post("/chat/completions", {**CHAT, "verbose": False}).json()


def test_keys_and_origins(llama: Server) -> None:
    assert llama.client.get("/v1/health", headers={"Authorization": ""}).status_code == 200
    refused = llama.client.get("/props", headers={"Authorization": "Bearer wrong"})
    assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
    for origin, allowed in (("http://localhost:3000", True), ("http://elsewhere.example", False)):
        answer = llama.client.get("/v1/health", headers={"Origin": origin})
        assert (answer.headers.get("access-control-allow-origin") == origin) is allowed


def test_its_metrics(llama: Server) -> None:
    completion(llama, "abcdef", 4)
    started = llama.client.get("/metrics").headers["Process-Start-Time-Unix"]
    assert 0 <= time.time() - int(started) < 3600
    found = llama.metrics()
    for name in ("prompt_tokens_total", "prompt_seconds_total", "tokens_predicted_total", "n_decode_total"):
        assert found[f"llamacpp:{name}"] > 0
    assert found["llamacpp:n_tokens_max"] >= 10 and found["llamacpp:requests_processing"] == 0
    assert {"llamacpp:predicted_tokens_seconds", "llamacpp:requests_deferred"} <= set(found)


def test_slots_are_saved_restored_and_erased(llama: Server) -> None:
    assert [slot["n_ctx"] for slot in llama.get("/slots")] == [2048] * 4
    prompt = "a slot of its own " * 8
    llama.post("/admin/cache/clear", {})
    completion(llama, prompt, 1)
    (held,) = llama.get("/debug/kv")["cached"]
    slot = held["seq_id"]
    saved = llama.post(f"/slots/{slot}?action=save", {"filename": "one.bin"}).json()
    assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (slot, "one.bin", held["tokens"])
    assert saved["n_written"] > 0 and saved["timings"]["save_ms"] >= 0
    erased = llama.client.post(f"/slots/{slot}?action=erase").json()
    assert erased == {"id_slot": slot, "n_erased": held["tokens"]}
    assert completion(llama, prompt, 1)["timings"]["cache_n"] == 0
    for number in range(4):
        llama.post(f"/slots/{number}?action=erase", {})
    restored = llama.post("/slots/0?action=restore", {"filename": "one.bin"}).json()
    assert restored["n_restored"] == saved["n_saved"] and restored["n_read"] == saved["n_written"]
    assert restored["timings"]["restore_ms"] >= 0
    assert completion(llama, prompt, 1)["timings"]["cache_n"] > 0
    for action, body in (("save", {"filename": "../x"}), ("wibble", {}), ("restore", {"filename": "none"})):
        assert llama.post(f"/slots/0?action={action}", body).status_code in (400, 404)
    assert llama.post("/slots/99?action=erase", {}).status_code == 400
    llama.post("/admin/cache/clear", {})
    assert llama.post("/slots/0?action=restore", {"filename": "one.bin"}).status_code == 404
    assert llama.post("/slots/0?action=save", {"filename": "one.bin"}).status_code == 400, "it is empty"
    assert llama.post("/props", {}).json() == {"success": True}


def test_several_addresses_and_a_vector_for_each_token(start: StartServer, tiny_model: Path) -> None:
    words = (
        f"-m {tiny_model} -t 1 -np 2 -c 512 --pooling none --host 127.0.0.1,127.0.0.2 --no-slots --embeddings"
    )
    server = start(*words.split(), program=LLAMA)
    other = f"http://127.0.0.2:{server.port}"
    assert httpx.get(f"{other}/health", trust_env=False).status_code == 200
    length = len(server.post("/tokenize", {"content": "abcd"}).json()["tokens"])
    inputs = [[65, 66, 67], [65, 66, 67, "abcd"], {"content": "abcd"}]
    vectors = server.post("/embedding", {"content": inputs}).json()
    assert [len(entry["embedding"]) for entry in vectors] == [3, 3 + length, length]
    assert len({len(vector) for entry in vectors for vector in entry["embedding"]}) == 1
    assert vectors[0]["embedding"][2] == pytest.approx(vectors[1]["embedding"][2], abs=1e-2)  # causal
    assert server.post("/v1/embeddings", {"input": "abc"}).status_code == 400
    closed = server.client.get("/slots")
    assert closed.status_code == 501 and closed.json()["error"]["type"] == "not_supported_error"
    server.stop()
