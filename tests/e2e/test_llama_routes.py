"""Scripts written for llama-server run unchanged."""

from __future__ import annotations

from typing import Any

from tests.driver.server import Server, parse_events


def completion(server: Server, prompt: Any, n_predict: int = 8, **fields: Any) -> dict[str, Any]:
    answer = server.post(
        "/completion", {"prompt": prompt, "n_predict": n_predict, "temperature": 0, **fields}
    )
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_completion_has_its_fields_and_equals_the_native_route(embedded: Server) -> None:
    answer = completion(embedded, "The capital of France is")
    assert answer["content"] == embedded.generate("The capital of France is", 8, temperature=0)["text"]
    assert (answer["stop"], answer["stop_type"], answer["tokens_predicted"]) == (True, "limit", 8)
    timings = answer["timings"]
    assert timings["predicted_n"] == 8 and len(answer["tokens"]) == 8
    assert timings["prompt_ms"] > 0 and timings["predicted_ms"] > 0 and timings["predicted_per_second"] > 0


def test_tokens_and_text_are_the_same_prompt(embedded: Server) -> None:
    tokens = embedded.post("/tokenize", {"content": "1+1="}).json()["tokens"]
    assert completion(embedded, tokens)["content"] == completion(embedded, "1+1=")["content"]
    assert embedded.post("/detokenize", {"tokens": tokens}).json() == {"content": "1+1="}


def test_control_tokens_are_parsed_in_raw_prompts_as_llama_server_does(embedded: Server) -> None:
    body = {"content": "<|im_end|>"}
    assert len(embedded.post("/tokenize", body).json()["tokens"]) == 1
    assert len(embedded.post("/tokenize", {**body, "parse_special": False}).json()["tokens"]) > 1


def test_minus_one_means_no_limit_and_a_stop_word_ends_it(embedded: Server) -> None:
    answer = completion(embedded, "Count: 1, 2, 3, 4,", -1, stop=[" 9"], ignore_eos=True)
    assert answer["stop_type"] == "word" and answer["stopping_word"] == " 9"
    assert " 9" not in answer["content"]


def test_probabilities_come_when_asked_for(embedded: Server) -> None:
    answer = completion(embedded, "1+1=", 3, n_probs=2)
    assert [len(entry["top_logprobs"]) for entry in answer["completion_probabilities"]] == [2, 2, 2]


def test_a_stream_ends_with_a_stop_event(embedded: Server) -> None:
    body = {"prompt": "1+1=", "n_predict": 5, "temperature": 0, "stream": True}
    with embedded.client.stream("POST", "/completion", json=body) as answer:
        pieces = list(parse_events(answer.iter_lines()))
    assert "".join(piece["content"] for piece in pieces) == completion(embedded, "1+1=", 5)["content"]
    assert [piece["stop"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_the_template_props_and_slots_are_shown(embedded: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    prompt = embedded.post("/apply-template", body).json()["prompt"]
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert embedded.get("/props")["total_slots"] == 8
    assert [slot["is_processing"] for slot in embedded.get("/slots")] == [False] * 8
