"""The times of a request under llama-server's names, which several dialects give."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from cllm import __version__
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.types import Usage


class Timings(msgspec.Struct, frozen=True):
    """The times of a request under llama-server's names. The first token comes with the prompt."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | msgspec.UnsetType = msgspec.UNSET
    draft_n_accepted: int | msgspec.UnsetType = msgspec.UNSET


def get_timings(stream: AsyncOutputStream, prompt_tokens: int, usage: Usage | None = None) -> Timings:
    """The times of a stream so far, or of one that has ended with this `usage`."""
    now = stream.ended or time.perf_counter()
    first = stream.first_token or now
    prompt_s, generated_s = first - stream.started, now - first
    usage = usage or Usage(prompt_tokens=prompt_tokens, completion_tokens=stream.generated)
    computed, steps = usage.prompt_tokens - usage.cached_tokens, max(0, usage.completion_tokens - 1)
    return Timings(
        cache_n=usage.cached_tokens,
        prompt_n=computed,
        prompt_ms=1000 * prompt_s,
        prompt_per_token_ms=1000 * prompt_s / computed if computed else 0.0,
        prompt_per_second=computed / prompt_s if prompt_s > 0 else 0.0,
        predicted_n=usage.completion_tokens,
        predicted_ms=1000 * generated_s,
        predicted_per_token_ms=1000 * generated_s / steps if steps else 0.0,
        predicted_per_second=steps / generated_s if generated_s > 0 else 0.0,
        draft_n=usage.drafted_tokens or msgspec.UNSET,
        draft_n_accepted=usage.accepted_tokens if usage.drafted_tokens else msgspec.UNSET,
    )


class PromptProgress(msgspec.Struct, frozen=True):
    """The part of a prompt that is computed."""

    total: int
    cache: int
    processed: int
    time_ms: float


class TimedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of llama-server that responses of OpenAI's routes have beside their own."""

    # Of the form of llama-server's, whose scripts look for a build number.
    system_fingerprint: str = f"b0-cllm-{__version__}"
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    prompt_progress: PromptProgress | msgspec.UnsetType = msgspec.UNSET
    verbose: dict[str, Any] | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="__verbose")
