"""LangChain's `ChatOpenAI` against `/v1`; `make clients` runs its own suite, and other clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.driver.server import PATIENCE_S, Server
from tests.e2e.clients import PATH_LIKE, Weather

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")


@pytest.fixture(scope="module")
def settings(quiet: pytest.MonkeyPatch, embedded: Server) -> Iterator[dict[str, Any]]:
    with httpx.Client(trust_env=False, timeout=PATIENCE_S) as client:
        yield {
            "http_client": client,
            "base_url": f"{embedded.url}/v1",
            "api_key": "none",
            "model": "any",
            "temperature": 0,
            "max_retries": 0,
        }


@pytest.fixture(scope="module")
def chat(settings: dict[str, Any]) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(**settings, max_tokens=48)


def test_a_chat_streamed_and_whole(chat: Any) -> None:
    whole = chat.invoke("What is AI?")
    pieces = list(chat.stream("What is AI?"))
    assert "".join(piece.content for piece in pieces) == whole.content != ""
    assert len(pieces) > 5
    assert whole.usage_metadata["output_tokens"] > 5
    assert whole.response_metadata["finish_reason"] in ("stop", "length")


def test_a_forced_tool_call(chat: Any) -> None:
    calling = chat.bind_tools([Weather], tool_choice="Weather")
    call = calling.invoke("How is the weather in Rome?").tool_calls[0]
    assert call["name"] == "Weather" and Weather.model_validate(call["args"])
    streamed: Any = None
    for piece in calling.stream("How is the weather in Rome?"):
        streamed = piece if streamed is None else streamed + piece
    assert [{**each, "id": ""} for each in streamed.tool_calls] == [{**call, "id": ""}]


def test_structured_output(chat: Any) -> None:
    answer = chat.with_structured_output(Weather, method="json_schema").invoke("How is the weather in Paris?")
    assert isinstance(answer, Weather)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [({"model": PATH_LIKE}, openai.NotFoundError), ({"temperature": -1}, openai.BadRequestError)],
)
def test_errors_are_the_sdks_own(
    settings: dict[str, Any], fields: dict[str, Any], kind: type[Exception]
) -> None:
    from langchain_openai import ChatOpenAI

    with pytest.raises(kind):
        ChatOpenAI(**{**settings, **fields}, max_tokens=4).invoke("x")
