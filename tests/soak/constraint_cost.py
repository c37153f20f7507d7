"""What a grammar costs: the same number of tokens by the same clients, without one and with one, in turn."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.load import run_load
from bench.protocols import OpenAIDialect, Post
from bench.report import Spread, Table
from bench.wire import Address
from bench.workloads.plan import BenchRequest, Plan, single_requests
from bench.workloads.text import words
from cllm.errors import SetupError

CLIENTS = 8
MAX_COST = 0.10
ENDLESS = 10_000  # items: no stream gets there, so all are cut at the same number of tokens


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": ENDLESS}


READING = {
    "type": "object",
    "properties": {
        "temperature": {"type": "integer", "minimum": 0, "maximum": 99},
        "humidity": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["temperature", "humidity"],
    "additionalProperties": False,
}
# Nothing is forced in digits and texts: each token is masked and chosen. In records most tokens are keys.
SCHEMAS: Mapping[str, dict[str, Any] | None] = {
    "free": None,
    "digits": _list_of({"type": "integer", "minimum": 0, "maximum": 999_999_999}),
    "texts": _list_of({"type": "string", "minLength": 200, "maxLength": 400}),
    "records, keys forced": _list_of(READING),
}
UNFORCED = ("digits", "texts")  # what the bar is for


class SchemaDialect(OpenAIDialect):
    """`/v1/completions` with a schema, or without."""

    def __init__(self, schema: dict[str, Any] | None) -> None:
        super().__init__()
        self._schema = schema

    def post(self, request: BenchRequest, said: Sequence[str] | None = None) -> Post:
        plain = super().post(request, said)
        if self._schema is None:
            return plain
        fields = {**json.loads(plain.body), "json_schema": self._schema}
        return Post(plain.path, json.dumps(fields).encode())


@dataclass(frozen=True, slots=True)
class Cost:
    """One kind of answer over all rounds: tokens per second, and that against the same round's free text."""

    kind: str
    tokens_per_second: tuple[float, ...]
    ratios: tuple[float, ...]


def measure_cost(address: Address, rounds: int, tokens: int, temperature: float = 0.0) -> list[Cost]:
    """Interleaved rounds, the order turning; the first warms up and is not counted. Raises SetupError."""
    rates: dict[str, list[float]] = {kind: [] for kind in SCHEMAS}
    kinds = list(SCHEMAS)
    for number in range(rounds + 1):
        for place in range(len(kinds)):
            kind = kinds[(place + number) % len(kinds)]
            workload = _workload(number, tokens, temperature)
            load = run_load(address, SchemaDialect(SCHEMAS[kind]), workload)
            if load.errors:
                raise SetupError(f"{kind}: {load.errors[0]}")
            if number:
                rates[kind].append(load.tokens_per_second)
    return [
        Cost(kind, tuple(found), tuple(rate / free for rate, free in zip(found, rates["free"], strict=True)))
        for kind, found in rates.items()
    ]


def _workload(number: int, tokens: int, temperature: float) -> Plan:
    requests = [
        BenchRequest(words(f"constraint {number} {index}", 32), tokens, temperature=temperature)
        for index in range(CLIENTS)
    ]
    return single_requests("constraint cost", requests, CLIENTS)


def show_cost(costs: Sequence[Cost]) -> list[str]:
    """A table, then what is over the bar."""
    rows = [
        (cost.kind, Spread.of(cost.tokens_per_second).show(), Spread.of(cost.ratios).show(3))
        for cost in costs
    ]
    lines = [Table(("answer", "tokens/s", "against free text"), rows).markdown()]
    for cost in costs:
        ratio = Spread.of(cost.ratios).median
        if cost.kind in UNFORCED and ratio < 1 - MAX_COST:
            lines.append(f"FAIL: {cost.kind}: {1 - ratio:.1%} fewer tokens/s, allowed are {MAX_COST:.0%}")
    return [*lines, f"{CLIENTS} clients, load average {os.getloadavg()[0]:.1f}"]
