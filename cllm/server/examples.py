"""Example answers for the description of the API, made from the types and names of their fields."""

from __future__ import annotations

from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

MODEL = "SmolLM2-135M-Instruct"
CREATED = 1767225600
VECTOR = [0.118, -0.042, 0.307]
VALUES: dict[str, Any] = {  # by the name of a field, where its type is that of the value
    **dict.fromkeys(("created", "created_at", "completed_at", "loaded_at", "last_used"), CREATED),
    **dict.fromkeys(("name", "model", "root", "model_alias"), MODEL),
    **dict.fromkeys(("id", "request_id"), "8f0c2d7e"),
    **dict.fromkeys(("text", "content", "response"), "AI is …"),
    **dict.fromkeys(("n_ctx", "context", "context_length", "max_model_len", "request_tokens"), 4096),
    **dict.fromkeys(("prompt_tokens", "input_tokens", "prompt_n", "prompt_eval_count"), 4),
    **dict.fromkeys(("completion_tokens", "output_tokens", "predicted_n", "generated_tokens"), 3),
    **dict.fromkeys(("usage", "timings", "embed"), ...),  # in every answer, though they have a default
    "embedding": VECTOR,
    "embeddings": [VECTOR],
    "sequences": 8,
    "total_tokens": 7,
    "architecture": "llama",
    "description": "llama 135M Q4_1",
    "ftype": "Q4_1",
    "parameters": 134515584,
    "size_bytes": 96862464,
    "chat_template": "{% for message in messages %}…{% endfor %}",
    "file": "SmolLM2-135M-Instruct-Q4_1.gguf",
    "capabilities": ["completion", "chat", "tools", "embeddings"],
    "memory_bytes": {"host": 1879048192},
    "memory_limit_bytes": {"host": 8589934592},
    "digest": "9f86d081884c7d659a2feaa0",
    "scale": 1.0,
    "age_s": 0.31,
    "stop_reason": "end_turn",
    "finish_reason": "stop",
}


def make_example(kind: Any, name: str = "") -> Any:
    """A value of a type. A struct has its required fields, and those of `VALUES`."""
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if outer in (Annotated, Union, UnionType):
        return make_example(inner[0], name)
    if outer is Literal:
        return inner[0]
    if issubclass(outer, msgspec.Struct):
        shown = [each for each in msgspec.structs.fields(kind) if each.required or each.name in VALUES]
        return kind(**{each.name: make_example(each.type, each.name) for each in shown})
    if issubclass(outer, Enum):
        return next(iter(outer))
    if isinstance(VALUES.get(name), outer):
        return VALUES[name]
    if outer in (list, tuple):
        item = make_example(inner[0])
        return outer([item] if isinstance(item, msgspec.Struct) else [])
    return outer()
