"""Answers in OpenAI's shapes, from the engine's deltas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cllm.types import Delta, TokenLogprob, Usage


def usage(usages: Sequence[Usage | None], prompt_tokens: int) -> dict[str, Any]:
    """Of all choices together; a prompt counts once however many answers it got."""
    ended = [one for one in usages if one is not None]
    generated = sum(one.completion_tokens for one in ended)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": _cached(ended)},
    }


def _cached(ended: Sequence[Usage]) -> int:
    return min((one.cached_tokens for one in ended), default=0)


def text_of(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def completion_logprobs(entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """The legacy shape: parallel lists."""
    tokens = [text_of(entry.pieces[0]) for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {text_of(piece): logprob for piece, (_, logprob) in zip(entry.pieces[1:], entry.top, strict=True)}
            for entry in entries
        ],
        "text_offset": offsets,
    }


def chat_logprobs(entries: Sequence[TokenLogprob], count: int) -> dict[str, Any]:
    """The chat shape: one object a token."""

    def one(piece: bytes, logprob: float) -> dict[str, Any]:
        return {"token": text_of(piece), "logprob": logprob, "bytes": list(piece)}

    return {
        "content": [
            {
                **one(entry.pieces[0], entry.logprob),
                "top_logprobs": [
                    one(piece, logprob)
                    for piece, (_, logprob) in zip(entry.pieces[1:], entry.top, strict=True)
                ][:count],
            }
            for entry in entries
        ]
    }


def joined_logprobs(deltas: Sequence[Delta]) -> list[TokenLogprob]:
    return [entry for delta in deltas for entry in delta.logprobs]


def joined_text(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def mean_logprob(deltas: Sequence[Delta]) -> float:
    """How likely an answer is, per token: what `best_of` ranks by."""
    entries = joined_logprobs(deltas)
    return sum(entry.logprob for entry in entries) / len(entries) if entries else float("-inf")
