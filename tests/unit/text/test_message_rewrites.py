"""Folding: what a template refuses is said in another way, and what was said before stays where it was."""

from __future__ import annotations

import itertools
import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.errors import InvalidRequest
from cllm.testing import FakeVocabulary
from cllm.text import chat_template
from cllm.text.chat_format import Tool
from cllm.text.chat_template import ChatTemplate
from cllm.text.message_rewrites import REASONING_FIELDS, prepare
from cllm.text.prompt import Chat, PromptBuilder
from tests.profiles import examples

Message = dict[str, Any]
# Takes anything, and writes it down.
LOOSE = """\
{%- if tools %}<tool_call>{{ tools | tojson }}{% endif -%}
{%- for m in messages -%}
<{{ m.role }}>{{ m.content }}
    {%- for c in m.tool_calls or [] -%}
        [{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]
    {%- endfor -%}
{%- if m.role == 'tool' %}({{ m.name }} {{ m.tool_call_id }}){% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}"""
# Takes as little as the strictest templates that are published.
STRICT = """\
{%- if tools %}<tool_call>{{ tools | tojson }}{% endif -%}
{%- set state = namespace(next='user', ids=[]) -%}
{%- if messages[0].role == 'system' -%}
<system>{{ messages[0].content }}{% set messages = messages[1:] -%}
{%- endif -%}
{%- if not messages %}{{ raise_exception('no question') }}{% endif -%}
{%- for m in messages -%}
    {%- if m.role == 'user' -%}
        {%- if state.next != 'user' %}{{ raise_exception('roles must alternate') }}{% endif -%}
        {%- set state.next = 'assistant' -%}
    {%- elif m.role == 'tool' -%}
        {%- if m.tool_call_id not in state.ids %}{{ raise_exception('a result without a call') }}{% endif -%}
        {%- set state.next = 'assistant' -%}
    {%- elif m.role == 'assistant' -%}
        {%- if state.next != 'assistant' %}{{ raise_exception('roles must alternate') }}{% endif -%}
        {%- if not m.content and not m.tool_calls %}{{ raise_exception('it says nothing') }}{% endif -%}
        {%- if m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif -%}
        {%- set state.ids = m.tool_calls | map(attribute='id') | list if m.tool_calls else [] -%}
        {%- set state.next = 'result' if m.tool_calls else 'user' -%}
    {%- else %}{{ raise_exception('no such role') }}{% endif -%}
<{{ m.role }}>{{ m.content }}
    {%- for c in m.tool_calls or [] -%}
        {%- if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif -%}
        [{{ c.function.name }}
        {%- for key, value in c.function.arguments.items() %} {{ key }}={{ value }}{% endfor -%}
        ]
    {%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}"""
NO_SYSTEM = STRICT.replace("messages[0].role == 'system'", "false").replace("<tool_call>", "")
# Writes the last system text first, and forgets the others.
LAST_ONE = """\
{%- set found = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | list -%}
{%- if found %}<system>{{ found[-1] }}{% endif -%}
{%- for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}"""


def say(role: str, text: str | None = "", *calls: Message, **more: Any) -> Message:
    return {"role": role, "content": text, **({"tool_calls": list(calls)} if calls else {}), **more}


user, assistant, system = (partial(say, role) for role in ("user", "assistant", "system"))


def call(name: str, arguments: Any = "{}", call_id: str | None = "call_1") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str, call_id: str | None = "call_1") -> Message:
    return say("tool", text, tool_call_id=call_id)


TOOL = Tool("look")


def render(template: str, *messages: Message, tools: tuple[Tool, ...] = (), **options: Any) -> str:
    return PromptBuilder(FakeVocabulary(), ChatTemplate(template)).render(
        Chat(messages, tools, options=options)
    )


def test_what_a_template_takes_is_given_as_it_is() -> None:
    messages = [
        *(system("a"), system("b"), assistant("c"), user("d"), user("e")),
        *(assistant("f", call("look"), call("see", '{"x": 1}', "call_2")), system("g")),
        *(result("h"), result("i", "call_9"), assistant(""), user("j")),
    ]
    assert render(LOOSE, *messages) == (
        "<system>a<system>b<assistant>c<user>d<user>e"
        '<assistant>f[call_1 look {}][call_2 see {"x": 1}]<system>g'
        "<tool>h(look call_1)<tool>i(tool call_9)<assistant><user>j<assistant>"
    )


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([system("s"), system("t"), user("a")], "<system>s\n\nt<user>a"),
        ([system("s"), user("a"), system("t")], "<system>s<user>a\n\nt"),
        ([user("a"), assistant("b"), system("t"), user("c")], "<user>a<assistant>b<user>t\n\nc"),
        ([user("a"), user("b")], "<user>a\n\nb"),
        ([user("a"), assistant("b"), assistant("c"), user("d")], "<user>a<assistant>b\n\nc<user>d"),
        ([assistant("a"), user("b")], "<user><assistant>a<user>b"),
        ([system("s")], "<system>s<user>"),
        ([user("a"), assistant(), user("b")], "<user>a\n\nb"),
        ([user("a"), result("r"), user("b")], "<user>a\n\nResult of tool: r\n\nb"),
        (
            [user("a"), assistant("", call("look")), result("r"), user("b"), system("t")],
            "<user>a<assistant>[look]<tool>r\n\nb\n\nt",
        ),
        (
            [user("a"), assistant("", call("look")), user("b"), result("r")],
            "<user>a<assistant>[look]<tool>r\n\nb",
        ),
        (
            [user("a"), assistant("b", call("f"), call("g", "{x", "2")), result("r"), result("q", "2")],
            "<user>a<assistant>b[f]<tool>r<assistant>[g arguments={x]<tool>q",
        ),
        (  # only the call that nothing answers is text
            [
                user("a"),
                assistant("", call("f")),
                result("r"),
                assistant("b", call("g", "{}", "2")),
                user("c"),
            ],
            '<user>a<assistant>[f]<tool>r<assistant>b\n{"name": "g", "arguments": {}}<user>c',
        ),
        (
            [user("a"), assistant("", call("f"), call("g", "{}", "2")), result("r"), user("c")],
            '<user>a<assistant>[f]<tool>r<assistant>{"name": "g", "arguments": {}}<user>c',
        ),
    ],
)
def test_what_a_strict_template_gets(messages: list[Message], expected: str) -> None:
    assert render(STRICT, *messages) == f"{expected}<assistant>"


def test_a_template_that_forgets_a_system_text_gets_it_in_the_users_message() -> None:
    talk = [system("s"), user("a"), assistant("b"), system("t"), user("c")]
    assert render(LAST_ONE, *talk) == "<system>s<user>a<assistant>b<user>t\n\nc<assistant>"


def test_tools_in_words_where_the_template_takes_none() -> None:
    asked = [user("a"), assistant("b", call("look", '{"x": 1}')), result("r"), user("c")]
    text = render(NO_SYSTEM, *asked, tools=(TOOL,))
    assert (
        text.startswith("<user>You can call these tools") and '\n{"name": "look", "description": ""' in text
    )
    assert text.endswith(
        '\n\na<assistant>b\n{"name": "look", "arguments": {"x": 1}}<user>Result of look: r\n\nc<assistant>'
    )


def test_a_template_that_cannot_do_without_a_list_of_tools() -> None:
    template = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}"
    assert render(template, user("a")) == "a"


# Preparation ------------------------------------------------------------------------------------------


def test_calls_are_taken_as_they_come() -> None:
    calls = [
        call("f", '{"a": 1}', None),
        call("g", {"b": 2}, ""),
        call("h", None),
        call("i", "[1]", "x" * 999),
    ]
    asked, first, second, last = prepare(
        [assistant(None, *calls), result("r", None), result("q", None), result("s", "x" * 999)]
    )
    called = [(one["id"], one["function"]["arguments"]) for one in asked["tool_calls"]]
    assert called == [("call00000", {"a": 1}), ("call00001", {"b": 2}), ("call_1", {}), ("x" * 999, "[1]")]
    assert asked["content"] == ""
    assert [(one["tool_call_id"], one["name"]) for one in (first, second, last)] == [
        *(("call00000", "f"), ("call00001", "g"), ("x" * 999, "i"))
    ]


def test_only_the_assistant_calls() -> None:
    (stray,) = prepare([{**result("r"), "tool_calls": [call("f")]}])
    assert stray == {**result("r"), "name": "tool"}


def test_reasoning_goes_by_every_name() -> None:
    (message,) = prepare([assistant("a", reasoning_content="hm")])
    assert [message[name] for name in REASONING_FIELDS] == ["hm"] * len(REASONING_FIELDS)
    (quiet,) = prepare([assistant("a", reasoning_content="", thinking=None)])
    assert quiet == assistant("a")


def test_what_was_sent_is_not_changed() -> None:
    messages = [user("a"), assistant(None, call("f"), call("g", "{", "2")), result("r"), user("b")]
    before = json.dumps(messages)
    for template in (LOOSE, STRICT, NO_SYSTEM):
        render(template, *messages, tools=(TOOL,))
    assert json.dumps(messages) == before


# Conversations that grow ------------------------------------------------------------------------------


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Messages of any role in any order; each has a word of its own, each call an id, and results or none."""
    words = (f"w{number}." for number in itertools.count())
    shapes = st.sampled_from(["call_{}", "abcdefgh{}", "x" * 80 + "{}"])
    ids = ["lost"]  # of results; a call gets a new one
    messages: list[Message] = []
    for _ in range(draw(st.integers(1, 10))):
        role = draw(st.sampled_from(["system", "user", "user", "assistant", "assistant", "tool"]))
        text = next(words) if role != "assistant" or draw(st.booleans()) else ""
        calls = []
        for _ in range(draw(st.integers(0, 2)) if role == "assistant" else 0):
            ids.append(draw(shapes).format(len(ids)))
            arguments = draw(st.sampled_from(['{"x": 1}', "{broken", "", {"y": 2}]))
            calls.append(call(f"f{next(words)}", arguments, ids[-1]))
        answered = result(text, draw(st.sampled_from(ids)))
        messages.append(answered if role == "tool" else say(role, text, *calls))
    return messages


def calls(messages: list[Message]) -> list[Message]:
    return [one for message in messages for one in message.get("tool_calls") or ()]


def results(messages: list[Message]) -> set[str]:
    return {message["tool_call_id"] for message in messages if message["role"] == "tool"}


@settings(max_examples=examples(60), deadline=None)
@given(conversations(), st.sampled_from([LOOSE, STRICT, NO_SYSTEM, LAST_ONE]), st.booleans())
def test_nothing_is_lost_and_a_grown_conversation_begins_like_before(
    messages: list[Message], template: str, tools: bool
) -> None:
    builder = BUILDERS[template]
    offered = (TOOL,) if tools else ()

    def prompt(count: int, **options: Any) -> str:
        return builder.render(Chat(tuple(messages[:count]), offered, options=options))

    whole = prompt(len(messages))
    for message in messages:
        for word in [
            message["content"],
            *(one["function"]["name"] for one in message.get("tool_calls") or ()),
        ]:
            assert word in whole, word
    if any(one["id"] not in results(messages) for one in calls(messages)):
        return  # a strict template then takes none of the calls in its own form
    asked = next(
        (place for place, message in enumerate(messages) if message["role"] == "user"), len(messages)
    )
    for count in range(asked + 1, len(messages)):  # before a question there is no answer to go on from
        if messages[count]["role"] == "assistant" != messages[count - 1]["role"]:
            assert whole.startswith(prompt(count, add_generation_prompt=False)), count


BUILDERS = {
    source: PromptBuilder(FakeVocabulary(), ChatTemplate(source))
    for source in (LOOSE, STRICT, NO_SYSTEM, LAST_ONE)
}


# Variables --------------------------------------------------------------------------------------------


def test_templates_are_given_what_llama_cpp_gives() -> None:
    dates = "{{ date_string == strftime_now('%d %b %Y') }} {{ datetime == strftime_now('%b %d %Y') }}"
    template = "{{ enable_thinking }} {{ documents is none }} {{ tools is none }} [{{ functions }}] " + dates
    assert render(template, user("a")) == "True True True [] True True"
    changed = render(template, user("a"), enable_thinking=False, date_string="now", documents=[1])
    assert changed == "False False True [] False True"
    counted = "<tool_call>{{ tools | length }}{{ functions }}"
    assert render(counted, user("a"), tools=(TOOL,)).startswith("<tool_call>1[\n  {")


SWITCHES = (
    "{{ messages[0].content }}{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }} {{ thinking_mode }}"
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "True   "),
        ({"enable_thinking": False}, "False False  disabled"),
        ({"thinking": False}, "False False  disabled"),
        ({"enable_thinking": True}, "True True  "),
        ({"reasoning_effort": "medium", "enable_thinking": True}, "True True medium "),
        ({"reasoning_effort": "none", "enable_thinking": False}, "False False low disabled"),
        ({"thinking": True, "enable_thinking": False}, "False True  disabled"),
    ],
)
def test_the_switch_of_the_reasoning_has_many_names(options: dict[str, Any], expected: str) -> None:
    assert render(SWITCHES, user(""), **options) == expected


KNOWN = (
    "{% if reasoning_effort not in ['no_think', 'high', 'low'] %}{{ raise_exception('effort') }}{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "effort", "expected"),
    [
        (KNOWN, "none", "no_think"),
        (KNOWN, "medium", "high"),
        (KNOWN, "minimal", "low"),
        (KNOWN, "high", "high"),
        ("{{ 'none' if reasoning_effort == 'none' }}|", "none", "none|none"),
        ("{{ raise_exception('no') if reasoning_effort }}", "high", ""),
    ],
)
def test_an_effort_that_the_template_refuses_is_replaced(source: str, effort: str, expected: str) -> None:
    text = render(source + "{{ reasoning_effort }}", user("a"), reasoning_effort=effort)
    assert text == expected


def test_a_template_that_runs_too_long_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_LIMIT_S", 0.02)
    endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="computes for more than"):
        render(endless, user("a"))
