"""LlamaIndex: `OpenAILike`, whole and streamed, with tools and structured answers; and its embeddings."""

import asyncio
import os
from typing import Any, Literal

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

URL = os.environ["CLLM_URL"]
ASK = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="What is AI?")]


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=-30, le=50)


def get_weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather in a city."""
    return f"sunny in {city} for {days} days"


def make(**options: Any) -> OpenAILike:
    fields = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 4096, **options}
    return OpenAILike(
        model="cllm",
        api_base=f"{URL}/v1",
        api_key="none",
        temperature=0,
        max_tokens=96,
        max_retries=0,
        **fields,
    )


def test_a_completion() -> None:
    assert make(is_chat_model=False).complete("The capital of France is").text
    assert make().complete("The capital of France is").text


def test_a_streamed_completion_is_the_whole_one() -> None:
    llm = make(is_chat_model=False)
    pieces = list(llm.stream_complete("The capital of France is"))
    assert pieces[-1].text == llm.complete("The capital of France is").text


def test_a_chat() -> None:
    llm = make()
    whole = llm.chat(ASK).message.content
    pieces = list(llm.stream_chat(ASK))
    assert whole and "".join(piece.delta or "" for piece in pieces) == whole


def test_a_chat_from_an_event_loop() -> None:
    async def run() -> tuple[Any, int]:
        llm = make()
        whole = await llm.achat(ASK)
        return whole, len([piece async for piece in await llm.astream_chat(ASK)])

    whole, count = asyncio.run(run())
    assert whole.message.content and count > 5


def test_a_forced_call() -> None:
    llm = make()
    tool = FunctionTool.from_defaults(get_weather)
    response = llm.chat_with_tools([tool], "How is it in Rome?", tool_required=True)
    (call,) = llm.get_tool_calls_from_response(response)[:1]
    assert call.tool_name == "get_weather" and call.tool_kwargs["city"] in ("Paris", "Rome")
    assert "sunny" in tool(**call.tool_kwargs).content


def test_a_forced_call_in_a_stream() -> None:
    llm = make()
    tool = FunctionTool.from_defaults(get_weather)
    *_, last = llm.stream_chat_with_tools([tool], "How is it in Rome?", tool_required=True)
    assert llm.get_tool_calls_from_response(last)[0].tool_name == "get_weather"


@pytest.mark.parametrize("by_tools", [True, False])
def test_a_structured_answer(by_tools: bool) -> None:
    llm = make(is_function_calling_model=by_tools, should_use_structured_outputs=not by_tools)
    answer = llm.structured_predict(Weather, PromptTemplate("How is the weather in {city}?"), city="Rome")
    assert isinstance(answer, Weather)


def test_the_result_of_a_call_goes_back() -> None:
    llm = make()
    tool = FunctionTool.from_defaults(get_weather)
    first = llm.chat_with_tools([tool], "How is it in Rome?", tool_required=True)
    call = llm.get_tool_calls_from_response(first)[0]
    said = ChatMessage(role="tool", content="sunny", additional_kwargs={"tool_call_id": call.tool_id})
    question = ChatMessage(role="user", content="How is it in Rome?")
    response = llm.chat_with_tools([tool], chat_history=[question, first.message, said])
    assert response.message is not None
