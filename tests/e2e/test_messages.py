"""Anthropic's own SDK against `/v1/messages`: it must work as with Anthropic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import jsonschema
import pytest
from anthropic.types import MessageParam
from pydantic import BaseModel

from tests.driver.agent_bodies import CLAUDE, CLAUDE_TURNS
from tests.driver.server import Server
from tests.tiny_models import END_OF_TEXT

QUESTION: list[MessageParam] = [{"role": "user", "content": "What is AI?"}]
GREEDY = {"temperature": 0}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Oslo"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"name": "weather", "description": "Forecast", "input_schema": SCHEMA}


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    colour: Literal["red", "blue"]


@pytest.fixture(scope="module")
def client(tiny: Server) -> Iterator[anthropic.Anthropic]:
    """A client of a model that, greedy, never ends by itself, and says the same on every CPU."""
    with anthropic.Anthropic(base_url=tiny.url, api_key="none", max_retries=0) as client:
        yield client


def words(message: anthropic.types.Message) -> str:
    (block,) = message.content
    assert block.type == "text"
    return block.text


def test_an_answer_equals_the_chat_routes(client: anthropic.Anthropic, tiny: Server) -> None:
    message = client.messages.create(model="any", max_tokens=16, messages=QUESTION, extra_body=GREEDY)
    chat = tiny.post(
        "/v1/chat/completions", {"messages": QUESTION, "max_tokens": 16, "temperature": 0}
    ).json()
    assert words(message) == chat["choices"][0]["message"]["content"]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert (message.role, message.model, message.type) == ("assistant", "any", "message")
    assert message.usage.output_tokens == 16 and message._request_id


def test_streamed_and_whole_messages_are_the_same(client: anthropic.Anthropic) -> None:
    asked: list[MessageParam] = [{"role": "user", "content": "Say hi"}]
    long = 300  # tokens: so many that they are not read all at once
    ending = {**GREEDY, "logit_bias": {str(END_OF_TEXT): 100}, "min_tokens": long}
    fields: Any = {"model": "any", "max_tokens": long + 1, "messages": asked, "extra_body": ending}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert whole.stop_reason == final.stop_reason == "end_turn"
    assert words(final) == words(whole) == "".join(pieces) and len(pieces) > 1
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_all_ways_to_ask_are_the_same(client: anthropic.Anthropic) -> None:
    cached: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    blocks: list[MessageParam] = [{"role": "user", "content": [{"type": "text", "text": "What is AI?"}]}]
    one = client.messages.create(
        model="any", max_tokens=8, system="Be brief.", messages=QUESTION, extra_body=GREEDY
    )
    other = client.messages.create(
        model="any",
        max_tokens=8,
        system=cached,
        messages=blocks,
        metadata={"user_id": "u"},
        extra_body=GREEDY,
    )
    assert words(one) == words(other)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be brief."},
        {"tools": [WEATHER]},
        {"tools": [WEATHER], "tool_choice": {"type": "any"}},
        {"messages": [*QUESTION, {"role": "assistant", "content": "It is"}]},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ],
    ids=["plain", "system", "tools", "a call demanded", "prefill", "schema"],
)
def test_counted_tokens_are_those_of_the_prompt(client: anthropic.Anthropic, fields: dict[str, Any]) -> None:
    body: Any = {"model": "any", "messages": QUESTION, **fields}
    counted = client.messages.count_tokens(**body).input_tokens
    usage = client.messages.create(**body, max_tokens=1).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_the_billing_header_of_claude_code_changes_nothing(client: anthropic.Anthropic) -> None:
    """Claude Code's first system block differs by session: the same question must cost the same."""
    answers = []
    for session in ("cch=1f0a3;", "cch=99d02;", ""):
        header = f"x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=cli; {session}"
        system: Any = [{"type": "text", "text": header}] if session else []
        system.append({"type": "text", "text": "Be brief."})
        body: Any = {"model": "any", "messages": QUESTION, "system": system}
        answer = client.messages.create(**body, max_tokens=8, extra_body=GREEDY)
        usage = answer.usage
        read = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        answers.append((words(answer), read, client.messages.count_tokens(**body).input_tokens))
    assert len(set(answers)) == 1 and answers[0][1] == answers[0][2]


def test_a_session_of_claude_code_is_taken(embedded: Server) -> None:
    messages = [*CLAUDE["messages"], *(message for turn in CLAUDE_TURNS for message in turn)]
    counts = [
        embedded.post("/v1/messages/count_tokens", {**CLAUDE, "messages": messages[:count]}).json()
        for count in (2, 4, len(messages))
    ]
    tokens = [count["input_tokens"] for count in counts]
    assert tokens == sorted(set(tokens)) and tokens[0] > 3000, counts


def test_tokens_are_counted_beyond_the_context(client: anthropic.Anthropic) -> None:
    long: list[MessageParam] = [{"role": "user", "content": "hello " * 9000}]
    assert client.messages.count_tokens(model="any", messages=long).input_tokens > 9000


def test_demanded_calls_fit_their_schema_and_results_go_back(client: anthropic.Anthropic) -> None:
    asked: list[MessageParam] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    fields: Any = {
        "model": "any",
        "max_tokens": 200,
        "tools": [WEATHER],
        "tool_choice": {"type": "tool", "name": "weather"},
        "extra_body": GREEDY,
    }
    answer = client.messages.create(messages=asked, **fields)
    (call,) = answer.content
    assert call.type == "tool_use" and call.name == "weather" and call.id.startswith("toolu_")
    jsonschema.validate(call.input, SCHEMA)
    assert answer.stop_reason == "tool_use"
    with client.messages.stream(messages=asked, **fields) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use" and streamed.input == call.input
    results: Any = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "No sky."}]},
        {"type": "tool_result", "tool_use_id": call.id, "content": "broken", "is_error": True},
        {"type": "text", "text": "So?"},
    ]
    follow: list[MessageParam] = [*asked, answer.to_param(), {"role": "user", "content": results}]
    after = client.messages.create(
        model="any", max_tokens=8, messages=follow, tools=[WEATHER], tool_choice={"type": "none"}
    )
    assert after.content[0].type == "text"


def test_a_call_cut_off_has_no_input(client: anthropic.Anthropic) -> None:
    note = {"type": "string", "minLength": 300, "maxLength": 300}
    tool: Any = {
        "name": "note",
        "input_schema": {"type": "object", "properties": {"text": note}, "required": ["text"]},
    }
    answer = client.messages.create(  # 60 tokens are more than the call's head and less than the note
        model="any", max_tokens=60, messages=QUESTION, tools=[tool], tool_choice={"type": "any"}
    )
    (call,) = answer.content
    assert call.type == "tool_use" and call.input == {} and answer.stop_reason == "max_tokens"


def test_an_answer_is_continued_from_its_beginning(client: anthropic.Anthropic, tiny: Server) -> None:
    begun: list[MessageParam] = [
        {"role": "user", "content": "Count to five, in digits."},
        {"role": "assistant", "content": "1, 2, 3,"},
    ]
    answer = client.messages.create(model="any", max_tokens=8, messages=begun, extra_body=GREEDY)
    prompt = "<|im_start|>user\nCount to five, in digits.<|im_end|>\n<|im_start|>assistant\n1, 2, 3,"
    continued = tiny.post("/completion", {"prompt": prompt, "n_predict": 8, "temperature": 0}).json()
    assert words(answer) == continued["content"] != ""


def test_a_stop_sequence_ends_the_answer_and_is_named(client: anthropic.Anthropic) -> None:
    fields: Any = {"model": "any", "max_tokens": 24, "messages": QUESTION, "extra_body": GREEDY}
    text = words(client.messages.create(**fields))
    stop = text[10:16]
    answer = client.messages.create(**fields, stop_sequences=["never said", stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert words(answer) == text[: text.index(stop)]
    with client.messages.stream(**fields, stop_sequences=[stop]) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)
    assert words(final) == words(answer)


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"extra_body": {"json_schema": SCHEMA, "seed": 7, "min_p": 0.1}},
    ],
    ids=["output_config", "json_schema"],
)
def test_a_schema_is_honoured(client: anthropic.Anthropic, fields: dict[str, Any]) -> None:
    answer = client.messages.create(model="any", max_tokens=200, messages=QUESTION, **fields)
    jsonschema.validate(json.loads(words(answer)), SCHEMA)


def test_structured_outputs_are_parsed(client: anthropic.Anthropic) -> None:
    answer = client.messages.parse(
        model="any",
        max_tokens=200,
        messages=[{"role": "user", "content": "Describe a person."}],
        output_format=Person,
        extra_body=GREEDY,
    )
    assert isinstance(answer.parsed_output, Person)


def test_the_beta_client_works_too(client: anthropic.Anthropic) -> None:
    asked: Any = QUESTION
    answer = client.beta.messages.create(model="any", max_tokens=4, messages=asked, betas=["x-2025-01-01"])
    assert answer.usage.output_tokens == 4


def test_reasoning_are_a_block_of_their_own(thinking: Server) -> None:
    with anthropic.Anthropic(base_url=thinking.url, api_key="none", max_retries=0) as client:
        asked: list[MessageParam] = [{"role": "user", "content": "x"}]
        fields: Any = {"model": "any", "max_tokens": 12, "messages": asked, "extra_body": GREEDY}
        on: Any = {"type": "enabled", "budget_tokens": 1024}
        answer = client.messages.create(**fields, thinking=on)
        (block,) = answer.content
        assert block.type == "thinking" and block.thinking and block.signature
        with client.messages.stream(**fields, thinking=on) as stream:
            (streamed,) = stream.get_final_message().content
        assert streamed == block
        assert words(client.messages.create(**fields, thinking={"type": "disabled"}))
        prefilled: list[MessageParam] = [*asked, {"role": "assistant", "content": "So"}]
        assert words(client.messages.create(**{**fields, "messages": prefilled}))
        again: Any = [*asked, answer.to_param(), {"role": "user", "content": "y"}]
        again[1]["content"].append({"type": "redacted_thinking", "data": "xyz"})
        assert client.messages.create(**{**fields, "messages": again}).content


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({"model": "../../etc/passwd"}, anthropic.NotFoundError, "model"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens: "),
        ({"messages": []}, anthropic.BadRequestError, "messages: "),
        (
            {"messages": [{"role": "user", "content": "hello " * 9000}]},
            anthropic.BadRequestError,
            "prompt is too long: ",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_errors_are_the_sdks_own(
    client: anthropic.Anthropic, fields: dict[str, Any], kind: type[anthropic.APIStatusError], said: str
) -> None:
    body = {"model": "any", "messages": QUESTION, "max_tokens": 1, **fields}
    with pytest.raises(kind) as refusal:
        client.post("/v1/messages", body=body, cast_to=anthropic.types.Message)
    error: Any = refusal.value.body
    expected = "not_found_error" if kind is anthropic.NotFoundError else "invalid_request_error"
    assert error["type"] == "error" and error["error"]["type"] == expected
    assert said in error["error"]["message"] and refusal.value.request_id


def test_a_disconnect_in_mid_stream_leaves_nothing_behind(client: anthropic.Anthropic, tiny: Server) -> None:
    with (
        tiny.freed_on_leaving(),
        client.messages.stream(
            model="any", max_tokens=4000, messages=QUESTION, extra_body={"ignore_eos": True}
        ) as stream,
    ):
        next(iter(stream))
