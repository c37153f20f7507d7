"""Templates within bounds: those that are published work, those that are hostile end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from cllm.errors import ConfigError, InvalidRequest
from cllm.text.chat_template import BUILTIN_TEMPLATES, MAX_ADDED, ChatTemplate, read_template

MESSAGES = [{"role": "user", "content": "hello"}]


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source).render(**{"messages": MESSAGES, **variables})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].role ~ ':' ~ messages[0]['content'] }}", "user:hello"),
        ("{{ 'a' + 'b' * 3 }}{{ 7 % 4 }}{{ 2 ** 10 }}", "abbb31024"),
        ("{{ messages | tojson }}", json.dumps(MESSAGES)),
        ("{{ messages | tojson(indent=2, ensure_ascii=False) }}", json.dumps(MESSAGES, indent=2)),
        ("{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m }}{% endfor %}.", "."),
        (
            "{% set n = namespace(n=0) %}{% for i in range(5) %}{% set n.n = n.n + i %}{% endfor %}{{ n.n }}",
            "10",
        ),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') }}{{ f(x='b') }}", "<a><b>"),
        ("{{ messages | map(attribute='role') | join(',') | upper }}", "USER"),
        ("{{ 'x' if tools is defined and tools else 'y' }}", "y"),
        ("{{- '  a  ' | trim -}}  {{ 'a-b'.split('-')[1] }}", "ab"),
        ("{% if true %}\n  kept\n{% endif %}\n", "  kept\n"),
        ("{% for m in messages %}{% generation %}{{ loop.index }}{% endgeneration %}{% endfor %}", "1"),
        ("{{ {'b': 'é<>&', 'a': [1]} | tojson }}", '{"b": "é<>&", "a": [1]}'),
        ("{{ {'b': 'é'} | tojson(ensure_ascii=true) }}", '{"b": "\\u00e9"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", '{"a": 2, "b": 1}'),
        ("{{ {'a': [1, 2]} | tojson(separators=(',', ':')) }}{{ none | tojson }}", '{"a":[1,2]}null'),
        ("{{ '<a & b>' }}", "<a & b>"),
    ],
)
def test_what_published_templates_do(source: str, expected: str) -> None:
    assert render(source) == expected


def test_the_bound_grows_with_what_the_messages_hold() -> None:
    long = "x" * (3 * MAX_ADDED)
    assert render("{{ messages[0].content }}!", messages=[{"content": long}]) == long + "!"
    with pytest.raises(InvalidRequest, match="more than"):
        render("{% for i in range(99999) %}{{ messages[0].content * 9 }}{% endfor %}")


def test_an_endless_template_is_stopped_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cllm.text.chat_template.RENDER_LIMIT_S", 0.25)
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match=r"computes for more than 0\.25 s"):
        render("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    assert time.thread_time() - began < 10, "it would compute for minutes"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.extend(messages) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ lipsum(n=99999) }}",
        "{{ 'x' | center(10 ** 9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ messages | tojson(indent=10 ** 9) }}",
        "{{ ([0] * 10 ** 6) * 10 ** 6 }}",
        "{{ raise_exception('no') }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% extends 'x' %}",
        "fine\n{% for %}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content.x }}",
        "x" * (MAX_ADDED + 1),
    ],
    ids=lambda source: source[:30],
)
def test_what_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^the model's chat template ") as error:
        render(source)
    assert error.value.field == "messages" and "\n" not in str(error.value)


def test_nothing_is_worked_out_while_compiling() -> None:
    """A constant expression is computed under the clock, or it would hang the start."""
    template = ChatTemplate("{% if false %}{{ (9 ** 999) ** 999 }}{{ 'x' * 10 ** 12 }}{% endif %}ok")
    assert template.render(messages=MESSAGES) == "ok"


def test_the_guard_ends_a_process_that_no_count_can_stop() -> None:
    source = (
        "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(70) %}{% set ns.a = [ns.a, ns.a] %}"
        "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}"
    )
    code = (
        "from functools import partial\n"
        "from cllm.text.chat_template import ChatTemplate, deadly_guard\n"
        "guard = partial(deadly_guard, 0.5)\n"
        "print(ChatTemplate('{{ 1 + 1 }}', guard).render(), flush=True)\n"
        f"ChatTemplate({source!r}, guard).render()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert done.stdout == b"2\n" and done.returncode == -signal.SIGPROF


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no timer of their own")
def test_the_guard_counts_the_rendering_thread_alone() -> None:
    code = (
        "import signal, threading, time\n"
        "from cllm.text import chat_template\n"
        "others = lambda: [None for _ in iter(lambda: time.process_time() > 0.5, True)]\n"
        "busy = threading.Thread(target=others)\n"
        "with chat_template.deadly_guard(0.1, signal.SIGXCPU):\n"
        "    busy.start()\n"
        "    busy.join()\n"
        "print('alive', flush=True)\n"
        "with chat_template.deadly_guard(0.1, signal.SIGXCPU):\n"
        "    others(), [None for _ in iter(lambda: time.thread_time() > 60, True)]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert done.stdout == b"alive\n" and done.returncode == -signal.SIGXCPU


# Built-in templates -----------------------------------------------------------------------------------

TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U1"},
    {"role": "assistant", "content": " A "},
    {"role": "user", "content": "U2"},
]
RENDERED = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\n A "
    "<|im_end|>\n<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nU1<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nU2<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama2": "[INST] S\nU1 [/INST] A </s>[INST] U2 [/INST]",
    "llama2-sys": "[INST] <<SYS>>\nS\n<</SYS>>\n\nU1 [/INST] A </s>[INST] U2 [/INST]",
    "gemma": "<start_of_turn>user\nS\n\nU1<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
    "<start_of_turn>user\nU2<end_of_turn>\n<start_of_turn>model\n",
    "mistral-v1": " [INST] S\n\nU1 [/INST]  A </s> [INST] U2 [/INST]",
    "mistral-v7": "[SYSTEM_PROMPT] S[/SYSTEM_PROMPT][INST] U1[/INST]  A </s>[INST] U2[/INST]",
    "vicuna": "S\n\nUSER: U1\nASSISTANT:  A </s>\nUSER: U2\nASSISTANT:",
    "deepseek3": "S\n\n<｜User｜>U1<｜Assistant｜> A <｜end▁of▁sentence｜><｜User｜>U2<｜Assistant｜>",
}


def render_builtin(name: str, **options: bool) -> str:
    return ChatTemplate(read_template(name)).render(
        messages=TALK, tools=None, **{"add_generation_prompt": True, **options}
    )


@pytest.mark.parametrize("name", RENDERED)
def test_a_builtin_template_renders_a_conversation(name: str) -> None:
    assert render_builtin(name) == RENDERED[name]


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_all_texts_are_there_and_the_opening_can_be_left_out(name: str) -> None:
    whole, closed = render_builtin(name), render_builtin(name, add_generation_prompt=False)
    assert all(text in whole for text in ("S", "U1", "A", "U2")) and whole.startswith(closed)


def test_text_may_be_a_template_without_jinja() -> None:
    assert read_template("text:This is no chat template.") == "This is no chat template."
    assert read_template("text:{{ messages }}") == read_template("{{ messages }}") == "{{ messages }}"


def test_another_name_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"rwkv-world: .*chatml.*llama3"):
        read_template("rwkv-world")
