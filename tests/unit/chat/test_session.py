"""Chat sessions through `LLM` and `AsyncLLM`, on a runner that answers by script; what a prompt decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from cllm.chat.reply import ChatReply, ToolCall
from cllm.config import EngineConfig
from cllm.errors import BadBatch, InvalidRequest
from cllm.llm import LLM, AsyncLLM
from cllm.testing import CHAT_TEMPLATE, FakeVocabulary, ScriptedRunner, say
from cllm.text.chat_format import ChatFormat, Tool
from cllm.text.prompt import Chat, PreparedPrompt, PromptBuilder
from cllm.types import ConstraintKind, ConstraintSpec, FinishReason, Prompt, ReasoningMarks
from tests.driver.thread_engine import make_llm
from tests.unit.text.formats import FORMATS

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 40}}\n</tool_call>'
SCRIPT = f"<think>hm, two</think>So: {CALL}{CALL}"


def make_runner(config: EngineConfig) -> ScriptedRunner:
    return ScriptedRunner(sequences=4, cells=8192, chat_template=CHAT_TEMPLATE)


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": say(text)}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm(LLM, make_runner) as opened:
        yield opened


def check_parts(reply: ChatReply) -> None:
    assert (reply.reasoning, reply.text.strip()) == ("hm, two", "So:")
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("add", '{"a": 2, "b": 40}')] * 2
    assert reply.finish_reason is FinishReason.STOP and reply.usage.completion_tokens >= len(SCRIPT)


def test_a_reply_is_split_into_its_parts(llm: LLM) -> None:
    check_parts(llm.chat(ask(SCRIPT), tools=[ADD], max_tokens=400))


def test_without_tools_a_call_is_text_and_reasoning_can_stay_there(llm: LLM) -> None:
    assert CALL in llm.chat(ask(SCRIPT), max_tokens=400).text
    raw = llm.chat(ask(SCRIPT), reasoning_format="none", max_tokens=400)
    assert raw.text == SCRIPT and raw.reasoning == ""
    assert "".join(llm.stream(ask(SCRIPT), max_tokens=400)) == SCRIPT


def test_chunks_name_their_choice_and_add_up(llm: LLM) -> None:
    *chunks, last = llm.chat(ask(SCRIPT), tools=[ADD], n=3, max_tokens=400, stream=True)
    assert last.reply is not None and len(last.reply.choices) == 3
    for index, reply in enumerate(last.reply.choices):
        check_parts(reply)
        own = [chunk for chunk in chunks if chunk.choice == index]
        assert "".join(chunk.reasoning for chunk in own) == reply.reasoning
        assert "".join(chunk.text for chunk in own) == reply.text
        calls: dict[str, ToolCall] = {}
        for piece in (chunk.tool_call for chunk in own if chunk.tool_call is not None):
            before = calls[piece.id].arguments if piece.id in calls else ""
            calls[piece.id] = ToolCall(piece.id, piece.name, before + piece.arguments)
        assert tuple(calls.values()) == reply.tool_calls


def test_one_call_where_several_are_not_allowed(llm: LLM) -> None:
    reply = llm.chat(ask(SCRIPT), tools=[ADD], parallel_tool_calls=False, max_tokens=400)
    assert len(reply.tool_calls) == 1


def test_a_failing_request_raises_its_error(llm: LLM) -> None:
    with pytest.raises(BadBatch):
        llm.chat([{"role": "user", "content": say("a", fails=True)}], max_tokens=4)


async def test_async_chats_are_the_same() -> None:
    async with make_llm(AsyncLLM, make_runner) as model:
        check_parts(await model.chat(ask(SCRIPT), tools=[ADD], max_tokens=400))
        chunks = [chunk async for chunk in model.chat(ask(SCRIPT), n=2, max_tokens=400, stream=True)]
        assert chunks[-1].reply is not None and len(chunks[-1].reply.choices) == 2
        assert {chunk.choice for chunk in chunks} == {0, 1}
        with pytest.raises(InvalidRequest, match="tool_choice"):
            await model.chat(ask("x"), tool_choice="required")
        async for _ in model.stream(ask("x" * 300), max_tokens=400):
            break
        assert await model.generate("x", max_tokens=1)


AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": AGE}}
TAKES = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"const": 2}, "b": {"const": 40}}},
    },
}


@pytest.mark.parametrize("parallel", [True, False])
def test_beside_a_schema_calls_stay_possible(llm: LLM, parallel: bool) -> None:
    given: Any = {"tools": [TAKES], "response_format": FORM, "parallel_tool_calls": parallel}
    reply = llm.chat(ask(CALL), max_tokens=400, **given)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("add", '{"a": 2, "b": 40}')]
    assert reply.text.strip() == ""


def test_beside_tools_the_text_follows_the_schema(llm: LLM) -> None:
    given: Any = {"tools": [TAKES], "response_format": FORM, "max_tokens": 400}
    reply = llm.chat(ask('{"age":31}'), **given)
    assert (reply.text, reply.tool_calls) == ('{"age":31}', ())
    *chunks, last = llm.chat(ask('{"age":31}'), stream=True, **given)
    assert "".join(chunk.text for chunk in chunks) == '{"age":31}' and last.reply is not None
    free = llm.chat(ask("Thirty-one."), **{**given, "max_tokens": 3})
    assert free.text[:1] in ("{", "<", ""), "words are neither a call nor the schema's"


def test_a_forced_call_drops_the_form(llm: LLM) -> None:
    script = CALL.removeprefix("<tool_call>\n")
    reply = llm.chat(ask(script), tools=[TAKES], tool_choice="required", response_format=FORM, max_tokens=400)
    assert [call.name for call in reply.tool_calls] == ["add"]


def test_an_object_that_is_no_call_is_text(llm: LLM) -> None:
    reply = llm.chat(ask('{"name": "other", "age": 3}'), tools=[TAKES], max_tokens=400)
    assert reply.tool_calls == () and "other" in reply.text


class KnownFormat(PromptBuilder):
    """A builder whose template writes in a given format, and whose prompt is inside the reasoning or not."""

    def __init__(self, known: ChatFormat, *, thinking: bool = False) -> None:
        super().__init__(FakeVocabulary(), None)
        self._known, self._thinking = known, thinking

    def describe(self, *, tools: bool) -> ChatFormat:
        return self._known

    def tokenize(self, chat: Chat, max_tokens: int = 0, *, opened: bool = False) -> tuple[Prompt, bool]:
        return Prompt(), self._thinking


def place(known: ChatFormat, form: ConstraintSpec | None, *, thinking: bool, **fields: Any) -> PreparedPrompt:
    chat = Chat(({"role": "user", "content": "?"},), **fields)
    return KnownFormat(known, thinking=thinking).prepare(chat, form, 0, lambda _: None)


SCHEMA = ConstraintSpec(ConstraintKind.JSON_SCHEMA, "{}")


def test_a_constraint_waits_for_the_end_of_the_reasoning() -> None:
    for thinking, triggers in ((True, ("</think>",)), (False, ())):
        constraint = place(FORMATS["hermes"], SCHEMA, thinking=thinking).constraint
        assert constraint is not None and constraint.triggers == triggers
    channels = place(FORMATS["harmony"], SCHEMA, thinking=False).constraint
    assert channels is not None and "<|channel|>final<|message|>" in channels.triggers


def test_a_reasoning_limit_has_the_markers_of_the_format() -> None:
    known = msgspec.structs.replace(FORMATS["hermes"], opening_ids=(1, 2), closing_ids=(3,))
    limit = place(known, SCHEMA, thinking=True, reasoning_budget=7).reasoning
    assert limit is not None
    assert (limit.budget, limit.opening, limit.closing, limit.inside) == (7, (1, 2), (3,), True)
    assert place(known, SCHEMA, thinking=False, reasoning_budget=7).reasoning is None, "no reasoning"
    assert place(known, SCHEMA, thinking=True).reasoning is None


def test_calls_that_are_not_forced_begin_outside_the_reasoning() -> None:
    for thinking in (False, True):
        constraint = place(FORMATS["coder"], None, thinking=thinking, tools=(Tool("add"),)).constraint
        assert constraint is not None and constraint.triggers == ("<tool_call>",)
        assert constraint.reasoning == ReasoningMarks(("<think>",), ("</think>",), thinking)


def test_tools_that_make_no_grammar_can_be_called_where_none_is_forced(llm: LLM) -> None:
    odd = {"type": "object", "properties": {"a": {"$ref": "#/$defs/nowhere"}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": odd}}
    reply = llm.chat(ask(CALL), tools=[tool], max_tokens=400)
    assert [call.name for call in reply.tool_calls] == ["add"]
    with pytest.raises(InvalidRequest):
        llm.chat(ask(CALL), tools=[tool], tool_choice="required")
