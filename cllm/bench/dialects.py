"""How a request is spelled to a server, and how its streamed answer is read."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Protocol

from cllm.bench.workloads import BenchRequest


class Piece(NamedTuple):
    """What one event of a stream said. Counts are None where it did not say."""

    text: str = ""
    final: bool = False
    generated_tokens: int | None = None
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None


class Dialect(Protocol):
    """One server's way to stream a completion."""

    @property
    def path(self) -> str: ...

    def body(self, request: BenchRequest) -> bytes:
        """The JSON to POST."""

    def read(self, payload: bytes) -> Piece:
        """One event's payload. Raises ValueError for what is not JSON."""


class CllmDialect:
    """`POST /generate_stream`."""

    path = "/generate_stream"

    def body(self, request: BenchRequest) -> bytes:
        return _encode(
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            ignore_eos=request.ignore_eos,
            stream=True,
        )

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
            finish_reason=event.get("finish_reason"),
        )


class OpenAIDialect:
    """`POST /v1/completions`, with llama-server's own fields; other servers ignore those.

    `cache_prompt` is off so that every request is computed, however often its text was seen.
    """

    path = "/v1/completions"

    def __init__(self, model: str = "default") -> None:
        self._model = model

    def body(self, request: BenchRequest) -> bytes:
        return _encode(
            model=self._model,
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            ignore_eos=request.ignore_eos,
            cache_prompt=False,
            stream=True,
            stream_options={"include_usage": True},
        )

    def read(self, payload: bytes) -> Piece:
        if payload == b"[DONE]":
            return Piece(final=True)
        event: dict[str, Any] = json.loads(payload)
        if "error" in event:
            return Piece(final=True, error=str(event["error"]))
        choice: dict[str, Any] = (event.get("choices") or [{}])[0]
        usage: dict[str, int] = event.get("usage") or {}
        return Piece(
            text=choice.get("text") or "",
            generated_tokens=usage.get("completion_tokens"),
            prompt_tokens=usage.get("prompt_tokens"),
            finish_reason=choice.get("finish_reason"),
        )


class ChatDialect:
    """`POST /v1/chat/completions`: the prompt as one user's message."""

    path = "/v1/chat/completions"

    def body(self, request: BenchRequest) -> bytes:
        return _encode(
            model="default",
            messages=[{"role": "user", "content": request.prompt}],
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            ignore_eos=request.ignore_eos,
            stream=True,
            stream_options={"include_usage": True},
        )

    def read(self, payload: bytes) -> Piece:
        if payload == b"[DONE]":
            return Piece(final=True)
        event: dict[str, Any] = json.loads(payload)
        if "error" in event:
            return Piece(final=True, error=str(event["error"]))
        choice: dict[str, Any] = (event.get("choices") or [{}])[0]
        usage: dict[str, int] = event.get("usage") or {}
        return Piece(
            text=(choice.get("delta") or {}).get("content") or "",
            generated_tokens=usage.get("completion_tokens"),
            prompt_tokens=usage.get("prompt_tokens"),
            finish_reason=choice.get("finish_reason"),
        )


def _encode(**fields: object) -> bytes:
    return json.dumps(fields).encode()
