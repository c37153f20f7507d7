"""Forced calls of a family on a tiny model with random weights, whose special tokens are the family's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema

from cllm import LLM, SamplingParams
from tests.driver.turns import Family
from tests.tiny_models import CONTROL_TOKENS, make_dense

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "unit": {"enum": ["C", "F"]},
        "where": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["x"],
        },
    },
    "required": ["city", "unit"],
}
CLOSED = {**PARAMETERS, "additionalProperties": False}  # no key may be invented
CONTEXT = 16384  # the tokens are bytes
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": PARAMETERS}}
    for name in ("weather", "forecast")
]
_SPECIAL = re.compile(r"<\|[^<>|\s]{1,40}\|?>|<[^<>|\s]{1,40}\|>|<｜[^<>\s]{1,40}｜>|\[/?[A-Z_]{4,20}\]")


def find_controls(family: Family) -> set[str]:
    """The parts of a family's markers that look like special tokens."""
    return {token for marker in family.format.marker_texts for token in _SPECIAL.findall(marker)}


def make_model(family: Family, path: Path) -> Path:
    """A model with this template; markers that look like special tokens are control tokens."""
    controls = sorted(find_controls(family) - set(CONTROL_TOKENS))
    return make_dense(path, controls=controls, templates={"default": family.source}, context=CONTEXT)


def check_forced(path: Path, seeds: range, max_tokens: int = 400) -> tuple[int, int, list[str]]:
    """How many answers were complete, how many were cut, and what was wrong."""
    complete, cut, wrong = 0, 0, []
    with LLM(path, parallel=1, ctx_size=CONTEXT) as llm:
        for seed in seeds:
            options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "reasoning_effort": "none"}
            question = [{"role": "user", "content": f"How is it, {seed}?"}]
            sampling = SamplingParams(seed=seed, temperature=1.2)
            reply = llm.chat(question, sampling, max_tokens=max_tokens, **options)
            calls = list(reply.tool_calls)
            if reply.finish_reason == "length":
                cut += 1
                calls = calls[:-1]
            elif not calls:
                wrong.append(f"{seed}: no call in {reply.text!r}")
            else:
                complete += 1
            if reply.text.strip():
                wrong.append(f"{seed}: text {reply.text!r}")
            for call in calls:
                try:
                    jsonschema.validate(json.loads(call.arguments), CLOSED)
                except (ValueError, jsonschema.ValidationError) as error:
                    wrong.append(f"{seed}: {call.arguments!r}: {error}")
    return complete, cut, wrong
