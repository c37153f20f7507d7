"""How a request is spelled to a server, and how its streamed answer is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from bench.workloads.plan import BenchRequest


class Piece(NamedTuple):
    """What one event of a stream said. Counts are None where it did not say."""

    text: str = ""
    final: bool = False
    generated_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None


class Post(NamedTuple):
    """What to send, and where."""

    path: str
    body: bytes


class ToolFormat(Protocol):
    """One server's way to stream an answer. `exact` if it generates as many tokens as it is asked for."""

    @property
    def exact(self) -> bool: ...

    def post(self, request: BenchRequest, said: Sequence[str] | None = None) -> Post:
        """A completion or, with `said` (by the user and the model in turn, perhaps nothing yet), a chat."""

    def read(self, payload: bytes) -> Piece:
        """One event's payload. Raises ValueError for what is not JSON."""


class CllmDialect:
    """`POST /generate_stream`. Knows no chats."""

    exact = True

    def post(self, request: BenchRequest, said: Sequence[str] | None = None) -> Post:
        assert said is None, "/generate_stream takes one prompt"
        body = _encode(
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            ignore_eos=request.ignore_eos,
            stream=True,
        )
        return Post("/generate_stream", body)

    def read(self, payload: bytes) -> Piece:
        event: dict[str, Any] = json.loads(payload)
        if "error" in event:
            return Piece(final=True, error=str(event["error"]))
        usage: dict[str, int] = event.get("usage") or {}
        return Piece(
            text=event.get("token", ""),
            final=bool(event.get("done")),
            generated_tokens=event.get("generated_tokens"),
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=usage.get("cached_tokens"),
            finish_reason=event.get("finish_reason"),
        )


class OpenAIDialect:
    """`POST /v1/completions` and `/v1/chat/completions`.

    `ignore_eos` is no field of OpenAI's; cllm, llama-server and vLLM know it. For others: `exact` False.
    """

    def __init__(self, model: str = "default", exact: bool = True) -> None:
        self.exact = exact
        self._model = model

    def post(self, request: BenchRequest, said: Sequence[str] | None = None) -> Post:
        common: dict[str, object] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "ignore_eos": request.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if said is None:
            return Post("/v1/completions", _encode(prompt=request.prompt, **common))
        messages = [
            {"role": "assistant" if number % 2 else "user", "content": text}
            for number, text in enumerate([*said, request.prompt])
        ]
        return Post("/v1/chat/completions", _encode(messages=messages, **common))

    def read(self, payload: bytes) -> Piece:
        if payload == b"[DONE]":
            return Piece(final=True)
        event: dict[str, Any] = json.loads(payload)
        if "error" in event:
            return Piece(final=True, error=str(event["error"]))
        choice: dict[str, Any] = (event.get("choices") or [{}])[0]
        usage: dict[str, Any] = event.get("usage") or {}
        delta: dict[str, Any] = choice.get("delta") or {}
        return Piece(
            text=choice.get("text") or delta.get("content") or "",
            generated_tokens=usage.get("completion_tokens"),
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            finish_reason=choice.get("finish_reason"),
        )


class ChatDialect(OpenAIDialect):
    """`POST /v1/chat/completions` only: a prompt is one user's message."""

    def post(self, request: BenchRequest, said: Sequence[str] | None = None) -> Post:
        return super().post(request, said or ())


def _encode(**fields: object) -> bytes:
    return json.dumps(fields).encode()
