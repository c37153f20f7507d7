"""Fields as clients of other servers send them: taken where they change the meaning, never refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest

from cllm.config import EngineConfig, ServerConfig
from cllm.errors import InvalidRequest
from cllm.frontend.engine_client import EngineClient
from cllm.server.app import create_app
from cllm.server.dialects.anthropic import MessagesBody
from cllm.server.dialects.cllm import GenerateBody
from cllm.server.dialects.llama_body import LlamaCompletionBody
from cllm.server.dialects.openai.bodies import ChatBody
from cllm.server.dialects.openai.completions import CompletionBody
from cllm.server.dialects.responses_body import ResponsesBody
from cllm.server.generation import GenerationBody
from cllm.testing import CHAT_TEMPLATE, ScriptedRunner, say
from cllm.types import ConstraintKind, ConstraintSpec
from tests.driver.thread_engine import ThreadExecutor

USER = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
WEATHER = {"name": "weather", "parameters": SCHEMA}
NEEDED: dict[type[GenerationBody], dict[str, Any]] = {
    ChatBody: {"messages": USER},
    CompletionBody: {"prompt": "x"},
    GenerateBody: {"prompt": "x"},
    LlamaCompletionBody: {"prompt": "x"},
    MessagesBody: {"messages": USER, "max_tokens": 8},
    ResponsesBody: {"input": "x"},
}
GENERATING = pytest.mark.parametrize("kind", NEEDED)


def make(kind: type[GenerationBody], **fields: Any) -> Any:
    return kind.parse({**NEEDED[kind], **fields})


def chat(**fields: Any) -> ChatBody:
    return ChatBody.parse({"messages": USER, **fields})


@GENERATING
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_json": SCHEMA}, ConstraintSpec(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA))),
        ({"guided_json": '{"type": "null"}'}, ConstraintSpec(ConstraintKind.JSON_SCHEMA, '{"type": "null"}')),
        ({"guided_regex": "[0-9]"}, ConstraintSpec(ConstraintKind.REGEX, "[0-9]")),
        ({"guided_choice": ["a", "b"]}, ConstraintSpec(ConstraintKind.CHOICE, '["a", "b"]')),
        ({"guided_grammar": 'root ::= "a"'}, ConstraintSpec(ConstraintKind.GRAMMAR, 'root ::= "a"')),
        ({"structured_outputs": {"json": SCHEMA}},
         ConstraintSpec(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA))),
        ({"structured_outputs": {"regex": "x"}}, ConstraintSpec(ConstraintKind.REGEX, "x")),
        ({"structured_outputs": {"choice": ["a"]}}, ConstraintSpec(ConstraintKind.CHOICE, '["a"]')),
        ({"structured_outputs": {"grammar": "x"}}, ConstraintSpec(ConstraintKind.GRAMMAR, "x")),
        ({"structured_outputs": {"json_object": True}},
         ConstraintSpec(ConstraintKind.JSON_SCHEMA, '{"type": "object"}')),
        ({"structured_outputs": {}}, None),
    ],
)  # fmt: skip
def test_vllms_words_for_structured_output(
    kind: type[GenerationBody], fields: dict[str, Any], expected: ConstraintSpec | None
) -> None:
    found = make(kind, **fields).constraint()
    assert (found and msgspec.structs.replace(found, origin="")) == expected


@GENERATING
def test_two_forms_of_an_answer_are_refused_by_name(kind: type[GenerationBody]) -> None:
    with pytest.raises(InvalidRequest, match="regex and guided_json: give only one"):
        make(kind, guided_json=SCHEMA, regex="x").constraint()


@pytest.mark.parametrize("field", ["output_format", "output_config"])
def test_anthropics_schema_under_both_names(field: str) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    body = make(MessagesBody, **{field: form if field == "output_format" else {"format": form}})
    spec = ConstraintSpec(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA), origin="output_config")
    assert body.constraint() == spec


def test_functions_are_tools_in_an_older_form() -> None:
    conversation = chat(functions=[WEATHER]).conversation()
    assert [tool.name for tool in conversation.tools] == ["weather"]
    assert (conversation.forced, conversation.parallel) == (False, False)
    assert chat(functions=[WEATHER], function_call={"name": "weather"}).conversation().forced
    assert chat(functions=[WEATHER], function_call="none").conversation().tools == ()
    assert chat(functions=[WEATHER]).older_form and not chat().older_form
    both = chat(functions=[WEATHER], tools=[{"type": "function", "function": {"name": "other"}}])
    assert [tool.name for tool in both.conversation().tools] == ["other"] and not both.older_form
    with pytest.raises(InvalidRequest, match="not among the tools"):
        chat(functions=[WEATHER], function_call={"name": "other"})


@pytest.mark.parametrize(
    ("fields", "think", "budget"),
    [
        ({}, None, None),
        ({"enable_thinking": False}, False, None),
        ({"enable_thinking": True, "reasoning_effort": "none"}, True, None),
        ({"thinking": False}, False, None),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, True, 9),
        ({"thinking": {"type": "auto"}}, None, None),
        ({"reasoning": {"effort": "low"}}, True, None),
        ({"reasoning": {"effort": "none"}}, False, None),
        ({"reasoning": {"enabled": False}}, False, None),
        ({"reasoning": {"max_tokens": 7}}, None, 7),
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_budget": 0}, False, 0),
        ({"reasoning_budget": -1}, None, None),
        ({"thinking_budget": 12.0}, None, 12),
    ],
)
def test_all_words_for_reasoning(fields: dict[str, Any], think: bool | None, budget: int | None) -> None:
    conversation = chat(**fields).conversation()
    assert conversation.think is (think is not False)
    assert conversation.options.get("enable_thinking") is think
    assert conversation.reasoning_budget == budget


def test_a_template_variable_that_is_given_stays() -> None:
    body = chat(enable_thinking=True, chat_template_kwargs={"enable_thinking": False})
    assert body.conversation().options == {"enable_thinking": False}


def test_a_budget_of_anthropics() -> None:
    body = make(MessagesBody, thinking={"type": "enabled", "budget_tokens": 1024})
    assert body.conversation().reasoning_budget == 1024


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]


@pytest.mark.parametrize(
    ("choice", "names", "forced"),
    [
        ("any", ["a", "b"], True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS[:1]}}, ["a"], False),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": TOOLS}}, ["a", "b"], True),
        (TOOLS[1], ["b"], True),
    ],
)
def test_which_tools_may_be_called(choice: Any, names: list[str], forced: bool) -> None:
    conversation = chat(tools=TOOLS, tool_choice=choice).conversation()
    assert [tool.name for tool in conversation.tools] == names
    assert conversation.forced is forced


@GENERATING
def test_an_empty_grammar_or_stop_is_none(kind: type[GenerationBody]) -> None:
    found = make(kind, grammar="", stop="")
    assert found.constraint() is None and not getattr(found, "stop", None)
    assert not getattr(make(kind, stop=["", ""]), "stop", None)


@pytest.mark.parametrize("form", [{"json_schema": {"schema": SCHEMA}}, {"schema": SCHEMA}])
def test_both_places_of_a_schema_in_response_format(form: dict[str, Any]) -> None:
    found = chat(response_format={"type": "json_schema", **form}).constraint()
    assert found is not None and (found.kind, json.loads(found.source)) == (
        ConstraintKind.JSON_SCHEMA,
        SCHEMA,
    )


@pytest.mark.parametrize(
    ("kind", "fields", "param", "words"),
    [
        (ChatBody, {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        (ChatBody, {"prompt_logprobs": 2, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        (ChatBody, {"continue_final_message": True}, "continue_final_message", "not the assistant's"),
        (
            ChatBody,
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "beside add_generation_prompt",
        ),
        (ChatBody, {"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            ChatBody,
            {"tools": [{"type": "custom", "custom": {"name": "shell"}}]},
            "tools",
            r"tools\[0\]: a tool of type 'custom' is not supported here",
        ),
        (ChatBody, {"response_format": {"type": "json_schema"}}, "response_format", "json_schema is missing"),
        (ChatBody, {"grammar": "a", "regex": "b"}, "regex", "grammar and regex: give only one"),
        (CompletionBody, {"best_of": 1, "n": 2}, "best_of", "at least n"),
        (CompletionBody, {"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        (CompletionBody, {"prompt": ["a"] * 9, "n": 64}, "prompt", "at most 256"),
    ],
)
def test_a_refusal_of_combined_fields_names_one(
    kind: type[GenerationBody], fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        make(kind, **fields).constraint()
    assert refused.value.field == param and "JSON object" not in refused.value.message


def test_nulls_within_options() -> None:
    assert chat(stream=True, stream_options={"include_usage": None}).include_usage is False
    assert chat(tools=[{"type": "function", "function": {"name": "a", "parameters": None}}]).tools


def scripted(body: dict[str, Any]) -> httpx.Response:
    """The answer of `/v1/chat/completions` on the scripted model."""

    async def run() -> httpx.Response:
        engine = EngineClient(
            ThreadExecutor(lambda _: ScriptedRunner(chat_template=CHAT_TEMPLATE), EngineConfig())
        )
        engine.start(asyncio.get_running_loop())
        try:
            await asyncio.wrap_future(engine.loaded)
            transport = httpx.ASGITransport(app=create_app(engine, ServerConfig()))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await client.post("/v1/chat/completions", json=body, timeout=60)
        finally:
            await asyncio.get_running_loop().run_in_executor(None, engine.stop)

    return asyncio.run(run())


CALL = '<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool_call>'


def test_a_function_call_is_answered_in_the_older_form() -> None:
    body = {"messages": [{"role": "user", "content": say(CALL)}], "functions": [WEATHER]}
    (choice,) = scripted(body).json()["choices"]
    assert choice["finish_reason"] == "function_call"
    message = choice["message"]
    assert message["function_call"] == {"name": "weather", "arguments": '{"a": 1}'}
    assert message["content"] is None and "tool_calls" not in message

    lines = scripted({**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line[6:7] == "{"]
    calls = [chunk["delta"]["function_call"] for chunk in chunks if "function_call" in chunk["delta"]]
    assert [call["name"] for call in calls if "name" in call] == ["weather"]
    assert "".join(call["arguments"] for call in calls) == '{"a": 1}'
    assert chunks[-1]["finish_reason"] == "function_call"
    assert not any("tool_calls" in chunk["delta"] for chunk in chunks)
