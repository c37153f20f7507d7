"""Ollama's bodies: durations, options, formats, names."""

from __future__ import annotations

from typing import Any

import pytest

from cllm.errors import InvalidRequest
from cllm.server.dialects.ollama_body import OllamaChatBody, add_tag, strip_tag

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> OllamaChatBody:
    return OllamaChatBody.parse({"model": "m", "messages": MESSAGES, **fields})


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(0, 0), (300, 300), (-1, -1), ("5m", 300), ("1h30m", 5400), ("250ms", 0.25), ("-1s", -1), ("0", 0)],
)
def test_keep_alive_is_seconds_or_a_duration(given: float | str, seconds: float) -> None:
    assert chat(keep_alive=given).keep_alive == seconds


@pytest.mark.parametrize("given", ["soon", "5", "5x", "m", True, [], "1h 30m"])
def test_another_keep_alive_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest):
        chat(keep_alive=given)


def test_options_have_ollamas_names() -> None:
    options = chat(
        options={"num_predict": 5, "repeat_penalty": 1.2, "repeat_last_n": 9, "num_ctx": 8192, "stop": "x"}
    ).options
    sampling = options.sampling(100)
    assert (options.max_tokens, options.stop) == (5, "x")
    assert (sampling.repetition_penalty, sampling.penalty_last_n) == (1.2, 9)
    assert chat(options={"num_predict": -1}).options.max_tokens is None


def test_defaults_of_the_server_are_beneath_the_options() -> None:
    options = chat(temperature=0.1, max_tokens=7, options={"temperature": 0.2}).options
    assert (options.sampling(100).temperature, options.max_tokens) == (0.2, 7)


@pytest.mark.parametrize(
    ("given", "schema"),
    [("json", {"type": "object"}), ({"type": "array"}, {"type": "array"}), ("", None), (None, None)],
)
def test_the_format_is_a_constraint(given: Any, schema: Any) -> None:
    assert chat(format=given).options.form_schema() == schema
    assert (chat(format=given).options.constraint() is None) is (schema is None)
    assert chat().options.form_schema() is None, "it is of one body only"


def test_messages_are_those_of_a_conversation() -> None:
    body = chat(
        messages=[
            *MESSAGES,
            {
                "role": "assistant",
                "content": "",
                "thinking": "hm",
                "tool_calls": [{"function": {"name": "now", "arguments": {"zone": "UTC"}}}],
            },
            {"role": "tool", "content": "noon", "tool_name": "now"},
        ],
        think="high",
    )
    conversation = body.conversation()
    assert conversation.messages[1]["reasoning_content"] == "hm"
    assert conversation.messages[1]["tool_calls"][0]["function"] == {
        "name": "now",
        "arguments": '{"zone": "UTC"}',
    }
    assert conversation.messages[2]["name"] == "now"
    assert conversation.options == {"enable_thinking": True, "reasoning_effort": "high"}
    assert not chat(think=False).conversation().think


def test_tags() -> None:
    assert strip_tag("a:latest") == strip_tag("a") == "a" and strip_tag("a:Q4") == "a:Q4"
    assert add_tag("a") == "a:latest" and add_tag("hf:a/b:Q4") == "hf:a/b:Q4"
