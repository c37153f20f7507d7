"""`Conversation`: how messages are built, and which tools a choice leaves."""

from __future__ import annotations

import pytest

from cllm.chat.conversation import Conversation, MessageBuilder, ToolChoice, normalize_message
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


def test_parts_and_developer_messages_are_normalized() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normalize_message({"role": "developer", "content": parts}) == {"role": "system", "content": "ab"}
    assert normalize_message({"role": "user", "content": None, "name": "Ann"}) == {
        "role": "user",
        "content": "",
        "name": "Ann",
    }


def test_messages_are_put_together() -> None:
    builder = MessageBuilder()
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
    assert [(message["role"], message["content"]) for message in builder.messages] == [
        ("system", "one\ntwo"),
        ("user", "a"),
        ("user", "b"),
        ("assistant", "c"),
        ("tool", "found"),
        ("assistant", "d"),
        ("assistant", "e"),
    ]
    assert builder.messages[3]["reasoning_content"] == "hm"
    assert [call["id"] for call in builder.messages[3]["tool_calls"]] == ["1", "2"]


def test_consecutive_messages_can_be_combined() -> None:
    builder = MessageBuilder(combine=True)
    for role, text in (("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d")):
        builder.add_text(role, text)
    assert [message["content"] for message in builder.messages] == ["a\nb", "c\nd"]
