"""Answers under random JSON schemas, and what constraints cost.

First, many random schemas (`schema_maker`) are asked for over HTTP: every answer that ended with `stop` must
validate. Half of them are drawn wildly (temperature 1.5, nothing cut off), so that the grammar and not the
model makes them fit. Then eight clients stream the same number of tokens without and with a schema, in turn.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import httpx

from bench.command import conclude, run_command, serving
from bench.load import run_load
from bench.peers import ServerSettings
from bench.report import Spread, Table
from bench.wire import Address, OpenAIApi
from bench.workloads.plan import BenchRequest, single_requests
from bench.workloads.text import words
from cllm.errors import SetupError
from proof.command import make_parser
from proof.shared.schema_maker import Schema, SchemaMaker

CLIENTS = 8
MAX_COST = 0.10
ENDLESS = 10_000  # items: no stream gets there, so all are cut at the same number of tokens


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"json_schema": {"type": "array", "items": items, "minItems": ENDLESS}}


READING = {
    "type": "object",
    "properties": {
        "temperature": {"type": "integer", "minimum": 0, "maximum": 99},
        "humidity": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["temperature", "humidity"],
    "additionalProperties": False,
}
# Nothing is forced in digits and texts: each token is masked and sampled. In records most tokens are keys.
SCHEMAS: Mapping[str, dict[str, Any]] = {
    "free": {},
    "digits": _list_of({"type": "integer", "minimum": 0, "maximum": 999_999_999}),
    "texts": _list_of({"type": "string", "minLength": 200, "maxLength": 400}),
    "records, keys forced": _list_of(READING),
}
UNFORCED = ("digits", "texts")  # what the bar is for


def measure_cost(address: Address, rounds: int, tokens: int) -> dict[str, list[float]]:
    """Tokens per second of each kind, in interleaved rounds; the first warms up. Raises SetupError."""
    rates: dict[str, list[float]] = {kind: [] for kind in SCHEMAS}
    kinds = list(SCHEMAS)
    for number in range(rounds + 1):
        prompts = [words(f"constraint {number} {index}", 32) for index in range(CLIENTS)]
        plan = single_requests("constraint cost", [BenchRequest(text, tokens) for text in prompts], CLIENTS)
        for place in range(len(kinds)):
            kind = kinds[(place + number) % len(kinds)]
            load = run_load(address, OpenAIApi(**SCHEMAS[kind]), plan)
            if load.errors:
                raise SetupError(f"{kind}: {load.errors[0]}")
            if number:
                rates[kind].append(load.tokens_per_second)
    return rates


def show_cost(rates: Mapping[str, Sequence[float]]) -> list[str]:
    """A table with the ratios to free text of the same round, then what is over the bar."""
    rows, faults = [], []
    for kind, found in rates.items():
        ratio = Spread.of(rate / free for rate, free in zip(found, rates["free"], strict=True))
        rows.append((kind, Spread.of(found).show(), ratio.show(3)))
        if kind in UNFORCED and ratio.median < 1 - MAX_COST:
            faults.append(f"FAIL: {kind}: {1 - ratio.median:.1%} fewer tokens/s, allowed are {MAX_COST:.0%}")
    table = Table(("answer", "tokens/s", "against free text"), rows).markdown()
    return [table, *faults, f"{CLIENTS} clients, load average {os.getloadavg()[0]:.1f}"]


WILD = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one schema. `fault` says what is wrong with the answer, if something is."""

    number: int
    schema: Schema
    text: str
    finish_reason: str
    fault: str | None


def check(schema: Schema, text: str) -> str | None:
    """Why `text` is no valid answer; None if it is one. Raises SetupError without `jsonschema`."""
    try:
        return check_value(schema, json.loads(text))
    except ValueError as error:
        return f"not JSON: {error}"


def check_value(schema: Mapping[str, Any], value: Any) -> str | None:
    """Why a value does not fit a schema; None if it does."""
    try:
        import jsonschema
    except ImportError:
        raise SetupError("this needs the package jsonschema: pip install jsonschema") from None
    formats = jsonschema.FormatChecker(("date", "uuid", "ipv4"))
    # Without an extra package jsonschema knows only draft 3's `time`, which has no offset, and no date-time.
    formats.checks("time")(lambda value: not isinstance(value, str) or _is_time(value))
    formats.checks("date-time")(lambda value: not isinstance(value, str) or _is_moment(value))
    validator = jsonschema.Draft202012Validator(schema, format_checker=formats)
    errors = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(value)]
    return errors[0] if errors else None


_FULL_TIME = re.compile(
    r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)", re.ASCII | re.IGNORECASE
)


def _is_time(text: str) -> bool:
    """RFC 3339's full-time."""
    return _FULL_TIME.fullmatch(text) is not None


def _is_moment(text: str) -> bool:
    """RFC 3339's date-time."""
    day, separator, rest = text[:10], text[10:11], text[11:]
    try:
        date.fromisoformat(day)
    except ValueError:
        return False
    return len(day) == 10 and separator in ("T", "t") and _is_time(rest)


def ask(client: httpx.Client, number: int, schema: Schema, max_tokens: int) -> Outcome:
    """One schema's answer; what is refused or not answered is a fault."""
    body: dict[str, Any] = {
        "model": "any",
        "messages": [{"role": "user", "content": f"Make up data of your own, number {number}, as JSON."}],
        "max_tokens": max_tokens,
        "seed": number,
        "response_format": {"type": "json_schema", "json_schema": {"name": "data", "schema": schema}},
        **(WILD if number % 2 else {}),
    }
    try:
        response = client.post("/v1/chat/completions", json=body)
    except httpx.HTTPError as error:
        return Outcome(number, schema, "", "error", repr(error))
    if response.status_code != 200:
        return Outcome(number, schema, "", "error", f"status {response.status_code}: {response.text[:300]}")
    choice = response.json()["choices"][0]
    text = choice["message"]["content"]
    fault = check(schema, text) if choice["finish_reason"] == "stop" else None
    return Outcome(number, schema, text, choice["finish_reason"], fault)


def ask_all(url: str, count: int, seed: int, max_tokens: int = 400) -> tuple[list[Outcome], dict[str, int]]:
    """`count` schemas by several clients at once; and how often each kind of schema occurs in them."""
    maker = SchemaMaker(seed)
    schemas = [maker.make() for _ in range(count)]
    with (
        httpx.Client(base_url=url, trust_env=False, timeout=300.0) as client,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        asked = [pool.submit(ask, client, *each, max_tokens) for each in enumerate(schemas)]
        return [future.result() for future in asked], dict(maker.used)


def describe(outcomes: Sequence[Outcome], used: dict[str, int]) -> list[str]:
    """The result in lines; those that begin with FAIL are faults."""
    ended = Counter(outcome.finish_reason for outcome in outcomes)
    valid = sum(outcome.finish_reason == "stop" and outcome.fault is None for outcome in outcomes)
    lines = [
        f"schemas made of {', '.join(f'{count} {kind}' for kind, count in sorted(used.items()))}",
        f"{len(outcomes)} answers, ended: "
        + ", ".join(f"{count} {why}" for why, count in sorted(ended.items())),
        f"{valid} of {ended['stop']} that ended with stop are valid",
    ]
    for outcome in outcomes:
        if outcome.fault is not None:
            lines.append(f"FAIL: schema {outcome.number}: {outcome.fault}\n  {json.dumps(outcome.schema)}")
            lines.append(f"  answer: {outcome.text!r}")
    return lines


def run(
    model: Path | None, threads: int, out: Path | None, schemas: int, seed: int, rounds: int, tokens: int
) -> int:
    """Both parts; 0 if all is well, else 1."""
    settings = ServerSettings(model, CLIENTS, 1024 * CLIENTS, threads)
    print(f"the bar: every answer valid, and at most {MAX_COST:.0%} fewer tokens a second", file=sys.stderr)
    with serving("schemas", settings) as server:
        outcomes, used = ask_all(server.address.url, schemas, seed)
        lines = describe(outcomes, used)
        data: dict[str, Any] = {"outcomes": outcomes}
        if rounds:
            costs = measure_cost(server.address, rounds, tokens)
            lines += ["", *show_cost(costs)]
            data["cost"] = costs
    failed = any(line.startswith("FAIL") for line in lines)
    return conclude("schemas", "\n".join(lines), data, out, failed=failed)


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__,
        __doc__,
        *("--model", "--threads", "--out"),
        schemas=(200, "how many"),
        seed=(1, "which ones"),
        rounds=(5, "of the cost; 0: leave it out"),
        tokens=(192, "of each stream of the cost"),
    )
    return run_command(parser, arguments, run)
