"""`/infill` and `suffix`, `--chat-template`, and a model whose own template is broken: over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver.server import Server, StartServer, cllm, parse_events
from tests.e2e.test_cli import one_line
from tests.tiny_models import make_dense

CONTROLS = ("<PRE>", "<SUF>", "<MID>")
ROLES = {f"fim_{role}": f"<{role.upper()}>" for role in ("pre", "suf", "mid")}
QUESTION = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %}"


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that fills gaps, and whose chat template is no Jinja."""
    folder = tmp_path_factory.mktemp("taught")
    model = make_dense(folder / "m.gguf", controls=CONTROLS, roles=ROLES, templates={"default": "{% if %}{{"})
    with Server(folder / "log", str(model), "--parallel", "2", "--threads", "1") as server:
        yield server


def completion(server: Server, prompt: str) -> str:
    answer = server.post("/completion", {"prompt": prompt, "n_predict": 8, "temperature": 0})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["content"])


def test_infill_asks_as_the_model_was_taught(taught: Server) -> None:
    body = {"input_prefix": "def f(", "input_suffix": "): pass", "n_predict": 8, "temperature": 0}
    whole = taught.post("/infill", body)
    assert whole.status_code == 200, whole.text
    assert whole.json()["content"] == completion(taught, "<PRE>def f(<SUF>): pass<MID>")
    assert whole.json()["tokens_predicted"] == 8
    begun = taught.post("/infill", {**body, "prompt": "a, "}).json()
    assert begun["content"] == completion(taught, "<PRE>def f(a, <SUF>): pass<MID>")
    streamed = list(parse_events(iter(taught.post("/infill", {**body, "stream": True}).text.splitlines())))
    assert "".join(event["content"] for event in streamed) == whole.json()["content"]


def test_a_suffix_is_the_same_gap_on_v1(taught: Server) -> None:
    body = {"prompt": "def f(", "suffix": "): pass", "max_tokens": 8, "temperature": 0}
    answer = taught.post("/v1/completions", body).json()["choices"][0]["text"]
    assert answer == completion(taught, "<PRE>def f(<SUF>): pass<MID>")
    tokens = taught.post("/tokenize", {"content": "def f("}).json()["tokens"]
    echoed = taught.post("/v1/completions", {**body, "prompt": tokens, "echo": True}).json()
    assert echoed["choices"][0]["text"] == f"def f({answer}"
    plain = taught.post("/v1/completions", {**body, "suffix": ""}).json()["choices"][0]["text"]
    assert plain == completion(taught, "def f(")


def test_a_long_file_is_cut_around_the_gap_and_a_long_suffix_on_v1_is_refused(taught: Server) -> None:
    limit = taught.get("/model/info")["limits"]["request_tokens"]
    long = "xyz " * limit
    body = {"input_prefix": long, "input_suffix": long, "n_predict": 4, "input_extra": [{"text": long}]}
    answer = taught.post("/infill", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["tokens_evaluated"] == limit - 4
    refused = taught.post("/v1/completions", {"prompt": "a", "suffix": long})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"


def test_a_model_that_was_not_taught_says_so(tiny: Server) -> None:
    answer = tiny.post("/v1/completions", {"prompt": "a", "suffix": "b"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")
    assert "fill-in-the-middle" in answer.json()["error"]["message"]
    answer = tiny.post("/infill", {"input_prefix": "a", "input_suffix": "b"})
    assert answer.status_code == 400 and "fill-in-the-middle" in answer.json()["error"]["message"]
    answer = tiny.post("/infill", {"input_prefix": "a"})
    assert answer.status_code == 400 and "input_suffix" in answer.json()["error"]["message"]


def test_a_template_that_does_not_compile_harms_only_chats(taught: Server) -> None:
    assert taught.generate("plain", 4)["generated_tokens"] == 4
    for path in ("/v1/chat/completions", "/apply-template"):
        answer = taught.post(path, {"messages": QUESTION})
        assert answer.status_code == 400 and "chat template cannot be used: line 1" in answer.text


def test_the_operators_template_is_used(start: StartServer, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(TEMPLATE)
    server = start(str(tiny_model), "--threads", "1", "--parallel", "1", "--chat-template", str(path))
    path.unlink()  # read once: it is not needed any more
    assert server.get("/props")["chat_template"] == TEMPLATE
    assert server.get("/model/info")["chat_template"] == TEMPLATE
    assert server.post("/apply-template", {"messages": QUESTION}).json() == {"prompt": "[hi]"}
    chat = {"messages": QUESTION, "max_tokens": 8, "temperature": 0}
    answer = server.post("/v1/chat/completions", chat).json()["choices"][0]["message"]["content"]
    assert answer == server.generate("[hi]", 8)["text"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"{% for %}", "line 1"),
        (b"no braces", "no Jinja"),
        (b"{{ \xff }}", "UTF-8"),
        (b"{{ 1 }}" + b" " * (1 << 20), "limit"),
    ],
    ids=["missing", "syntax", "plain", "binary", "huge"],
)
def test_a_bad_template_is_one_line_before_anything_is_loaded(
    content: bytes | None, said: str, tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "bad.jinja"
    if content is not None:
        path.write_bytes(content)
    assert said in one_line(cllm("serve", str(tiny_model), "--chat-template", str(path)))
