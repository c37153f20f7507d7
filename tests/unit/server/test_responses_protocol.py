"""`/v1/responses`: every event is what OpenAI's SDK says it is, and they add up to the whole response."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from pydantic import TypeAdapter

from cllm.chat.reply import ReplyBuilder
from cllm.server.dialects.responses import ResponseRenderer, echo
from cllm.server.dialects.responses_body import ResponsesBody
from cllm.text.output_parser import ContentText, ToolCallArguments, ToolCallStart
from cllm.types import FinishReason
from tests.unit.chat.replies import GivenParser, Step, answers, build, failed, render, step


@cache
def sdk(name: str) -> TypeAdapter[Any]:
    """A type of OpenAI's SDK, imported by the first test that needs it: collecting takes seconds less."""
    import openai.types.responses

    return TypeAdapter(getattr(openai.types.responses, name))


TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
BODY = ResponsesBody.parse({"input": "x", "tools": [TOOL], "metadata": {"a": "b"}})


def rendered(steps: list[Step], top: int | None = None, body: ResponsesBody = BODY) -> list[dict[str, Any]]:
    reply = ReplyBuilder(GivenParser(steps))
    answer = ResponseRenderer(reply, "resp_1", echo(body, "m"), top)
    events = [*answer.start(), *render(steps, reply, answer.render)]
    return [msgspec.to_builtins(event) for event in events]


def whole(steps: list[Step], top: int | None = None) -> dict[str, Any]:
    renderer = ResponseRenderer(build(steps), "resp_1", echo(BODY, "m"), top)
    response: dict[str, Any] = msgspec.to_builtins(renderer.whole())
    return response


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in output]


@settings(deadline=None)
@given(answers())
def test_any_answer_is_a_well_formed_stream(steps: list[Step]) -> None:
    events = rendered(steps)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items: list[dict[str, Any]] = []
    open_item: int | None = None
    for event in events:
        sdk("ResponseStreamEvent").validate_python(event)
        kind = event["type"]
        if kind == "response.output_item.added":
            assert open_item is None and event["output_index"] == len(items)
            open_item = event["output_index"]
            items.append({**event["item"], "text": ""})
        elif kind == "response.output_item.done":
            assert event["output_index"] == open_item
            open_item = None
            done = event["item"]
            text = done["arguments"] if done["type"] == "function_call" else done["content"][0]["text"]
            assert text == items[-1]["text"], "the deltas add up to what is done"
            items[-1] = done
        elif "output_index" in event:
            assert event["output_index"] == open_item and event["item_id"] == items[-1]["id"]
            if kind.endswith(".delta"):
                items[-1]["text"] += event["delta"]
    assert open_item is None
    final = events[-1]["response"]
    sdk("Response").validate_python(final)
    assert final["output"] == items
    assert without_ids(whole(steps)["output"]) == without_ids(items)


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"input": "*** Begin\\n"}', "*** Begin\n"),
        ('{"input": "cut', '{"input": "cut'),
        ('{"x": 1}', '{"x": 1}'),
    ],
)
def test_a_custom_tool_is_called_with_a_text(arguments: str, given: str) -> None:
    tools = [TOOL, {"type": "custom", "name": "apply_patch"}]
    body = ResponsesBody.parse({"input": "x", "tools": tools})
    half = len(arguments) // 2
    steps = [
        step(ToolCallStart(0, "apply_patch"), ToolCallArguments(0, arguments[:half])),
        step(ToolCallArguments(0, arguments[half:]), end=FinishReason.STOP),
    ]
    _, _, *events = rendered(steps, body=body)
    for event in events:
        sdk("ResponseStreamEvent").validate_python(event)
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done"),
        *("output_item.done", "completed"),
    ]
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", given)
    sdk("Response").validate_python(events[-1]["response"])


def test_a_failure_is_told_and_ends_the_stream() -> None:
    *_, error, last = rendered([step(ContentText("a")), failed("engine_died", "the engine died")])
    assert (error["type"], error["code"], error["message"]) == ("error", "engine_died", "the engine died")
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the engine died"}
    sdk("ResponseStreamEvent").validate_python(error)
    sdk("ResponseStreamEvent").validate_python(last)
