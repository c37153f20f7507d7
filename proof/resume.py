"""The engine is killed at every token position, and each answer is as if not.

Eight answers are computed together, and the engine is killed (SIGKILL) when each has had 1, 2, … 64 tokens:
`tests.driver.killed_worker` does that from inside, so the places are exact, but for tokens that come several
at a time. Texts, ends, usage and log-probabilities are compared with those of the same requests undisturbed.

`features`: plain text with a cached prefix, a regular expression, a JSON schema, a stop string,
log-probabilities, characters of several bytes, two seeded choices of one request (`n`). `drafts`: eight
repetitive answers, among them a tool call, with speculative decoding. Each with the scripted model and with a
tiny F32 model (which is its own draft model).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.report import Table
from cllm.testing import call_tool, say
from proof.command import make_parser
from tests.driver.killed_worker import KILLED, KillPlan, read_done
from tests.driver.server import SERVE, Server
from tests.tiny_models import make_dense

POSITIONS = 64
STREAMS = 8
TOKENS = POSITIONS + 12  # of an answer: it goes on after the last place
EXACT = ("--no-flash-attention", "--cache-type-k", "f32", "--cache-type-v", "f32")
SCRIPTED = ("from cllm.testing import main; import sys; sys.exit(main(sys.argv[1:]))", "serve")
MODELS = ("scripted", "tiny")
GROUPS = ("features", "drafts")
LOGPROB_NOISE = 1e-3
LIMIT_S = 90.0

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS}
ALONE: dict[str, Any] = {**GREEDY, "cache_prompt": False}
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
PLACES = "né à 東京 🙂 était là, où 東京 🙂 fut; 大阪 🙃 aussi. ça va"
SCHEMA = {"type": "array", "items": {"enum": ["alpha", "beta", "gamma"]}, "minItems": 12, "maxItems": 12}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = call_tool("look", {"where": "in the box " * 4, "what": ["a", "b", "a", "b"]})


@dataclass(frozen=True)
class Ask:
    """A request of one or more answers."""

    name: str
    path: str
    body: dict[str, Any]
    answers: int = 1
    warm: bool = False  # its prompt is asked before, so that it is in the prefix cache


@dataclass
class Said:
    """What a client read of one request."""

    texts: dict[int, str] = field(default_factory=dict)  # by choice; calls and reasoning, too
    ends: list[tuple[int, Any]] = field(default_factory=list)
    usage: Any = None
    logprobs: list[float] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    events: int = 0
    longest_gap_s: float = 0.0

    def add(self, event: Mapping[str, Any]) -> None:
        self.events += 1
        if "error" in event:
            self.errors.append(event["error"])
        if "token" in event:  # /generate_stream
            self.texts[0] = self.texts.get(0, "") + event["token"]
            if event["done"]:
                self.ends.append((0, event.get("finish_reason")))
        for choice in event.get("choices", ()):
            index, delta = choice["index"], choice.get("delta") or {}
            said = choice.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                said += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
            self.texts[index] = self.texts.get(index, "") + said
            self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or ()
            if choice.get("finish_reason"):
                self.ends.append((index, choice["finish_reason"]))
        if event.get("usage"):
            self.usage = event["usage"]

    @property
    def counted(self) -> dict[str, Any]:
        """The usage, less what depends on how many steps it took."""
        usage = dict(self.usage or {})
        details = usage.get("prompt_tokens_details") or usage
        return {
            "prompt": usage.get("prompt_tokens"),
            "completion": usage.get("completion_tokens"),
            "cached": details.get("cached_tokens"),
        }


def make_group(group: str, model: str, stop: str) -> list[Ask]:
    """The requests of a group; `stop` ends one of the answers late."""
    scripted = model == "scripted"

    def prompt(text: str, other: str) -> str:
        return say(text) if scripted else other

    def complete(name: str, text: str, other: str, **fields: Any) -> Ask:
        return Ask(name, "/generate_stream", {"prompt": prompt(text, other), **ALONE, **fields})

    many = (WORDS + ", ") * 2
    if group == "drafts":
        drawn = [
            complete(f"repeats {number}", "so it goes on and on, " * 6, f"ab{number} " * 12)
            for number in range(6)
        ]
        call = [{"role": "user", "content": prompt(CALL + " the end " * 3, "call it " * 9)}]
        tools: dict[str, Any] = {"tools": [TOOL]} if scripted else {}
        chat = Ask("tool call", "/v1/chat/completions", {"messages": call, **ALONE, **STREAMED, **tools})
        stopped = complete("stop", "ST STO " * 9 + "STOP", "xyz " * 12, stop="STOP" if scripted else stop)
        return [*drawn, chat, stopped]
    seeded = {**ALONE, "temperature": 1.0, "seed": 11, "n": 2, **STREAMED}
    plain = {"prompt": "a prompt that is known " * 5 + prompt(many, ""), **GREEDY}
    scored = {"prompt": prompt(many, "scored"), **ALONE, **STREAMED, "logprobs": 2}
    return [
        Ask("plain, cached", "/generate_stream", plain, warm=True),
        complete("regular expression", many, "digits", regex="([0-9]{3}[a-z ]{5}){9,}"),
        complete("JSON schema", many, "schema", json_schema=SCHEMA),
        complete("stop string", "ST STO " * 9 + "STOP" + many, "stopped", stop="STOP" if scripted else stop),
        Ask("log-probabilities", "/v1/completions", scored),
        complete("several bytes", PLACES * 2, "é東🙂" * 4, stop=["é東é", "🙂🙂🙂"]),
        Ask("n with a seed", "/v1/completions", {"prompt": prompt(many, "drawn"), **seeded}, answers=2),
    ]


class Session:
    """One server, its requests, and what they say undisturbed."""

    def __init__(self, server: Server, plan: Path, model: str, group: str) -> None:
        self._server = server
        self._plan = plan
        self._asks = make_group(group, model, self._find_stop(model, group))
        assert sum(ask.answers for ask in self._asks) == STREAMS
        self.expected = self._ask_all()
        for ask, said in zip(self._asks, self.expected, strict=True):
            assert not said.errors and len(said.ends) == ask.answers, (ask.name, said)

    def _find_stop(self, model: str, group: str) -> str:
        """A text that comes late in the tiny model's answer, and not before."""
        if model == "scripted":
            return ""
        (ask,) = (ask for ask in make_group(group, model, "\0") if ask.name.startswith("stop"))
        with httpx.Client(base_url=self._server.url, timeout=LIMIT_S, trust_env=False) as client:
            text = self._read(client, Ask("", ask.path, {**ask.body, "stop": []})).texts[0]
        ends = (text[end - 3 : end] for end in range(len(text) - 4, len(text) // 2, -1))
        return next(end for end in ends if "\ufffd" not in end and text.count(end) == 1)

    def _read(self, client: httpx.Client, ask: Ask) -> Said:
        said, last = Said(), time.monotonic()
        with client.stream("POST", ask.path, json=ask.body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    said.add(json.loads(line.removeprefix("data: ")))
                    said.longest_gap_s = max(said.longest_gap_s, time.monotonic() - last)
                    last = time.monotonic()
        return said

    def _ask_all(self, plan: KillPlan | None = None) -> list[Said]:
        with (
            httpx.Client(base_url=self._server.url, timeout=LIMIT_S, trust_env=False) as client,
            ThreadPoolExecutor(STREAMS) as pool,
        ):
            for ask in self._asks:
                if ask.warm:
                    self._read(client, Ask("", ask.path, {**ask.body, "max_tokens": 1}))
            if plan is not None:
                plan.write(self._plan)
            return list(pool.map(lambda ask: self._read(client, ask), self._asks))

    def kill_at(self, tokens: int) -> Outcome:
        """All requests, with a kill when each has had so many tokens."""
        found = self._ask_all(KillPlan(STREAMS, tokens))
        done = read_done(self._plan)
        outcome = Outcome(exact=sum(count == tokens for count in done.said.values()))
        for ask, said, expected in zip(self._asks, found, self.expected, strict=True):
            fault = find_fault(said, expected)
            if fault:
                outcome.faults.append(f"{ask.name}, killed at {tokens}: {fault}")
            else:
                outcome.same += ask.answers
            outcome.pauses_s.append(said.longest_gap_s)
        return outcome


@dataclass
class Outcome:
    """Of one or more kills."""

    same: int = 0  # answers
    exact: int = 0  # that had just so many tokens at the kill
    faults: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        self.same += other.same
        self.exact += other.exact
        self.faults += other.faults
        self.pauses_s += other.pauses_s


def find_fault(said: Said, expected: Said) -> str:
    """How an answer differs from the undisturbed one; empty where it does not."""
    if said.errors:
        return f"error {said.errors}"
    if sorted(said.ends) != sorted(expected.ends):
        return f"ends {said.ends}, not {expected.ends}"
    if said.texts != expected.texts:
        return f"text {said.texts}, not {expected.texts}"
    if said.counted != expected.counted:
        return f"usage {said.counted}, not {expected.counted}"
    pairs = zip(said.logprobs, expected.logprobs, strict=False)
    if len(said.logprobs) != len(expected.logprobs) or any(abs(a - b) > LOGPROB_NOISE for a, b in pairs):
        return "other log-probabilities"
    return ""


@contextmanager
def open_session(folder: Path, model: str, group: str) -> Iterator[Session]:
    """A server of this model that can be killed by plan."""
    plan = folder / f"{model}-{group}.plan"
    drafts: tuple[str, ...] = ("--draft-tokens", "32" if group == "drafts" else "0")
    flags: tuple[str, ...]
    if model == "scripted":
        program, flags = SCRIPTED, ("--step-ms", "1", "--ctx-size", "16384", "--parallel", "8")
    else:
        path = make_dense(folder / "tiny.gguf")
        program = SERVE
        flags = (str(path), "--parallel", "8", "--ctx-size", "16384", "--threads", "1", *EXACT)
        if group == "drafts":  # what it writes does not repeat itself; its own drafts come true
            drafts += ("--draft-model", str(path))
    log = folder / f"{model}-{group}.log"
    program = (KILLED + program[0], *program[1:])
    with Server(
        log, *flags, *drafts, program=program, KILL_PLAN=str(plan), CLLM_LOG_LEVEL="warning"
    ) as server:
        server.expect_failure("the engine died: ")
        yield Session(server, plan, model, group)


def run(models: Sequence[str], groups: Sequence[str], positions: Sequence[int]) -> int:
    """Print the table; 0 if every answer is the undisturbed one."""
    rows: list[tuple[str, ...]] = []
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            for group in groups:
                began, total = time.monotonic(), Outcome()
                with open_session(Path(folder), model, group) as session:
                    for tokens in positions:
                        total.add(session.kill_at(tokens))
                        print(f"{model}, {group}: {tokens}", end="\r", file=sys.stderr, flush=True)
                    drafted = sum((said.usage or {}).get("drafted_tokens", 0) for said in session.expected)
                count = len(positions) * STREAMS
                spans = (median(total.pauses_s), max(total.pauses_s), time.monotonic() - began)
                counts = (f"{total.same} of {count}", f"{total.exact}", f"{drafted}")
                rows.append((model, group, *counts, *(f"{seconds:.2f} s" for seconds in spans)))
                faults += total.faults
    columns = ("model", "answers", "as undisturbed", "killed at that token", "drafted", "pause")
    print(Table((*columns, "longest", "took"), rows).markdown())
    print("\n".join(["", *(f"FAIL: {fault}"[:600] for fault in faults[:20])] if faults else ["", "pass"]))
    return 1 if faults else 0


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__, __doc__, positions=(POSITIONS, "the last position"), every=(1, "distance of two positions")
    )
    parser.add_argument("--model", choices=MODELS, action="append", help="default: both")
    parser.add_argument("--group", choices=GROUPS, action="append", help="default: both")
    options = parser.parse_args(arguments)
    positions = range(1, options.positions + 1, options.every)
    return run(options.model or MODELS, options.group or GROUPS, positions)
