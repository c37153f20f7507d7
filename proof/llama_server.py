"""The same arguments and requests for llama-server and for cllm.

llama-server is the one built beside the native library (`cllm build --with-server`). Compared are the
arguments that each knows, status codes, the keys of answers and of events with the kind of each value, the
names of metrics, and the text of built-in chat templates. `EXPECTED` lists the differences that are meant;
docs/llama-server.md says why. The exit code is 0 only if there are no others.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx

from bench.peers import Peer, embedded_model, running
from bench.wire import OpenAIApi
from cllm.build.build import find_built
from cllm.cli.llama_server import FLAGS
from cllm.text.chat_template import BUILTIN_TEMPLATES, ChatTemplate
from proof.command import make_parser
from tests.driver.server import Server

ARGUMENTS = "-c 4096 -np 2 -t 1 --temp 0 --seed 1 --metrics --props --alias same --jinja --no-warmup"
PROGRAM = ("from cllm.cli.main import main; main()", "llama-server")
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


class Case(NamedTuple):
    """A request to both servers."""

    path: str
    body: Any = None  # None: GET


def prompt(**fields: Any) -> Case:
    return Case("/completion", {"prompt": "1+1=", "n_predict": 4, **fields})


CASES = {
    "completion": prompt(),
    "completion: stream": prompt(stream=True),
    "completion: probabilities": prompt(n_probs=2),
    "completion: probabilities streamed": prompt(n_probs=2, stream=True),
    "completion: after sampling": prompt(n_probs=2, post_sampling_probs=True),
    "completion: tokens": prompt(return_tokens=True),
    "completion: fields": prompt(response_fields=["content", "timings/prompt_n", "none"]),
    "completion: nothing": prompt(n_predict=0),
    "completion: one": prompt(n_predict=1),
    "completion: prompts": prompt(prompt=["1+1=", [33, 27], ["a", 33]]),
    "completion: two": prompt(n_cmpl=2),
    "completion: object": prompt(prompt={"prompt_string": "a"}),
    "completion: stop": prompt(stop="2"),
    "completion: empty stop": prompt(stop=[""], grammar="", seed=-1),
    "completion: nulls": prompt(temperature=None, stop=None, n_probs=None, grammar=None),
    "completion: bias": prompt(logit_bias=[[33, 1.0], ["a", False]]),
    "completion: biases": prompt(logit_bias={"33": 1.0, "a": -1}),
    "completion: samplers": prompt(samplers=["top_k", "temperature"]),
    "completion: letters": prompt(samplers="kt"),
    "completion: dynamic": prompt(dynatemp_range=0.5, dynatemp_exponent=1.0, temperature=0.7),
    "completion: indent": prompt(n_indent=2, t_max_predict_ms=5000),
    "completion: schema": prompt(json_schema={"type": "object"}),
    "completion: out of bounds": prompt(temperature=-1, top_p=2, top_k=-4),
    "completion: timings": prompt(timings_per_token=True, stream=True),
    "completion: max_tokens": Case("/completion", {"prompt": "a", "max_tokens": 2}),
    "completions": Case("/completions", {"prompt": "a", "n_predict": 2}),
    "completion: too long": prompt(prompt=[33] * 3000),
    "completion: wrong": prompt(n_predict="many"),
    "completion: no prompt": Case("/completion", {"n_predict": 2}),
    "infill": Case("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    "tokenize": Case("/tokenize", {"content": "é and <|im_end|>"}),
    "tokenize: pieces": Case("/tokenize", {"content": "é and <|im_end|>", "with_pieces": True}),
    "tokenize: nothing": Case("/tokenize", {}),
    "tokenize: mixed": Case("/tokenize", {"content": ["a", 33]}),
    "detokenize": Case("/detokenize", {"tokens": [33, 27, 2]}),
    "detokenize: nothing": Case("/detokenize", {}),
    "apply-template": Case("/apply-template", {"messages": CHAT["messages"]}),
    "apply-template: closed": Case(
        "/apply-template", {"messages": CHAT["messages"], "add_generation_prompt": False}
    ),
    "props": Case("/props"),
    "props: change": Case("/props", {}),
    "slots": Case("/slots"),
    "slots: save": Case("/slots/0?action=save", {"filename": "x.bin"}),
    "lora-adapters": Case("/lora-adapters"),
    "health": Case("/health"),
    "v1/health": Case("/v1/health"),
    "models": Case("/models"),
    "v1/models": Case("/v1/models"),
    "chat": Case("/v1/chat/completions", CHAT),
    "chat without v1": Case("/chat/completions", CHAT),
    "chat: stream": Case("/v1/chat/completions", {**CHAT, "stream": True}),
    "chat: usage": Case(
        "/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    ),
    "chat: logprobs": Case("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "chat: object": Case(
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_object", "schema": {"type": "object"}}},
    ),
    "chat: verbose": Case("/v1/chat/completions", {**CHAT, "verbose": True}),
    "chat: tool": Case(
        "/v1/chat/completions", {**CHAT, "max_tokens": 64, "tools": [TOOL], "tool_choice": "required"}
    ),
    "chat: reasoning": Case("/v1/chat/completions", {**CHAT, "reasoning_format": "deepseek"}),
    "chat: no messages": Case("/v1/chat/completions", {}),
    "chat: tokens": Case("/chat/completions/input_tokens", {"messages": CHAT["messages"]}),
    "completions of OpenAI": Case("/v1/completions", {"prompt": "a", "max_tokens": 2}),
    "completions of OpenAI: stream": Case(
        "/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True}
    ),
    "responses": Case("/v1/responses", {"input": "Hi", "max_output_tokens": 4}),
    "responses without v1": Case("/responses", {"input": "Hi", "max_output_tokens": 4}),
    "responses: tokens": Case("/responses/input_tokens", {"input": "Hi"}),
    "messages": Case("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 4}),
    "messages: tokens": Case("/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
    "embedding": Case("/embedding", {"content": "a"}),
    "embeddings": Case("/v1/embeddings", {"input": "a"}),
    "rerank": Case("/rerank", {"query": "a", "texts": ["b"]}),
    "no such route": Case("/wibble"),
}

# Differences that are meant: patterns of the case and of the difference.
EXPECTED = (
    (".*", r"adds .*cached_from: text"),  # the tier of the KV cache
    (".*", r"\d+ events, here \d+"),  # what a reader has not read yet comes as one event
    ("completion: empty stop", r"lacks \.generation_settings\.stop\[\]: text"),
    ("completion: bias", r"lacks \.generation_settings\.logit_bias\[\]\.bias: null"),  # -100, not infinity
    ("infill|rerank", "status 501, here 400"),  # the model, not the server, lacks it
    ("embeddings?", "status 501, here 200"),  # served by every model
    ("slots", r"lacks \[\]\..*"),  # nothing of a request that has ended
    ("(v1/)?health", r"adds \.engine: text"),
    ("(v1/)?models", r"lacks \.data\[\]\.meta\.vocab_type: number"),
    ("(v1/)?models", r"adds \.data\[\]\..*"),
    ("chat.*", r"adds \.choices\[\]\.(logprobs|message\.refusal): null"),  # as OpenAI has it
    ("chat.*", r"lacks \.choices\[\]\.delta\.content: null"),  # "" in the first chunk
    ("chat: logprobs", r"lacks .*\.id: number"),
    ("chat: tool", r"adds \.choices\[\]\.message\.tool_calls.*"),  # it was forced: there it may be none
    ("chat: tool", r"(lacks|adds) \.choices\[\]\.message\.content: (text|null)"),
    ("chat: no messages", r"(lacks|adds) \.error\.(code|param): .*"),  # OpenAI's shape
    ("completions of OpenAI: stream", r"lacks \.usage.*"),  # only where it is asked for
    ("completions of OpenAI: stream", r"lacks \.choices\[\]\.finish_reason: null"),  # all came as one
    ("responses.*", r"adds \..*|lacks \.completed_at: number"),  # OpenAI's whole shape
    ("messages", r"adds \.usage\..*"),
    ("no such route", r"(lacks|adds) \..*"),
    ("metrics", "lacks llamacpp:(n_busy_slots_per_decode|spec_decode_num_drafts_total)"),
)


def kind(value: Any) -> str:
    """The kind of a JSON value: an integer is a number."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    return {str: "text", list: "list", dict: "object", type(None): "null"}[type(value)]


def shape(value: Any, place: str = "") -> Iterator[str]:
    """The places of a JSON value with the kind of each; all items of a list have the same place."""
    yield f"{place or '.'}: {kind(value)}"
    if isinstance(value, dict):
        for key, item in value.items():
            yield from shape(item, f"{place}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from shape(item, f"{place}[]")


class Answer(NamedTuple):
    status: int
    shape: frozenset[str]
    length: int = 1  # of a stream

    @classmethod
    def to(cls, client: httpx.Client, case: Case) -> Answer:
        method = "GET" if case.body is None else "POST"
        answer = client.request(method, case.path, json=case.body)
        kind = answer.headers.get("content-type", "")
        if kind.startswith("text/event-stream"):
            lines = (
                line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")
            )
            events = [json.loads(line) for line in lines if line != "[DONE]"]
            places = frozenset(place for event in events for place in shape(event))
            return cls(answer.status_code, places, len(events))
        try:
            return cls(answer.status_code, frozenset(shape(answer.json())))
        except ValueError:
            return cls(answer.status_code, frozenset({"not JSON"}))


def differences(theirs: Answer, ours: Answer) -> Iterator[str]:
    if theirs.status != ours.status:
        yield f"status {theirs.status}, here {ours.status}"
    if theirs.status < 400 or ours.status >= 400:
        for place in sorted(theirs.shape - ours.shape):
            yield f"lacks {place}"
        for place in sorted(ours.shape - theirs.shape):
            yield f"adds {place}"
    if theirs.length != ours.length:
        yield f"{theirs.length} events, here {ours.length}"


@contextmanager
def llama_server(program: Path, arguments: Sequence[str], log: Path) -> Iterator[httpx.Client]:
    """The real one, on a free port."""
    peer = Peer("llama-server", (str(program), *arguments), OpenAIApi(), "/health")
    with (
        running(peer, log) as server,
        httpx.Client(base_url=server.address.url, timeout=60, trust_env=False) as client,
    ):
        yield client


def compare_flags(program: Path) -> Iterator[str]:
    """Arguments of `--help` that are not known here, or take another number of values."""
    text = subprocess.run([program, "--help"], capture_output=True, text=True, check=False, timeout=30).stdout
    for line in text.splitlines():
        if not re.match(r"-\S", line) or line.startswith("-----"):
            continue
        names = re.findall(r"(?:^|, +)(--?[A-Za-z][\w.-]*)", line)
        rest = line[line.rindex(names[-1]) + len(names[-1]) :]
        values = len(rest[1:].split("  ")[0].split()) if re.match(r" \S", rest) else 0
        for name in set(names) - {"-h", "--help", "--usage", "--version"}:
            if name not in FLAGS:
                yield f"{name} is not known"
            elif bool(values) != bool(FLAGS[name].values):
                yield f"{name} takes {values} values, here {FLAGS[name].values}"


def compare_metrics(theirs: httpx.Client, ours: httpx.Client) -> Iterator[str]:
    names = [
        set(re.findall(r"^llamacpp:\w+", client.get("/metrics").text, re.MULTILINE))
        for client in (theirs, ours)
    ]
    yield from (f"lacks {name}" for name in sorted(names[0] - names[1]))


def compare_templates(program: Path, model: Path, folder: Path) -> Iterator[str]:
    """Conversations through the built-in templates of both."""
    messages = [
        {"role": role, "content": text}
        for role, text in (("system", "S"), ("user", "U1"), ("assistant", "A"), ("user", "U2"))
    ]
    for name, source in BUILTIN_TEMPLATES.items():
        arguments = ["-m", str(model), "-c", "512", "--no-jinja", "--chat-template", name, "--no-warmup"]
        with llama_server(program, arguments, folder / name) as client:
            theirs = client.post("/apply-template", json={"messages": messages}).json()["prompt"]
        ours = ChatTemplate(source).render(messages=messages, tools=None, add_generation_prompt=True)
        if theirs != ours:
            yield f"{name}: {theirs!r}, here {ours!r}"


def is_expected(name: str, difference: str) -> bool:
    return any(re.fullmatch(case, name) and re.fullmatch(pattern, difference) for case, pattern in EXPECTED)


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__, __doc__, "--model", all=(False, "print the differences that are meant, too")
    )
    parser.add_argument("--program", type=Path, help="llama-server; default: the one beside the library")
    options = parser.parse_args(arguments)
    built = find_built()
    assert built is not None
    program = options.program or built / "bin" / "llama-server"
    model = options.model or embedded_model()
    found: dict[str, list[str]] = {"arguments": list(compare_flags(program))}
    words = ["-m", str(model), *ARGUMENTS.split()]
    started = time.monotonic()
    with TemporaryDirectory() as name:
        folder = Path(name)
        with (
            llama_server(program, words, folder / "theirs") as theirs,
            Server(folder / "ours", *words, program=PROGRAM, CLLM_LOG_LEVEL="info") as server,
        ):
            for case, request in CASES.items():
                found[case] = list(differences(Answer.to(theirs, request), Answer.to(server.client, request)))
            found["metrics"] = list(compare_metrics(theirs, server.client))
        found["templates"] = list(compare_templates(program, model, folder))
    unexpected = 0
    for case, listed in found.items():
        new = [difference for difference in listed if not is_expected(case, difference)]
        unexpected += len(new)
        for difference in listed if options.all else new:
            print(f"{case}: {difference}" + ("" if difference in new else " (meant)"))
    seconds = time.monotonic() - started
    print(f"{len(found)} comparisons, {unexpected} differences that are not meant, {seconds:.0f} s")
    return 1 if unexpected else 0
