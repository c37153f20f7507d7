"""What clients of `/v1/responses` and `/v1/messages` send, in neutral words; and that /docs explains it."""

from __future__ import annotations

from typing import Any

import pytest

from cllm.errors import InvalidRequest
from cllm.server.dialects.anthropic import CountBody
from cllm.server.dialects.responses_body import ResponsesBody

USER = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def responses(**fields: Any) -> ResponsesBody:
    return ResponsesBody.parse({"input": "x", **fields})


def test_items_become_messages() -> None:
    body = responses(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "In English."},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
            {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "nothing"},
        ],
    )
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    assert body.to_conversation().messages == (
        {"role": "system", "content": "Be brief.\nIn English."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "nothing"},
    )


OTHER = {**TOOL, "name": "other"}
ALLOWED = {"type": "allowed_tools", "tools": [{"type": "function", "name": "other"}]}


@pytest.mark.parametrize(
    ("choice", "names", "forced", "parallel"),
    [
        ("auto", ["look", "other"], False, True),
        ("none", [], False, True),
        ("required", ["look", "other"], True, True),
        ("any", ["look", "other"], True, True),
        ({"type": "function", "name": "other"}, ["other"], True, False),
        ({**ALLOWED, "mode": "auto"}, ["other"], False, True),
        ({**ALLOWED, "mode": "required"}, ["other"], True, True),
    ],
)
def test_tool_choice_of_responses_selects_tools(
    choice: Any, names: list[str], forced: bool, parallel: bool
) -> None:
    conversation = responses(tools=[TOOL, OTHER], tool_choice=choice).to_conversation()
    assert [tool.name for tool in conversation.tools] == names
    assert (conversation.forced, conversation.parallel) == (forced, parallel)


@pytest.mark.parametrize(
    ("choice", "names", "forced", "parallel"),
    [
        (None, ["look", "other"], False, True),
        ({"type": "none"}, [], False, True),
        ({"type": "any"}, ["look", "other"], True, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ["look", "other"], False, False),
        ({"type": "tool", "name": "look"}, ["look"], True, False),
    ],
)
def test_tool_choice_of_messages_selects_tools(
    choice: Any, names: list[str], forced: bool, parallel: bool
) -> None:
    tools: list[Any] = [{"name": name, "input_schema": {}} for name in ("look", "other")]
    body = CountBody.parse({"messages": USER, "tools": tools, "tool_choice": choice})
    conversation = body.conversation()
    assert [tool.name for tool in conversation.tools] == names
    assert (conversation.forced, conversation.parallel) == (forced, parallel)


def test_blocks_become_messages() -> None:
    body = CountBody.parse(
        {
            "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "messages": [
                {"role": "user", "content": "c"},
                {"role": "user", "content": [{"type": "text", "text": "d"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "e"},
                        {"type": "tool_use", "id": "1", "name": "look", "input": {"ä": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": "f", "is_error": True},
                        {"type": "text", "text": "g"},
                    ],
                },
                {"role": "assistant", "content": "It"},
            ],
        }
    )
    conversation = body.conversation()
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"ä": 1}'}}
    assert conversation.messages == (
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "c\nd"},
        {"role": "assistant", "content": "e", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Error: f"},
        {"role": "user", "content": "g"},
        {"role": "assistant", "content": "It"},
    )
    assert conversation.for_template().prefill == "It"


@pytest.mark.parametrize(
    ("fields", "options", "think"),
    [
        ({}, {}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, {"enable_thinking": True}, True),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, False),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}, True),
    ],
)
def test_thinking_sets_template_variables(fields: Any, options: Any, think: bool) -> None:
    conversation = CountBody.parse({"messages": USER, **fields}).conversation()
    assert (conversation.options, conversation.think) == (options, think)


@pytest.mark.parametrize(
    ("effort", "options", "think"),
    [
        (None, {}, True),
        ("high", {"reasoning_effort": "high", "enable_thinking": True}, True),
        ("none", {"reasoning_effort": "none", "enable_thinking": False}, False),
    ],
)
def test_reasoning_effort_sets_template_variables(effort: str | None, options: Any, think: bool) -> None:
    conversation = responses(reasoning={"effort": effort}).to_conversation()
    assert (conversation.options, conversation.think) == (options, think)


@pytest.mark.parametrize("content", [[], [{"type": "redacted_thinking", "data": "x"}]])
def test_a_conversation_without_content_is_refused(content: list[Any]) -> None:
    body = CountBody.parse({"messages": [{"role": "assistant", "content": content}]})
    with pytest.raises(InvalidRequest, match="messages: "):
        body.conversation()
    with pytest.raises(InvalidRequest, match="input: "):
        responses(input=[{"type": "reasoning", "summary": []}]).to_conversation()
