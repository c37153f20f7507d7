"""Limits are one table and one page, and a request beyond one is refused with its name, value and field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from cllm import limits
from cllm.frontend.engine_client import EngineClient
from cllm.limits import (
    LIMITS,
    MAX_BIASED_TOKENS,
    MAX_BIASES,
    MAX_CONTAINERS,
    MAX_PIECES,
    MAX_TOKENIZED,
    MAX_VALUES,
)
from cllm.server.body import LARGE_BODY
from cllm.types import Request, SamplingParams
from tests.unit.server.test_scheduling_fields import with_server

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| ([^|]+) \| ([\d,]+) \| (.+) \|$", re.MULTILINE)
QUESTION = [{"role": "user", "content": "?"}]


def test_the_page_has_every_limit_with_its_value() -> None:
    page = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    shown = [(name, int(value.replace(",", "")), bounds) for name, value, bounds in ROW.findall(page)]
    assert shown == LIMITS
    values = {name: value for name, value in vars(limits).items() if name.startswith("MAX_")}
    assert sorted(values.values()) == sorted(limit.value for limit in LIMITS)


def refused(path: str, body: Any, message: str, field: str | None) -> None:
    """Post a body, which must be refused in these words; the server goes on."""

    async def ask(client: httpx.AsyncClient, _engine: EngineClient, _requests: list[Request]) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        answer = await client.post(path, content=content, headers=headers)
        assert answer.status_code == 400 and message in answer.text, answer.text[:300]
        if path.startswith("/v1"):
            assert answer.json()["error"]["param"] == field
        assert (await client.get("/health")).status_code == 200

    with_server(ask)


def test_biases_are_counted_after_they_are_tokenised() -> None:
    """1,024 texts were 205,000 biases, applied in every step for everybody to wait."""
    texts = {f"{number:03}" + "x" * 20: 1.0 for number in range(1000)}
    body = {"prompt": "a", "n_predict": 1, "logit_bias": texts}
    refused("/completion", body, f"biased tokens, the limit is {MAX_BIASED_TOKENS}", "logit_bias")
    most = SamplingParams(logit_bias=((1, 1.0),) * (MAX_BIASES + MAX_BIASED_TOKENS))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(most), type=SamplingParams) == most


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/tokenize", {"content": "é" * (MAX_PIECES // 2) + "a", "with_pieces": True}, MAX_PIECES),
        ("/tokenize", {"content": [1, "é" * (MAX_TOKENIZED // 2), "a"]}, MAX_TOKENIZED),
        ("/encode", {"text": "a" * (MAX_TOKENIZED + 1)}, MAX_TOKENIZED),
    ],
)
def test_bytes_are_counted_before_they_are_tokenised(path: str, body: Any, limit: int) -> None:
    refused(path, body, f"{limit + 1} bytes to tokenise, the limit is {limit}", None)


@pytest.mark.parametrize(
    ("path", "field", "item", "limit"),
    [
        ("/v1/chat/completions", "messages", {"role": "user", "content": [{"type": "text"}] * 4000}, 0),
        ("/v1/chat/completions", "tools", {"a": {}}, MAX_CONTAINERS),
        ("/v1/completions", "json_schema", [], MAX_CONTAINERS),
        ("/v1/completions", "unknown", 1, MAX_VALUES),
        ("/v1/responses", "input", [[]], MAX_CONTAINERS),
        ("/v1/embeddings", "input", 1, MAX_VALUES),
    ],
)
def test_a_field_of_too_many_values_is_refused_by_name(path: str, field: str, item: Any, limit: int) -> None:
    body = {"messages": QUESTION, "prompt": "a", field: [item] * (limit or 9)}
    assert len(json.dumps(body)) > LARGE_BODY
    refused(path, body, f"{field}: ", field)


def test_texts_of_arguments_are_counted_together() -> None:
    """They are parsed for the chat template: 7.5 MB of lists in one text took four seconds."""
    text = json.dumps({"a": [[]] * (MAX_CONTAINERS // 2)})
    calls = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": text}}] * 2
    body = {"messages": [*QUESTION, {"role": "assistant", "tool_calls": calls}]}
    refused("/v1/chat/completions", body, "objects and lists, the limit is", "messages")
