"""`/v1/messages`: every event is what Anthropic's SDK says it is, and they add up to the whole message."""

from __future__ import annotations

import json
import logging
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from pydantic import TypeAdapter

from cllm.chat.reply import ReplyBuilder
from cllm.server.dialects.anthropic import MessageRenderer, MessagesBody
from cllm.text.output_parser import ContentText, OutputEvent, ToolCallArguments, ToolCallStart
from cllm.types import FinishReason
from tests.unit.chat.replies import GivenParser, Step, answers, build, failed, render, step


@cache
def sdk(name: str) -> TypeAdapter[Any]:
    """A type of Anthropic's SDK, imported by the first test that needs it: collecting takes seconds less."""
    import anthropic.types

    return TypeAdapter(getattr(anthropic.types, name))


FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def rendered(steps: list[Step]) -> list[dict[str, Any]]:
    reply = ReplyBuilder(GivenParser(steps))
    answer = MessageRenderer(reply, "msg_1", "m", 12)
    events = [*answer.start(), *render(steps, reply, answer.render)]
    return [msgspec.to_builtins(event) for event in events]


def whole(steps: list[Step]) -> dict[str, Any]:
    message: dict[str, Any] = msgspec.to_builtins(MessageRenderer(build(steps), "msg_1", "m", 12).whole())
    return message


@settings(deadline=None)
@given(answers())
def test_any_answer_is_a_well_formed_stream(steps: list[Step]) -> None:
    start, ping, *events, delta, stop = rendered(steps)
    assert start["message"]["content"] == [] and ping == {"type": "ping"}
    assert delta["type"] == "message_delta" and stop == {"type": "message_stop"}
    for event in (start, *events, delta, stop):
        sdk("RawMessageStreamEvent").validate_python(event)
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    signatures: list[str] = []
    open_block: int | None = None
    for event in events:
        if event["type"] == "content_block_start":
            assert open_block is None and event["index"] == len(blocks)
            open_block = event["index"]
            blocks.append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_block
            if event["delta"]["type"] == "signature_delta":
                signatures.append(event["delta"]["signature"])
            else:
                texts[-1] += event["delta"][FIELDS[event["delta"]["type"]]]
        else:
            assert event == {"type": "content_block_stop", "index": open_block}
            open_block = None
    assert open_block is None
    message = whole(steps)
    sdk("Message").validate_python(message)
    assert [block["type"] for block in message["content"]] == [block["type"] for block in blocks]
    for block, text in zip(message["content"], texts, strict=True):
        if block["type"] != "tool_use":
            assert block[block["type"]] == text
    thoughts = [block for block in message["content"] if block["type"] == "thinking"]
    assert [block["signature"] for block in thoughts] == signatures and all(signatures)
    assert {**delta["delta"], "usage": delta["usage"]} == {
        key: message[key] for key in ("stop_reason", "stop_sequence", "usage")
    }


@pytest.mark.parametrize("arguments", ["", '{"a": 1', "[1]", "1", '"x"', "null", "[" * 100_000])
def test_arguments_that_are_no_object_are_none(arguments: str) -> None:
    events: list[OutputEvent] = [
        ToolCallStart(0, "look"),
        *([ToolCallArguments(0, arguments)] if arguments else []),
    ]
    (block,) = whole([step(*events, end=FinishReason.LENGTH)])["content"]
    assert block["input"] == {}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("engine_died", "api_error"),
        ("shutting_down", "overloaded_error"),
        ("queue_full", "rate_limit_error"),
        ("invalid_request", "invalid_request_error"),
    ],
)
def test_a_failure_is_told_and_ends_the_stream(code: str, kind: str) -> None:
    *_, last = rendered([step(ContentText("a")), failed(code, "it broke")])
    assert last == {"type": "error", "error": {"type": kind, "message": "it broke"}}
    assert json.dumps(last)


BILLING = "x-anthropic-billing-header: cc_version=2.1.197.f3a; cc_entrypoint=cli; cch=00000;"


def system_text(system: Any, *messages: dict[str, Any]) -> str:
    """All system texts of a conversation, as the template gets them."""
    asked = [{"role": "user", "content": BILLING}, *messages]
    body = MessagesBody.parse({"max_tokens": 1, "system": system, "messages": asked})
    rendered = body.conversation().messages
    assert any(message["content"] == BILLING for message in rendered), "a user may write what they want"
    return "|".join(message["content"] for message in rendered if message["role"] == "system")


def block(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("system", "left"),
    [
        (BILLING, ""),
        (f"{BILLING}\nBe brief.", "Be brief."),
        ([block(BILLING), block("You are an agent."), block("Be brief.")], "You are an agent.\nBe brief."),
        ([block("You are an agent."), block(f"{BILLING}\nBe brief.")], "You are an agent.\nBe brief."),
        (f"Be brief.\n{BILLING}", f"Be brief.\n{BILLING}"),
        (f" {BILLING}", f" {BILLING}"),
        ("x-anthropic-billing-headers are lines.", "x-anthropic-billing-headers are lines."),
    ],
    ids=["alone", "first line", "first block", "later block", "later line", "blank before", "other word"],
)
def test_the_billing_header_of_claude_code_is_dropped(system: Any, left: str) -> None:
    assert system_text(system) == left


def test_a_system_message_in_mid_conversation_has_no_billing_header_either(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    header = {"role": "system", "content": BILLING}
    reminder = {"role": "system", "content": [block(f"{BILLING}\nTasks are open.")]}
    assert system_text("Be brief.", header, reminder) == "Be brief.|Tasks are open."
    assert caplog.text.count("dropped the line x-anthropic-billing-header") == 2
    assert "cc_version" not in caplog.text
