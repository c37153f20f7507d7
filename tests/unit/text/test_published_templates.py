"""Chat templates with the traits of those that are published: they render, and refuse in words."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from cllm.errors import InvalidRequest
from cllm.testing import FakeVocabulary
from cllm.text.chat_format import Tool
from cllm.text.chat_template import ChatTemplate
from cllm.text.prompt import Chat, PromptBuilder

USER = {"role": "user", "content": "Is 1 < 2 & 3?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "Yes."}
CALL = {"id": "call00001", "function": {"name": "add", "arguments": {"a": 1, "b": "é<"}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "3", "name": "add", "tool_call_id": "call00001"}
TOOL = Tool("add", "Adds", {"type": "object", "properties": {"a": {"type": "integer"}}})


class Spelled(FakeVocabulary):
    begin_text = "<s>"
    end_text = "</s>"


def rendered(template: str, *messages: dict[str, Any], tools: tuple[Tool, ...] = ()) -> str:
    return PromptBuilder(Spelled(), ChatTemplate(template)).render(Chat(messages, tools))


ALTERNATING = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('no room for a system role') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<' ~ role ~ '>' ~ message['content'] | trim }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<model>' }}{% endif %}"""


def test_roles_that_must_alternate() -> None:
    assert rendered(ALTERNATING, USER, ASSISTANT, USER).startswith("<s><user>Is 1 < 2 & 3?<model>Yes.<user>")
    assert rendered(ALTERNATING, USER, ASSISTANT, ASSISTANT, SYSTEM, USER, USER) == (
        "<s><user>Is 1 < 2 & 3?<model>Yes.\n\nYes.<user>Be brief.\n\nIs 1 < 2 & 3?\n\nIs 1 < 2 & 3?<model>"
    )


def test_a_refused_system_role_goes_into_the_first_message() -> None:
    for template in (ALTERNATING, ALTERNATING.replace("no room for a system role", "roles!")):
        assert rendered(template, SYSTEM, USER) == "<s><user>Be brief.\n\nIs 1 < 2 & 3?<model>"
        assert rendered(template, SYSTEM) == "<s><user>Be brief.<model>"


def test_tools_go_where_a_template_without_a_system_role_takes_them() -> None:
    text = rendered(ALTERNATING, USER, CALLING_AS_SENT, RESULT, tools=(TOOL,))
    assert '{"name": "add", "description": "Adds"' in text and "Result of add: 3" in text
    assert text.index("You can call these tools") < text.index("Is 1 < 2")


CALLING_AS_SENT = {
    **CALLING,
    "tool_calls": [{"id": "call00001", "function": {"name": "add", "arguments": '{"a": 1}'}}],
}

WITH_TOOLS = """
{%- set state = namespace(open=false, calls=0, last='') -%}
{%- if messages[0].role == 'system' -%}
    {%- set system = messages[0].content -%}{%- set rest = messages[1:] -%}
{%- else -%}
    {%- set system = '' -%}{%- set rest = messages -%}
{%- endif -%}
{%- if tools is not none and tools is defined -%}
# Tools
{% for tool in tools -%}
{%- set function = tool.function if tool.function is defined else tool -%}
{{ function | tojson(indent=4) }}
{% endfor -%}
{%- endif -%}
{%- if date_string is not defined -%}
    {%- if strftime_now is defined -%}{%- set date_string = strftime_now('%Y') -%}{%- endif -%}
{%- endif -%}
Year: {{ date_string }} {{ system }}
{%- for message in rest -%}
    {%- if message.tool_calls is defined and message.tool_calls -%}
        {%- for call in message.tool_calls -%}
            {%- set state.calls = state.calls + 1 -%}
            {%- if call.id | length != 9 -%}{{- raise_exception('ids have nine letters') -}}{%- endif -%}
            {%- set arguments = call.function.arguments | tojson -%}
            <tool_call>{"name": "{{ call.function.name }}", "arguments": {{ arguments }}}</tool_call>
        {%- endfor -%}
    {%- elif message.role == 'tool' or message['role'] == 'ipython' -%}
        <result>{{ message.content if message.content is string else message.content | tojson }}</result>
    {%- else -%}
        |{{ message.role }}|{{ message.content }}
    {%- endif -%}
    {%- set state.last = message.role -%}
{%- endfor -%}
[{{ state.calls }},{{ state.last }}]{{ eos_token }}"""


def test_tools_namespaces_slices_dates_and_indented_json() -> None:
    text = rendered(WITH_TOOLS, SYSTEM, USER, CALLING, RESULT, tools=(TOOL,))
    assert json.dumps(TOOL.for_template()["function"], indent=4, ensure_ascii=False) in text
    assert f"Year: {time.strftime('%d %b %Y')} Be brief.|user|Is 1 < 2 & 3?" in text
    assert (
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "é<"}}</tool_call><result>3</result>' in text
    )
    assert text.endswith("[1,tool]</s>")
    assert "# Tools" not in rendered(WITH_TOOLS, USER)


def test_a_template_that_wants_short_ids_gets_them() -> None:
    call = {"id": "call_0123456789abcdef", "function": {"name": "add", "arguments": "{}"}}
    result = {**RESULT, "tool_call_id": call["id"]}
    text = rendered(WITH_TOOLS, USER, {**CALLING, "tool_calls": [call]}, result, tools=(TOOL,))
    assert '"name": "add", "arguments": {}}</tool_call><result>3</result>' in text


def test_generation_blocks_show_their_inside_and_see_the_loop() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{{ loop.index }}{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
    )
    assert rendered(template, SYSTEM, ASSISTANT) == "Be brief.;Yes.2"


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("{'b': 'é<>&', 'a': [1]} | tojson", '{"b": "é<>&", "a": [1]}'),
        ("{'b': 'é'} | tojson(ensure_ascii=true)", '{"b": "\\u00e9"}'),
        ("{'b': 1, 'a': 2} | tojson(sort_keys=true)", '{"a": 2, "b": 1}'),
        ("{'a': [1, 2]} | tojson(separators=(',', ':'))", '{"a":[1,2]}'),
        ("'<a & b>'", "<a & b>"),
        ("none | tojson", "null"),
    ],
)
def test_json_is_written_as_transformers_does(expression: str, expected: str) -> None:
    assert rendered(f"{{{{ {expression} }}}}", USER) == expected


def test_macros_thoughts_and_variables_of_the_client() -> None:
    template = """
{%- macro turn(role, text) -%}<{{ role }}>{{ text }}{%- endmacro -%}
{%- for m in messages %}{{ turn(m.role, m.content) }}{% endfor -%}
{{- turn('assistant', '') -}}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{ '<think>\\n\\n</think>\\n\\n' }}
{%- else -%}
{{ '<think>\\n' }}
{%- endif -%}"""
    builder = PromptBuilder(Spelled(), ChatTemplate(template))
    assert builder.tokenize(Chat((USER,)))[1]
    assert not builder.tokenize(Chat((USER,), think=False))[1]
    tokens, thinking = builder.tokenize(Chat((USER,), options={"enable_thinking": False}))
    assert not thinking and bytes(tokens).endswith(b"<assistant><think>\n\n</think>\n\n")


def test_a_template_that_does_not_compile_harms_only_chats() -> None:
    builder = PromptBuilder(Spelled(), ChatTemplate("fine\n{% for %}"))
    with pytest.raises(InvalidRequest, match="cannot be used: line 2"):
        builder.render(Chat((USER,)))


@pytest.mark.parametrize("expression", ["1 / 0", "messages[9].content.x", "messages | tojson(indent=99)"])
def test_whatever_a_template_raises_is_a_client_error(expression: str) -> None:
    with pytest.raises(InvalidRequest, match="the model's chat template"):
        rendered(f"{{{{ {expression} }}}}", USER)
