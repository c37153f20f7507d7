"""openai-agents: text, streams, tools, output types and sessions, over both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Literal

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

URL = os.environ["CLLM_URL"]
set_tracing_disabled(True)


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=-30, le=50)


@function_tool
def get_weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather in a city."""
    return f"sunny in {city} for {days} days"


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel])
def model(request: pytest.FixtureRequest) -> Any:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    return request.param(model="cllm", openai_client=client)


def make_agent(model: Any, **options: Any) -> Agent[Any]:
    settings = options.pop("model_settings", ModelSettings(temperature=0, max_tokens=512))
    return Agent(name="helper", instructions="Be brief.", model=model, model_settings=settings, **options)


def test_a_text(model: Any) -> None:
    result = Runner.run_sync(make_agent(model), "What is AI?")
    assert result.final_output and result.raw_responses[0].usage.output_tokens > 1


def test_a_stream(model: Any) -> None:
    async def run() -> tuple[list[str], Any]:
        result = Runner.run_streamed(make_agent(model), "What is AI?")
        return [event.type async for event in result.stream_events()], result.final_output

    kinds, output = asyncio.run(run())
    assert output and kinds.count("raw_response_event") > 5


def test_a_tool_is_called(model: Any) -> None:
    settings = ModelSettings(temperature=0, max_tokens=512, tool_choice="required")
    agent = make_agent(
        model, tools=[get_weather], model_settings=settings, tool_use_behavior="stop_on_first_tool"
    )
    assert "sunny in " in Runner.run_sync(agent, "How is the weather in Rome?").final_output


def test_a_tool_loop_ends(model: Any) -> None:
    """After a forced call the choice is set back: the second answer may be a text."""
    settings = ModelSettings(temperature=0, max_tokens=512, tool_choice="get_weather")
    agent = make_agent(model, tools=[get_weather], model_settings=settings)
    result = Runner.run_sync(agent, "How is the weather in Rome?", max_turns=3)
    assert any(item.type == "tool_call_output_item" for item in result.new_items)


def test_an_output_type(model: Any) -> None:
    result = Runner.run_sync(make_agent(model, output_type=Weather), "How is the weather in Rome?")
    assert isinstance(result.final_output, Weather)


def test_an_output_type_beside_tools(model: Any) -> None:
    agent = make_agent(model, output_type=Weather, tools=[get_weather])
    result = Runner.run_sync(agent, "How is the weather in Rome?", max_turns=6)
    assert isinstance(result.final_output, Weather)


def test_a_handoff_is_a_tool(model: Any) -> None:
    other = make_agent(model, handoff_description="Knows all")
    settings = ModelSettings(temperature=0, max_tokens=512, tool_choice="required")
    agent = make_agent(model, handoffs=[handoff(other, tool_name_override="ask")], model_settings=settings)
    result = Runner.run_sync(agent, "Ask the other one.", max_turns=3)
    assert any(item.type == "handoff_output_item" for item in result.new_items)


def test_a_session(model: Any, tmp_path: Path) -> None:
    session = SQLiteSession("one", str(tmp_path / "history"))
    for prompt in ("My name is Ann.", "What is my name?"):
        assert Runner.run_sync(make_agent(model), prompt, session=session).final_output
    assert len(asyncio.run(session.get_items())) >= 4
