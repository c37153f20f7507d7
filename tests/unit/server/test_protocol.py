"""What clients of `/v1/responses` and `/v1/messages` send, in neutral words; and that /docs explains it."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import pytest

from cllm.errors import InvalidRequest
from cllm.server.body import Body
from cllm.server.dialect import HttpError
from cllm.server.dialects import TABLE
from cllm.server.dialects.anthropic import CountBody, MessagesBody
from cllm.server.dialects.openai.completions import CompletionBody
from cllm.server.dialects.responses_body import ResponsesBody

USER = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
BODIES = [
    kind
    for module in (MessagesBody.__module__, ResponsesBody.__module__)
    for kind in vars(sys.modules[module]).values()
    if isinstance(kind, type) and issubclass(kind, Body) and kind.__module__ == module
]


@pytest.mark.parametrize("body", BODIES, ids=lambda kind: kind.__name__)
def test_every_field_is_described(body: type[Body]) -> None:
    schema = msgspec.json.schema_components([body])[1][body.__name__]
    assert all(field.get("description") for field in schema["properties"].values())


def test_no_limit_on_a_completion_is_a_null_that_means_something() -> None:
    assert CompletionBody.parse({"prompt": "x", "max_tokens": None}).max_tokens is None
    assert CompletionBody.parse({"prompt": "x"}).max_tokens == 16


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


def test_a_null_is_no_value_of_a_required_field() -> None:
    with pytest.raises(InvalidRequest, match="required"):
        MessagesBody.parse({"messages": USER, "max_tokens": None})


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_have_anthropics_names_on_its_routes_alone(status: int, kind: str) -> None:
    told = {"type": "error", "error": {"type": kind, "message": "no"}}
    error = HttpError(status, "x", "no")
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/else"):
        assert TABLE.find(path).make_error(error) == told
    for path in ("/v1/responses", "/v1/messages_else"):
        assert set(TABLE.find(path).make_error(error)) == {"error"}
    assert set(TABLE.find("/generate").make_error(error)) == {"success", "error", "message"}


@pytest.mark.parametrize(
    "path", ["/v1/responses", "/v1/responses/x", "/responses", "/responses/input_tokens"]
)
def test_an_error_in_a_stream_of_responses_is_an_event_with_a_name(path: str) -> None:
    frame = TABLE.find(path).frame_error(InvalidRequest("no", "input"))
    assert frame == (
        b'event: error\ndata: {"type":"error","sequence_number":0,'
        b'"code":"invalid_request","message":"no","param":"input"}\n\n'
    )


def test_responses_at_llama_servers_path_have_its_errors() -> None:
    shown = {"code": 400, "message": "no", "type": "invalid_request_error"}
    for path in ("/responses", "/responses/else"):
        assert TABLE.find(path).make_error(InvalidRequest("no", "input")) == {"error": shown}


@pytest.mark.parametrize("content", [[], [{"type": "redacted_thinking", "data": "x"}]])
def test_a_conversation_without_content_is_refused(content: list[Any]) -> None:
    body = CountBody.parse({"messages": [{"role": "assistant", "content": content}]})
    with pytest.raises(InvalidRequest, match="messages: "):
        body.conversation()
    with pytest.raises(InvalidRequest, match="input: "):
        responses(input=[{"type": "reasoning", "summary": []}]).to_conversation()


def test_only_one_form_of_the_answer_can_be_asked_for() -> None:
    schema = {"type": "object"}
    body = responses(text={"format": {"type": "json_schema", "name": "x", "schema": schema}}, regex="x")
    with pytest.raises(InvalidRequest, match="only one"):
        body.constraint()
    plain: Any = {"messages": USER, "choice": ["a"]}
    output = {"format": {"type": "json_schema", "schema": schema}}
    with pytest.raises(InvalidRequest, match="only one"):
        CountBody.parse({**plain, "output_config": output}).constraint()


@pytest.mark.parametrize(
    ("fields", "message", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice: required needs tools", "tool_choice"),
        (
            {"tool_choice": {"type": "function", "name": "x"}},
            "tool_choice: 'x' is not among the tools",
            "tool_choice",
        ),
        ({"input": [{"type": "message"}]}, "input[0]: 'role' is missing", "input"),
        ({"input": [{"type": "item_reference"}]}, "input: expected `array` of length >= 1", "input"),
        ({"stop": [5]}, "stop[0]: expected `str`, got `int`", "stop"),
        ({"background": True}, "background: not supported: send input items, or", "background"),
        (
            {"tool_choice": {"type": "web_search"}},
            "tool_choice: type 'web_search' is not supported: this server executes no tools, it",
            "tool_choice",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto"}},
            "tool_choice: 'tools' is missing",
            "tool_choice",
        ),
    ],
)
def test_a_refusal_names_what_is_wrong(fields: Any, message: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        responses(**fields)
    assert refusal.value.message.startswith(message) and refusal.value.field == field
