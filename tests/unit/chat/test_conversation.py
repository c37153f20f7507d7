"""`Conversation`: how messages are built, and which tools a choice leaves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from cllm.chat import conversation
from cllm.chat.conversation import (
    Conversation,
    MessageBuilder,
    Pictures,
    ToolChoice,
    normalize_messages,
    write_arguments,
)
from cllm.errors import InvalidRequest
from cllm.text.chat_format import Tool

TOOLS = [Tool("a"), Tool("b")]


@pytest.mark.parametrize(
    ("choice", "names", "forced", "parallel"),
    [
        (ToolChoice(), ["a", "b"], False, True),
        (ToolChoice(mode="none"), [], False, True),
        (ToolChoice(mode="required", parallel=False), ["a", "b"], True, False),
        (ToolChoice(mode="required", names=("b",)), ["b"], True, True),
        (ToolChoice(names=("a",)), ["a"], False, True),
    ],
)
def test_a_choice_leaves_tools(choice: ToolChoice, names: list[str], forced: bool, parallel: bool) -> None:
    choice.check(["a", "b"])
    applied = Conversation(messages=(), **choice.apply(TOOLS))
    assert [tool.name for tool in applied.tools] == names
    assert (applied.forced, applied.parallel) == (forced, parallel)


@pytest.mark.parametrize(
    ("choice", "names", "field"),
    [
        (ToolChoice(), ["a", "a"], "tools: "),
        (ToolChoice(mode="required"), [], "tool_choice: "),
        (ToolChoice(names=("c",)), ["a"], "tool_choice: 'c'"),
    ],
)
def test_an_impossible_choice_is_refused(choice: ToolChoice, names: list[str], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        choice.check(names)


def normalize(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return list(normalize_messages(messages))


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
NOTE = "[image_url: left out, this model accepts text only]"


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_parts_and_roles_are_normalized() -> None:
    (developer,) = normalize({"role": "developer", "content": [text("a"), text("b")]})
    assert developer == {"role": "system", "content": "a\nb"}
    (named,) = normalize({"role": "user", "content": None, "name": "Ann"})
    assert named == {"role": "user", "content": "", "name": "Ann"}
    called, result = normalize(
        {"role": "assistant", "function_call": {"name": "now", "arguments": "{}"}},
        {"role": "function", "name": "now", "content": "noon"},
    )
    assert called["tool_calls"] == [{"function": {"name": "now", "arguments": "{}"}}]
    assert result == {"role": "tool", "name": "now", "content": "noon"}


@pytest.mark.parametrize(
    "message",
    [
        {"content": "x", "reasoning_content": "hm"},
        {"content": "x", "reasoning": "hm"},
        {"content": "x", "thinking": "hm", "reasoning_content": None},
        {"content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, text("x")]},
        {"content": [{"type": "thinking", "thinking": [text("hm")]}, text("x")]},
        {"content": [{"type": "reasoning", "text": "hm"}, {"type": "refusal", "refusal": "x"}]},
    ],
)
def test_reasoning_comes_under_many_names(message: dict[str, Any]) -> None:
    (found,) = normalize({"role": "assistant", **message})
    assert found == {"role": "assistant", "content": "x", "reasoning_content": "hm"}


def test_an_image_is_refused_in_the_question_and_noted_in_the_history() -> None:
    asked = {"role": "user", "content": [text("What is this?"), IMAGE]}
    answer = {"role": "assistant", "content": "A cat."}
    shown = {"role": "tool", "tool_call_id": "1", "content": [IMAGE]}
    for question in ([asked], [answer, asked], [asked, {"role": "user", "content": "?"}], [asked, answer]):
        with pytest.raises(InvalidRequest, match="messages: content of type 'image_url' is not supported"):
            normalize(*question)
    history = normalize(asked, answer, {"role": "user", "content": "Sure?"})
    assert history[0]["content"] == f"What is this?\n{NOTE}"
    assert normalize(asked, answer, shown)[2]["content"] == NOTE, "a tool's image ends no conversation"


@pytest.mark.parametrize(
    ("given", "written"),
    [("", "{}"), (None, "{}"), ("{broken", "{broken"), ({"a": "é"}, '{"a": "é"}'), ([1], "[1]")],
)
def test_arguments_are_taken_as_they_come(given: Any, written: str) -> None:
    assert write_arguments(given) == written


@pytest.mark.parametrize(
    ("last", "continued", "messages", "prefill", "thoughts"),
    [
        ({"content": "It"}, True, 1, "It", ""),
        ({"content": "It"}, False, 2, "", ""),
        ({"content": ""}, True, 1, "", ""),
        ({"content": "It", "reasoning_content": "hm"}, True, 1, "It", "hm"),
        ({"content": "", "reasoning_content": "hm"}, True, 1, "", "hm"),
        ({"content": "It", "tool_calls": [{}]}, True, 2, "", ""),
    ],
)
def test_what_a_reply_continues(
    last: dict[str, Any], continued: bool, messages: int, prefill: str, thoughts: str
) -> None:
    asked = ({"role": "user", "content": "?"}, {"role": "assistant", **last})
    conversation = Conversation(messages=asked, continued=continued)
    chat = conversation.for_template()
    assert len(chat.messages) == messages
    assert (chat.prefill, chat.thoughts) == (prefill, thoughts)


@pytest.mark.parametrize(
    ("options", "think"),
    [
        ({}, True),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"thinking": False}, False),
    ],
)
def test_a_switch_closes_the_reasoning(options: dict[str, Any], think: bool) -> None:
    conversation = Conversation(messages=({"role": "user", "content": "?"},), options=options)
    assert conversation.for_template().think is think


def test_messages_are_put_together() -> None:
    builder = MessageBuilder("messages")
    builder.add_text("system", "one")
    builder.add_text("system", "two")
    builder.add_text("user", "a")
    builder.add_text("user", "b")
    builder.add_reasoning("hm")
    builder.add_text("assistant", "c")
    builder.add_tool_call("1", "look", "{}")
    builder.add_tool_call("2", "look", "{}")
    builder.add_tool_result("1", "found")
    builder.add_text("assistant", "d")
    builder.add_text("assistant", "e")
    assert [(message["role"], message["content"]) for message in builder.build()] == [
        ("system", "one\ntwo"),
        ("user", "a"),
        ("user", "b"),
        ("assistant", "c"),
        ("tool", "found"),
        ("assistant", "d"),
        ("assistant", "e"),
    ]
    assert builder.build()[3]["reasoning_content"] == "hm"
    assert [call["id"] for call in builder.build()[3]["tool_calls"]] == ["1", "2"]


def test_consecutive_messages_can_be_combined() -> None:
    builder = MessageBuilder("messages", combine=True)
    for role, text in (("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d")):
        builder.add_text(role, text)
    assert [message["content"] for message in builder.build()] == ["a\nb", "c\nd"]


def test_texts_of_a_message_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text was added to a copy of all before it: 8 MiB in 4,096 messages were 16 GiB of copies."""
    joined: list[int] = []

    class Joint(str):
        def join(self, parts: Iterable[str]) -> str:
            joined.append(1)
            return super().join(parts)

    monkeypatch.setattr(conversation, "MESSAGE_JOINT", Joint("\n"))
    builder = MessageBuilder("messages", combine=True)
    for number in range(100):
        builder.add_text("user", str(number))
    assert builder.build() == ({"role": "user", "content": "\n".join(map(str, range(100)))},)
    assert len(joined) == 1


def test_pictures_become_markers_in_their_line() -> None:
    builder = MessageBuilder("messages", sees=True)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    asked = {
        "role": "user",
        "content": [text("a"), text("b"), image, text("c"), {**image, "image_url": "BB=="}],
    }
    (message,) = normalize_messages([asked], builder)
    first, second = builder.pictures
    assert message["content"] == f"a\nb{first}c{second}"
    assert [*builder.pictures.values()] == ["AA==", "BB=="]
    other = {"role": "user", "content": [{"type": "input_file"}]}
    with pytest.raises(
        InvalidRequest, match="'input_file' is not supported: this model accepts text and pict"
    ):
        normalize_messages([other], builder)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("data:image/png,abc", "must end its head with ;base64"),
        (None, "has no picture"),
        ({"url": 7}, "has no picture"),
        ("data:image/png;base64,", "has no picture"),
    ],
)
def test_what_is_no_picture_is_refused_with_advice(source: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        Pictures().add("image_url", source, "messages")
