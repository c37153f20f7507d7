"""Forced calls of a family on a tiny model with random weights, whose special tokens are the family's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema

from cllm import LLM, SamplingParams
from cllm.chat.reply import ChatReply
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
    """How many answers were complete, how many were cut, and what was wrong.

    One thread: a step of this model is so short that two spend it waiting for each other.
    """
    complete, cut, wrong = 0, 0, list[str]()
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "reasoning_effort": "none"}
    with LLM(path, parallel=1, ctx_size=CONTEXT, threads=1) as llm:
        for seed in seeds:
            question = [{"role": "user", "content": f"How is it, {seed}?"}]
            sampling = SamplingParams(seed=seed, temperature=1.2)
            reply = llm.chat(question, sampling, max_tokens=max_tokens, **options)
            ended = reply.finish_reason != "length"
            complete, cut = complete + ended, cut + (not ended)
            wrong += [f"{seed}: {fault}" for fault in find_faults(reply)]
    return complete, cut, wrong


def find_faults(reply: ChatReply) -> list[str]:
    """What is wrong with an answer that must be calls; the last one may be cut."""
    calls, faults = list(reply.tool_calls), list[str]()
    if reply.finish_reason == "length":
        calls = calls[:-1]
    elif not calls:
        faults.append(f"no call in {reply.text!r}")
    if reply.text.strip():
        faults.append(f"text {reply.text!r}")
    for call in calls:
        try:
            jsonschema.validate(json.loads(call.arguments), CLOSED)
        except (ValueError, jsonschema.ValidationError) as error:
            faults.append(f"{call.arguments!r}: {error}")
    return faults
