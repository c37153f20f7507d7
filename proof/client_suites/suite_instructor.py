"""Instructor: pydantic models out of answers, in every mode that its OpenAI and Anthropic clients have."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from typing import Any, Literal

import anthropic
import instructor
import openai
import pytest
from pydantic import BaseModel, Field

URL = os.environ["CLLM_URL"]
ASK: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
MODES = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS")


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=-30, le=50)


def make(mode: str) -> Any:
    if mode.startswith("ANTHROPIC"):
        raw = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
        return instructor.from_anthropic(raw, mode=instructor.Mode[mode])
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=instructor.Mode[mode])


def ask(client: Any, mode: str, **options: Any) -> Any:
    limit = {"max_output_tokens": 96} if mode.startswith("RESPONSES") else {"max_tokens": 96}
    fields = {
        "model": "cllm",
        "messages": ASK,
        "response_model": Weather,
        "max_retries": 0,
        **limit,
        **options,
    }
    return client.create(**fields)


@pytest.mark.parametrize("mode", [*MODES, "ANTHROPIC_TOOLS"])
def test_an_answer_is_a_model(mode: str) -> None:
    assert isinstance(ask(make(mode), mode), Weather)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "ANTHROPIC_TOOLS"])
def test_a_model_comes_in_parts(mode: str) -> None:
    *_, last = make(mode).create_partial(
        model="cllm", messages=ASK, response_model=Weather, max_tokens=96, max_retries=0
    )
    assert last.city in ("Paris", "Rome") and last.degrees is not None


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_several_models(mode: str) -> None:
    found = ask(make(mode), mode, response_model=Iterable[Weather], max_tokens=400)
    assert all(isinstance(each, Weather) for each in found)


def test_parallel_calls() -> None:
    found = ask(
        make("PARALLEL_TOOLS"), "PARALLEL_TOOLS", response_model=Iterable[Weather], tool_choice="required"
    )
    assert all(isinstance(each, Weather) for each in found)


def test_from_an_event_loop() -> None:
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    asking = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    assert isinstance(asyncio.run(ask(asking, "TOOLS")), Weather)


def test_a_second_try_sends_the_first_back() -> None:
    """What does not validate is sent back with the error: that history must be taken."""

    class Never(Weather):
        degrees: int = Field(ge=-30, le=50)

        def model_post_init(self, _: Any) -> None:
            raise ValueError("never right")

    with pytest.raises(Exception) as refusal:
        ask(make("TOOLS"), "TOOLS", response_model=Never, max_retries=2)
    assert "never right" in str(refusal.value)
