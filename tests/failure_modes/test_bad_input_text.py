"""Bad input: hostile grammars, schemas and templates; text that spans tokens."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.driver.http import refusal, unharmed
from tests.driver.server import PATIENCE_S, Server, StartServer, cpu_s, get_data, stream_text
from tests.tiny_models import CHAT_TEMPLATE, make_dense


def constrained(server: Server, limit_s: float, **fields: Any) -> httpx.Response:
    """An answer that costs the tokenizer worker and the HTTP process no more than that."""
    server.post("/generate", {"prompt": "x", "max_tokens": 1, "choice": ["warm"]})  # builds the compiler
    pids = (server.child("tokenizer"), server.process.pid)
    before = sum(map(cpu_s, pids))
    answer = server.post(
        "/generate", {"prompt": "x", "max_tokens": 64, "temperature": 1, "seed": 1, **fields}
    )
    assert server.child("tokenizer") == pids[0], "the tokenizer worker died of it"
    assert sum(map(cpu_s, pids)) - before < limit_s
    return answer


DEEP = 60_000
GRAMMARS = {
    "brackets": "root ::= " + "(" * DEEP + '"a"' + ")" * DEEP,
    "open brackets": "root ::= " + "(" * DEEP,
    "square brackets": "start: " + "[" * DEEP + '"a"' + "]" * DEEP,
    "rules": "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1}" for n in range(9_999)),
    "rules of Lark": "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(9_999)),
    "no grammar": "this is no grammar",
    "unknown rule": "root ::= nothing",
    "half a string": 'root ::= "a',
    "itself": "root ::= root",
}


@pytest.mark.failure_mode("bad-grammar")
@pytest.mark.parametrize("kind", list(GRAMMARS))
def test_bad_grammar(tiny: Server, kind: str) -> None:
    answer = constrained(
        tiny, 0.1 + 0.1, grammar=GRAMMARS[kind]
    )  # a clock tick or two, and our own questions
    assert refusal(answer).startswith("grammar: ")


def chain(link: Any, count: int = 5000) -> dict[str, Any]:
    """A schema of thousands of definitions, each made from the next."""
    links = {f"a{n}": link({"$ref": f"#/$defs/a{n + 1}"}) for n in range(count)}
    return {"$defs": {**links, f"a{count}": {"type": "string"}}, "$ref": "#/$defs/a0"}


REFUSED_SCHEMAS = {
    "itself": {"$ref": "#"},
    "a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "all of itself": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 2}}, "$ref": "#/$defs/a"},
    "any of itself": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 2}}, "$ref": "#/$defs/a"},
    "a chain": chain(lambda inner: inner),
    "a chain of objects": chain(lambda inner: {"type": "object", "properties": {"x": inner}}),
    "a file": {"$ref": "file:///etc/passwd"},
    "a private address": {"$ref": "http://127.0.0.1:1/x"},
    "not": {"not": {"type": "string"}},
    "an unknown type": {"type": "wizard"},
    "an unknown format": {"type": "string", "format": "nonsense"},
}


@pytest.mark.failure_mode("hostile-schema")
@pytest.mark.parametrize("kind", list(REFUSED_SCHEMAS))
def test_schema_that_cannot_be_honoured(tiny: Server, kind: str) -> None:
    schema = REFUSED_SCHEMAS[kind]
    assert refusal(constrained(tiny, 2.0, json_schema=schema)).startswith("json_schema: ")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = tiny.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "response_format": form})
    refusal(answer)
    assert answer.json()["error"]["param"] == "response_format"


HARD_PATTERNS = {
    "(a+)+b": r"(a+)+b",
    "{0,1e9}": r"a{0,1000000000}",
    "nested repeats": r"((a{0,1000}){0,1000}){0,1000}",
    "far back": r"(a|b)*a(a|b){40}c",
    "many stars": ".*.*.*.*.*.*.*.*.*x",
}


@pytest.mark.failure_mode("hostile-schema")
@pytest.mark.parametrize("kind", list(HARD_PATTERNS))
@pytest.mark.parametrize("where", ["regex", "pattern"])
def test_hard_pattern_is_refused_or_honoured(tiny: Server, kind: str, where: str) -> None:
    """Never served unconstrained: each character of the answer can still become a match."""
    pattern = HARD_PATTERNS[kind]
    schema = {"type": "string", "pattern": f"^({pattern})$"}
    wanted = {"regex": pattern} if where == "regex" else {"json_schema": schema}
    answer = constrained(tiny, 2.0, **wanted)
    if answer.status_code != 200:
        refusal(answer)
        return
    data = get_data(answer)
    text = data["text"].removeprefix('"').removesuffix('"')
    if data["finish_reason"] == "stop":
        assert re.fullmatch(pattern if kind != "{0,1e9}" else "a*", text, re.DOTALL)
    elif kind != "many stars":
        assert re.fullmatch("[abc]*", text)


@pytest.mark.failure_mode("hostile-schema")
def test_recursion_that_ends_is_served(tiny: Server) -> None:
    tree = {
        "type": "object",
        "properties": {"c": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}},
        "required": ["c"],
        "additionalProperties": False,
    }
    data = get_data(constrained(tiny, 2.0, json_schema=tree, max_tokens=400, seed=3))
    if data["finish_reason"] == "stop":
        jsonschema.validate(json.loads(data["text"]), tree)
    else:
        assert re.fullmatch(r'[{}\[\]",:c]*', data["text"])


@pytest.mark.failure_mode("grammar-exhausted")
def test_an_exhausted_grammar_ends_that_request_alone(tiny: Server) -> None:
    """After four digits nothing can follow: one request fails, the stream beside it does not notice."""
    dry = 'root ::= [0-9] [0-9] [0-9] [0-9] x\nx ::= x "b"'
    alone = tiny.generate("beside it", 200)["text"]
    with tiny.open_stream("beside it", 200) as events:
        seen = [next(events)]
        body = {"prompt": "x", "max_tokens": 50, "grammar": dry}
        assert "grammar" in refusal(tiny.post("/generate", body))
        with tiny.open_stream("x", 50, grammar=dry) as dried:
            *tokens, last = list(dried)
        seen += list(events)
    assert (
        last["done"] is True
        and last["error"]
        and re.fullmatch("[0-9]{0,4}", "".join(e["token"] for e in tokens))
    )
    assert stream_text(seen) == alone


@pytest.mark.failure_mode("hostile-schema")
def test_chained_references_in_a_tool_are_refused(tiny: Server) -> None:
    """Was: the limits were not applied to tools, and any key ended the tokenizer worker at will."""
    worker = tiny.child("tokenizer")
    chained = chain(lambda each: each, 3000)
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a0"}}, "$defs": chained["$defs"]}
    function = {"name": "f", "parameters": parameters}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "max_tokens": 1,
    }
    answer = tiny.post("/v1/chat/completions", body)
    assert "references" in refusal(answer) and answer.json()["error"]["param"] == "tools"
    assert tiny.child("tokenizer") == worker


# Templates ------------------------------------------------------------------------------------------

EXPONENTIAL = (
    "{% set ns = namespace(a=['x'], b=['x']) %}{% for i in range(70) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
HOSTILE = {
    "loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "output": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "doubling": "{% set n = namespace(x='a') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "multiply": "{{ 'x' * 10 ** 12 }}",
    "power": "{{ (10 ** 1000) ** 1000 }}",
    "range": "{% for a in range(10 ** 12) %}{% endfor %}",
    "class": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.environ }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages).x.y }}",
    "include": "{% include '/etc/passwd' %}",
    "division": "{{ 1 / 0 }}",
    "type": "{{ 1 + 'x' }}",
    "undefined": "{{ nothing.at.all }}",
}
NATIVE = {
    "native loop": EXPONENTIAL + "{{ ns.a == ns.b }}",
    "native memory": EXPONENTIAL + "{{ ns.a | string | length }}",
}


@pytest.fixture(scope="module")
def hostile_server(start_for_module: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A model whose template does the evil that the first message names, and renders all others."""
    branches = "".join(
        f"{{% elif messages[0].content == '{name}' %}}{source}"
        for name, source in {**HOSTILE, **NATIVE}.items()
    )
    template = f"{{% if false %}}{branches}{{% else %}}{CHAT_TEMPLATE}{{% endif %}}"
    return start_for_module(
        model=make_dense(tmp_path_factory.mktemp("hostile") / "hostile.gguf", templates={"default": template})
    )


@pytest.fixture
def hostile(hostile_server: Server) -> Iterator[Server]:
    yield hostile_server
    assert chat(hostile_server, "a friendly word").status_code == 200
    unharmed(hostile_server)


def chat(server: Server, content: str) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return server.post("/v1/chat/completions", body)


@pytest.mark.failure_mode("hostile-template")
@pytest.mark.parametrize("kind", list(HOSTILE))
def test_hostile_template_is_stopped(hostile: Server, kind: str) -> None:
    """After some computing, with the reason, and the worker goes on."""
    chat(hostile, "hello")
    pid = hostile.child("tokenizer")
    before = cpu_s(pid)
    answer = chat(hostile, kind)
    assert refusal(answer).startswith("the model's chat template ")
    assert answer.json()["error"]["param"] == "messages"
    assert hostile.child("tokenizer") == pid
    assert cpu_s(pid) - before < 10, "it would compute for minutes"


@pytest.mark.failure_mode("hostile-template")
@pytest.mark.parametrize("kind", list(NATIVE))
def test_native_loop_of_a_template_is_stopped(hostile: Server, kind: str) -> None:
    """One operation that never returns: its worker is ended, another takes over, other requests go on."""
    hostile.expect_failure("the tokenizer process was ended by SIGPROF")
    began = time.monotonic()
    assert refusal(chat(hostile, kind)).startswith("the model's chat template ")
    assert time.monotonic() - began < PATIENCE_S / 3
    assert hostile.generate("beside it", 2)["generated_tokens"] == 2


@pytest.mark.failure_mode("hostile-template")
def test_template_that_is_no_template(start_for_module: StartServer, tmp_path: Path) -> None:
    """It harms chats, with a reason; all other routes are served."""
    broken = make_dense(
        tmp_path / "broken.gguf", templates={"default": "{% for m in messages %}{{ m.content }"}
    )
    server = start_for_module(model=broken)
    assert "cannot be used" in refusal(chat(server, "hello"))
    assert server.generate("no template needed", 2)["generated_tokens"] == 2
    unharmed(server)


# Text that spans tokens -----------------------------------------------------------------------------


@pytest.mark.failure_mode("text-split-over-tokens")
@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
def test_stop_string_over_tokens_is_held_back(tiny: Server, route: str) -> None:
    """Whatever three characters of the answer are the stop: what comes is all before them, and no more."""
    whole = tiny.generate("hold it back", 60)["text"]
    for begin in range(8, 40, 8):
        stop = whole[begin : begin + 3]
        expected = whole[: whole.index(stop)]
        if route == "/generate":
            assert tiny.generate("hold it back", 60, stop=[stop])["text"] == expected
        else:
            with tiny.open_stream("hold it back", 60, stop=[stop]) as events:
                assert stream_text(list(events)) == expected


@pytest.mark.failure_mode("text-split-over-tokens")
@pytest.mark.parametrize("text", ["é", "€", "😀", "日本", "é€😀"])
def test_characters_over_tokens_are_whole(tiny: Server, text: str) -> None:
    """Every byte of these is a token (but two pairs): no piece shows half a character."""
    with tiny.open_stream("x", 60, choice=[text * 3]) as events:
        pieces = list(events)
    assert stream_text(pieces) == text * 3
    assert not any("\ufffd" in piece["token"] for piece in pieces)
