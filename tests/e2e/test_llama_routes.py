"""Scripts written for llama-server run unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cllm.testing import say
from tests.driver.server import Server, StartServer, make_client, parse_events, wait_for

LLAMA = ("from cllm.cli.main import main; main()", "llama-server")
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
FIELDS = {  # of an answer of /completion
    *("index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated"),
    *("generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word"),
    *("tokens_cached", "timings"),
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
        f"--metrics --props --api-key-file {keys} --cors-origins localhost --lora none.gguf --jinja -fa on "
        "--host 127.0.0.1"
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
    assert set(answer) == FIELDS
    assert timings["predicted_n"] == 8 and answer["tokens"] == []
    assert (
        answer["prompt"] == "The capital of France is" and answer["generation_settings"]["temperature"] == 0
    )
    assert timings["prompt_ms"] > 0 and timings["predicted_ms"] > 0 and timings["predicted_per_second"] > 0


def test_tokens_and_text_are_the_same_prompt(tiny: Server) -> None:
    tokens = tiny.post("/tokenize", {"content": "1+1="}).json()["tokens"]
    assert completion(tiny, tokens)["content"] == completion(tiny, "1+1=")["content"]
    assert tiny.post("/detokenize", {"tokens": tokens}).json() == {"content": "1+1="}


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


def test_a_stream_ends_with_a_stop_event(tiny: Server) -> None:
    body = {"prompt": "1+1=", "n_predict": 5, "temperature": 0, "stream": True}
    pieces = stream(tiny, "/completion", body)
    assert "".join(piece["content"] for piece in pieces) == completion(tiny, "1+1=", 5)["content"]
    assert [piece["stop"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert set(pieces[-1]) == FIELDS and (pieces[-1]["content"], pieces[-1]["tokens"]) == ("", [])
    assert sum(len(piece["tokens"]) for piece in pieces) == 5 == pieces[-1]["tokens_predicted"]


def test_the_template_props_and_slots_are_shown(embedded: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    prompt = embedded.post("/apply-template", body).json()["prompt"]
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert embedded.get("/props")["total_slots"] == 8
    assert [slot["is_processing"] for slot in embedded.get("/slots")] == [False] * 8


def test_what_a_completion_may_be_asked_for(tiny: Server) -> None:
    answer = completion(tiny, "1+1=", 3, return_tokens=True, response_fields=["tokens", "timings/prompt_n"])
    assert set(answer) == {"tokens", "timings/prompt_n"} and len(answer["tokens"]) == 3
    text = "Once upon a time there was a king who had three daughters. " * 4
    warmed = completion(tiny, text, 0)
    assert (warmed["content"], warmed["tokens_predicted"], warmed["stop_type"]) == ("", 0, "limit")
    assert completion(tiny, text, 1)["timings"]["cache_n"] > 0
    assert completion(tiny, "1+1=", 1)["timings"]["predicted_per_second"] == 0.0
    letter = completion(tiny, "1+1=", 4, regex="[a-z]")["content"]
    banned = completion(tiny, "1+1=", 4, regex="[a-z]", logit_bias=[[letter, False]])["content"]
    assert len(letter) == len(banned) == 1 and letter != banned
    assert completion(tiny, "1+1=", 4, grammar="", stop=[""], seed=-7, samplers=["top_k"])["content"]


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


def test_probabilities_after_sampling(tiny: Server) -> None:
    answer = completion(tiny, "1+1=", 2, n_probs=3, post_sampling_probs=True)
    assert len(answer["completion_probabilities"]) == 2
    for entry in answer["completion_probabilities"]:
        assert entry["prob"] == 1.0 and [each["prob"] for each in entry["top_probs"]] == [1.0]


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


def test_tokens_with_their_texts(embedded: Server) -> None:
    end = embedded.get("/props")["eos_token"]
    body = {"content": [f"é{end}", 33], "with_pieces": True}
    tokens = embedded.post("/tokenize", body).json()["tokens"]
    number = embedded.post("/detokenize", {"tokens": [33]}).json()["content"]
    assert [token["piece"] for token in tokens][-2:] == [end, number]
    assert embedded.post("/detokenize", {"tokens": [tokens[-2]["id"]]}).json() == {"content": end}
    assert embedded.post("/tokenize", {}).json() == {"tokens": []}
    assert embedded.post("/detokenize", {}).json() == {"content": ""}


def test_errors_have_its_shape(embedded: Server) -> None:
    wrong = embedded.post("/completion", {"prompt": "x", "n_predict": "many"})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["code"] == 400 and wrong.json()["error"]["type"] == "invalid_request_error"
    long = embedded.post("/completion", {"prompt": [1] * 5000}).json()["error"]
    assert long["type"] == "exceed_context_size_error"
    assert (long["n_prompt_tokens"], long["n_ctx"]) == (5000, 4096)


def test_routes_without_v1(embedded: Server) -> None:
    assert embedded.post("/chat/completions", CHAT).json()["object"] == "chat.completion"
    assert (
        embedded.post("/responses", {"input": "Hi", "max_output_tokens": 16}).json()["object"] == "response"
    )
    counts = [
        embedded.post(path, {"messages": CHAT["messages"], "input": "Hi"}).json()["input_tokens"]
        for path in ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens")
    ]
    assert counts[0] == counts[1] > 1
    assert embedded.post("/responses/input_tokens", {"input": "Hi"}).json()["input_tokens"] == counts[0]
    assert embedded.get("/v1/health")["status"] == "ok"
    (model,) = embedded.get("/models")["data"]
    assert model["meta"]["n_ctx"] == 4096 and model["meta"]["n_vocab"] > 0
    assert embedded.get("/lora-adapters") == []
    assert embedded.post("/props", {}).status_code == 501
    assert embedded.post("/slots/0?action=save", {"filename": "x"}).status_code == 501


def test_the_command_line_says_what_a_request_leaves_out(llama: Server) -> None:
    first, second = (completion(llama, "abc", -1, temperature=None) for _ in range(2))
    assert first["content"] == second["content"] and first["tokens_predicted"] == 5
    settings = first["generation_settings"]
    assert (settings["temperature"], settings["seed"]) == (0, 3)
    assert completion(llama, "abc", 2)["tokens_predicted"] == 2
    props = llama.get("/props")
    assert props["model_alias"] == "tiny-one" == llama.get("/v1/models")["data"][0]["id"]
    assert props["default_generation_settings"]["params"]["n_predict"] == 5
    assert props["default_generation_settings"]["n_ctx"] == 2048 and props["total_slots"] == 4
    assert props["model_path"].endswith(".gguf") and props["modalities"]["vision"] is False
    assert (
        llama.post("/v1/chat/completions", {"messages": CHAT["messages"]}).json()["usage"][
            "completion_tokens"
        ]
        == 5
    )
    assert "ignored: --lora" in llama.log_text


def test_a_model_without_a_template_speaks_chatml(llama: Server) -> None:
    prompt = llama.post("/apply-template", {"messages": CHAT["messages"]}).json()["prompt"]
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_keys_and_origins(llama: Server) -> None:
    assert llama.client.get("/v1/health", headers={"Authorization": ""}).status_code == 200
    refused = llama.client.get("/props", headers={"Authorization": "Bearer wrong"})
    assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
    for origin, allowed in (("http://localhost:3000", True), ("http://elsewhere.example", False)):
        answer = llama.client.get("/v1/health", headers={"Origin": origin})
        assert (answer.headers.get("access-control-allow-origin") == origin) is allowed


def test_its_metrics(llama: Server) -> None:
    completion(llama, "abcdef", 4)
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
    erased = llama.post(f"/slots/{slot}?action=erase", {}).json()
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


def test_a_slot_that_computes_shows_its_request(scripted: Server) -> None:
    """750 tokens take the scripted model three seconds, however fast the machine is."""
    body = {"prompt": say("secret " * 107), "n_predict": 750, "stream": True}

    def find_busy() -> list[Any]:
        found = [slot for slot in scripted.get("/slots") if slot["is_processing"]]
        return [slot for slot in found if slot["next_token"][0]["n_decoded"] > 0]

    wait_for(scripted.idle)
    with make_client(base_url=scripted.url) as client, client.stream("POST", "/completion", json=body):
        (slot,) = wait_for(find_busy)
    assert slot["params"]["n_predict"] == 750 and "secret" not in json.dumps(slot)


def test_chats_have_its_timings_and_forms(llama: Server) -> None:
    whole = llama.post("/v1/chat/completions", CHAT).json()
    assert whole["system_fingerprint"].startswith("cllm-") and "__verbose" not in whole
    assert whole["timings"]["predicted_n"] == 3 and whole["timings"]["prompt_ms"] > 0
    *chunks, last = stream(llama, "/v1/chat/completions", CHAT)
    assert last["timings"]["predicted_n"] == 3 and not any("timings" in chunk for chunk in chunks)
    usage = {"stream_options": {"include_usage": True}}
    *_, before, last = stream(llama, "/v1/chat/completions", {**CHAT, **usage})
    assert "timings" in last and last["usage"]["completion_tokens"] == 3 and "timings" not in before
    asked = {"return_progress": True, "timings_per_token": True, "reasoning_format": "deepseek"}
    _, *chunks = stream(llama, "/chat/completions", {**CHAT, **asked})
    assert chunks[0]["prompt_progress"]["total"] == whole["usage"]["prompt_tokens"]
    timed = [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk]
    assert timed[-1] == 3 and "timings" in chunks[-1] and "prompt_progress" not in chunks[-1]
    verbose = llama.post("/v1/chat/completions", {**CHAT, "verbose": True}).json()["__verbose"]
    assert (
        verbose["prompt"].endswith("<|im_start|>assistant\n")
        and verbose["generation_settings"]["n_predict"] == 3
    )
    for path, body in (("/v1/completions", {"prompt": "abc", "max_tokens": 2}),):
        assert llama.post(path, body).json()["timings"]["predicted_n"] == 2
        assert stream(llama, path, body)[-1]["timings"]["predicted_n"] == 2


def test_a_json_object_may_have_a_schema(embedded: Server) -> None:
    closed = {"required": ["a"], "additionalProperties": False}  # the model cannot go on with other keys
    schema = {"type": "object", "properties": {"a": {"const": 7}}, **closed}
    form = {"response_format": {"type": "json_object", "schema": schema}, "max_tokens": 16}
    answer = embedded.post("/chat/completions", {**CHAT, **form}).json()
    assert json.loads(answer["choices"][0]["message"]["content"])["a"] == 7


def test_a_template_without_the_opening_of_the_answer(embedded: Server) -> None:
    body = {"messages": CHAT["messages"], "add_generation_prompt": False}
    assert embedded.post("/apply-template", body).json()["prompt"].endswith("Hi<|im_end|>\n")


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
