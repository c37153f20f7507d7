"""LiteLLM's `completion` against `/v1`, as an OpenAI-compatible provider."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.driver.server import PATIENCE_S, Server
from tests.e2e.clients import PATH_LIKE, QUESTION, WEATHER_TOOL, Weather

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning"),
    # Its response models and its own logging worker.
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def litellm(quiet: pytest.MonkeyPatch) -> Iterator[Any]:
    import litellm

    litellm.telemetry = False
    litellm.suppress_debug_info = True
    with httpx.Client(trust_env=False, timeout=PATIENCE_S) as litellm.client_session:
        yield litellm


@pytest.fixture(scope="module")
def settings(embedded: Server) -> dict[str, Any]:
    return {
        "model": "openai/any",
        "api_base": f"{embedded.url}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 48,
        "num_retries": 0,
    }


def test_a_chat_streamed_and_whole(litellm: Any, settings: dict[str, Any]) -> None:
    whole = litellm.completion(messages=QUESTION, **settings)
    pieces = list(litellm.completion(messages=QUESTION, stream=True, **settings))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content != ""
    assert whole.usage.completion_tokens > 5


def test_a_chat_from_an_event_loop(litellm: Any, settings: dict[str, Any]) -> None:
    async def ask() -> Any:
        return await litellm.acompletion(messages=QUESTION, **{**settings, "max_tokens": 4})

    assert asyncio.run(ask()).choices[0].message.content


def test_a_completion(litellm: Any, settings: dict[str, Any], embedded: Server) -> None:
    settings = {**settings, "model": "text-completion-openai/any", "max_tokens": 8}
    answer = litellm.text_completion(prompt="The capital of France is", **settings)
    assert answer.choices[0].text == embedded.generate("The capital of France is", 8)["text"]


def test_several_answers_and_their_probabilities(litellm: Any, settings: dict[str, Any]) -> None:
    fields = {**settings, "max_tokens": 5, "temperature": 1.5, "n": 4, "seed": 3}
    answer = litellm.completion(messages=QUESTION, logprobs=True, top_logprobs=2, **fields)
    assert len(answer.choices) == 4
    assert len(answer.choices[3].logprobs.content[0].top_logprobs) == 2


def test_a_forced_tool_call(litellm: Any, settings: dict[str, Any]) -> None:
    fields = {"messages": QUESTION, "tools": [WEATHER_TOOL], "tool_choice": "required", **settings}
    fields["_skip_mcp_handler"] = True  # else tools need the package `mcp`, which LiteLLM does not install
    # Once before: then both answers below continue the same cached prefix, and round alike.
    litellm.completion(parallel_tool_calls=False, **fields)
    answer = litellm.completion(parallel_tool_calls=False, **fields)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "Weather" and Weather.model_validate_json(call.function.arguments)
    assert answer.choices[0].finish_reason == "tool_calls"
    pieces = list(litellm.completion(stream=True, parallel_tool_calls=False, **fields))
    whole = litellm.stream_chunk_builder(pieces)
    (streamed,) = whole.choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)


def test_structured_output(litellm: Any, settings: dict[str, Any]) -> None:
    answer = litellm.completion(messages=QUESTION, response_format=Weather, **settings)
    assert Weather.model_validate_json(answer.choices[0].message.content)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model": f"openai/{PATH_LIKE}"}, "NotFoundError"),
        ({"temperature": -1}, "BadRequestError"),
        ({"messages": [{"role": "user", "content": "hello " * 9000}]}, "ContextWindowExceededError"),
    ],
)
def test_errors_are_its_own(
    litellm: Any, settings: dict[str, Any], fields: dict[str, Any], kind: str
) -> None:
    with pytest.raises(getattr(litellm, kind)):
        litellm.completion(**{"messages": QUESTION, **settings, **fields})
