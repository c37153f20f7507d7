"""Over HTTP: log-probabilities of prompts, answers of no tokens, least lengths, stop tokens, predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cllm import LLM
from tests.driver.server import Server

PROMPT = "Once upon a time"


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", {"prompt": PROMPT, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def get_tokens(server: Server, count: int) -> list[int]:
    """The tokens of the answer."""
    asked = {"prompt": PROMPT, "n_predict": count, "temperature": 0, "return_tokens": True}
    tokens: list[int] = server.post("/completion", asked).json()["tokens"]
    assert len(tokens) == count
    return tokens


def test_echoed_prompts_have_logprobs(tiny: Server) -> None:
    """As lm-eval asks for them: what a prompt scores is what its text scored when it was generated."""
    plain = complete(tiny, max_tokens=12, logprobs=2)["choices"][0]
    tokens = tiny.post("/encode", {"text": PROMPT}).json()["tokens"]
    answer = get_tokens(tiny, 12)
    for given in ([*tokens, *answer], [[*tokens, *answer]]):
        for max_tokens in (0, 1):
            echoed = complete(tiny, prompt=given, max_tokens=max_tokens, logprobs=2, echo=True)["choices"][0]
            found = echoed["logprobs"]
            size = len(tokens) + len(answer)
            assert {len(column) for column in found.values()} == {size + max_tokens}
            assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
            own = slice(len(tokens), size)
            assert found["token_logprobs"][own] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=0.1)
            best = [max(top.values()) for top in found["top_logprobs"][1:]]
            assert best[len(tokens) - 1 :] == found["token_logprobs"][len(tokens) :], "it was greedy"
            assert all(0 < len(top) <= 2 for top in found["top_logprobs"][1:])
            assert "".join(found["tokens"]) == echoed["text"]
            for text, begin in zip(found["tokens"], found["text_offset"], strict=True):
                assert echoed["text"][begin : begin + len(text)] == text
            assert echoed["finish_reason"] == "length"


def test_scores_equal_those_of_the_python_api(tiny: Server, tiny_model: Path) -> None:
    """Asked for as lm-eval does, which also tokenises with the server."""
    info = tiny.get("/tokenizer_info")
    assert info["eos_token"] == tiny.get("/props")["eos_token"] and "chat_template" in info
    texts = [f"{PROMPT}{more}" for more in (" there was", ", the end", " a")]
    asked = [{"prompt": text, "add_special_tokens": False} for text in texts]
    prompts = [tiny.post("/tokenize", each).json()["tokens"] for each in asked]
    choices = complete(tiny, prompt=prompts, max_tokens=1, logprobs=1, echo=True, seed=1234)["choices"]
    exact = {"flash_attention": False, "cache_type_k": "f32", "cache_type_v": "f32"}
    with LLM(tiny_model, parallel=4, ctx_size=2048, threads=1, **exact) as llm:
        completions = llm.generate(texts, max_tokens=1, prompt_logprobs=0)
    for choice, completion, prompt in zip(choices, completions, prompts, strict=True):
        scored = completion.prompt_logprobs
        assert [entry.token for entry in scored] == prompt
        expected = [entry.logprob for entry in scored[1:]]
        assert choice["logprobs"]["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)


def test_a_stream_has_the_same_logprobs(tiny: Server) -> None:
    asked = {"echo": True, "logprobs": 1, "max_tokens": 3, "n": 2, "seed": 3, "prompt_logprobs": 1}
    whole = complete(tiny, **asked)["choices"]
    joined: list[dict[str, Any]] = [{"text": "", "logprobs": {}} for _ in whole]
    stream = tiny.post("/v1/completions", {"prompt": PROMPT, "temperature": 0, "stream": True, **asked})
    for line in stream.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            one = joined[choice["index"]]
            one["text"] += choice["text"]
            for name, column in (choice["logprobs"] or {}).items():
                one["logprobs"].setdefault(name, []).extend(column)
            one["prompt_logprobs"] = choice.get("prompt_logprobs") or one.get("prompt_logprobs")
    for one, expected in zip(joined, whole, strict=True):
        assert_near(one, {name: expected[name] for name in one})


def assert_near(found: Any, expected: Any) -> None:
    """The same, but for rounding: whether both choices were in one step is a matter of time."""
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        for name in found:
            assert_near(found[name], expected[name])
    elif isinstance(found, list):
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other)
    else:
        assert found == (pytest.approx(expected, abs=1e-3) if isinstance(found, float) else expected)


def test_prompt_logprobs_by_token_id(tiny: Server) -> None:
    tokens = tiny.post("/encode", {"text": PROMPT}).json()["tokens"]
    choice = complete(tiny, max_tokens=1, prompt_logprobs=2)["choices"][0]
    first, *scored = choice["prompt_logprobs"]
    assert first is None and len(scored) == len(tokens) - 1 and choice["logprobs"] is None
    for entry, token in zip(scored, tokens[1:], strict=True):
        assert 2 <= len(entry) <= 3
        ranks = {found["rank"]: found["logprob"] for found in entry.values()}
        assert ranks[1] >= ranks[2] >= entry[str(token)]["logprob"] or entry[str(token)]["rank"] in (1, 2)
    assert "prompt_logprobs" not in complete(tiny, max_tokens=1)["choices"][0]


def test_stop_tokens_and_least_lengths(tiny: Server) -> None:
    answer = get_tokens(tiny, 8)
    stop = answer[3]
    first = answer.index(stop)
    stopped = complete(tiny, max_tokens=8, stop_token_ids=[stop])
    assert stopped["usage"]["completion_tokens"] == first
    assert stopped["choices"][0]["finish_reason"] == "stop"
    later = complete(tiny, max_tokens=8, stop_token_ids=[stop], min_tokens=6)
    assert later["usage"]["completion_tokens"] >= 6
    refused = tiny.post("/v1/completions", {"prompt": PROMPT, "stop_token_ids": [10**6]})
    assert refused.status_code == 400 and "stop_token_ids" in refused.json()["error"]["message"]


def test_a_prediction_is_counted(tiny: Server) -> None:
    asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32, "temperature": 0}
    plain = tiny.post("/v1/chat/completions", asked).json()
    text = plain["choices"][0]["message"]["content"]
    parts = [{"type": "text", "text": text}]
    for content in (text, parts):
        fields = {**asked, "prediction": {"type": "content", "content": content}}
        answer = tiny.post("/v1/chat/completions", fields).json()
        assert answer["choices"][0]["message"]["content"] == text
        details = answer["usage"]["completion_tokens_details"]
        assert details.keys() == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    assert "completion_tokens_details" not in plain["usage"]
