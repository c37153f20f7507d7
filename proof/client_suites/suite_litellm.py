"""LiteLLM: its three APIs (chat, responses, Anthropic's messages) on cllm, and its own errors."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any, Literal

import litellm
import pytest
from pydantic import BaseModel, Field

URL = os.environ["CLLM_URL"]
ASK = [{"role": "user", "content": "What is AI?"}]
SHARED: dict[str, Any] = {"api_key": "none", "max_tokens": 64, "temperature": 0, "num_retries": 0}
OPENAI: dict[str, Any] = {"model": "openai/cllm", "api_base": f"{URL}/v1", **SHARED}
ANTHROPIC: dict[str, Any] = {"model": "anthropic/cllm", "api_base": URL, **SHARED}
LLAMA: dict[str, Any] = {"model": "llamafile/cllm", "api_base": f"{URL}/v1", **SHARED}
VLLM: dict[str, Any] = {"model": "hosted_vllm/cllm", "api_base": f"{URL}/v1", **SHARED}
each_provider = pytest.mark.parametrize(
    "provider", [OPENAI, ANTHROPIC, LLAMA, VLLM], ids=["openai", "anthropic", "llamafile", "vllm"]
)
litellm.suppress_debug_info = True


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=-30, le=50)


TOOL = {
    "type": "function",
    "function": {"name": "Weather", "description": "Tell it.", "parameters": Weather.model_json_schema()},
}


@each_provider
def test_a_chat(provider: dict[str, Any]) -> None:
    whole = litellm.completion(messages=ASK, **provider)
    pieces = list(litellm.completion(messages=ASK, stream=True, **provider))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content != ""
    assert whole.usage.prompt_tokens > 5 and whole.usage.completion_tokens > 5


@each_provider
def test_a_chat_from_an_event_loop(provider: dict[str, Any]) -> None:
    answer = asyncio.run(litellm.acompletion(messages=ASK, **provider))
    assert answer.choices[0].message.content


@each_provider
def test_a_forced_call(provider: dict[str, Any]) -> None:
    fields = {"messages": ASK, "tools": [TOOL], "tool_choice": "required", **provider}
    call = litellm.completion(**fields).choices[0].message.tool_calls[0]
    assert call.function.name == "Weather" and Weather.model_validate_json(call.function.arguments)
    whole = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **fields)))
    assert Weather.model_validate_json(whole.choices[0].message.tool_calls[0].function.arguments)


@each_provider
def test_the_result_of_a_call_goes_back(provider: dict[str, Any]) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "Weather", "arguments": "{}"}}
    history = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = litellm.completion(messages=history, tools=[TOOL], **provider)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


@pytest.mark.parametrize("provider", [OPENAI, VLLM], ids=["openai", "vllm"])
def test_a_schema(provider: dict[str, Any]) -> None:
    answer = litellm.completion(messages=ASK, response_format=Weather, **provider)
    assert Weather.model_validate_json(answer.choices[0].message.content)


def test_responses() -> None:
    fields = {key: value for key, value in OPENAI.items() if key not in ("max_tokens", "num_retries")}
    answer = litellm.responses(input="What is AI?", max_output_tokens=32, **fields)
    assert answer.output[0].content[0].text
    events = [
        event.type for event in litellm.responses(input="Hi", stream=True, max_output_tokens=16, **fields)
    ]
    assert str(events[-1]).lower().endswith(("completed", "incomplete"))


def test_messages() -> None:
    fields = {key: value for key, value in ANTHROPIC.items() if key != "num_retries"}
    answer = asyncio.run(litellm.anthropic_messages(messages=ASK, **fields))
    content = answer["content"] if isinstance(answer, dict) else answer.content
    assert content


def test_several_answers_and_their_probabilities() -> None:
    fields = {**OPENAI, "n": 3, "seed": 3, "temperature": 1.5, "max_tokens": 5}
    answer = litellm.completion(messages=ASK, logprobs=True, top_logprobs=2, **fields)
    assert len(answer.choices) == 3 and len(answer.choices[2].logprobs.content[0].top_logprobs) == 2


def test_the_usage_of_a_stream() -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = litellm.completion(messages=ASK, **OPENAI, **options)
    assert last.usage.completion_tokens > 5


def test_a_text_completion() -> None:
    fields = {**OPENAI, "model": "text-completion-openai/cllm", "max_tokens": 8}
    assert litellm.text_completion(prompt="The capital of France is", **fields).choices[0].text


@pytest.mark.parametrize("provider", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
def test_an_overlong_prompt_is_known_as_one(provider: dict[str, Any]) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "hello " * 20_000}], **provider)


def test_a_bad_field_is_a_bad_request() -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=ASK, **{**OPENAI, "temperature": -1})


def test_reasoning_is_taken_back() -> None:
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    answer = litellm.completion(messages=[*ASK, said, *ASK], **OPENAI)
    assert json.loads(answer.model_dump_json())["choices"][0]["message"]["content"]
