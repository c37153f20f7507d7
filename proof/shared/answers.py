"""Greedy answers of a server over HTTP, and the same-text rule over many of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from bench.client import PlainClient

TIE = 0.05  # logits closer than this (alone) may be sampled either way under load


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy text, token by token, with the gap between the two likeliest at each."""

    tokens: tuple[object, ...]  # ids, or the bytes of each
    gaps: tuple[float, ...]
    finish: str
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_from: str = ""  # the tiers of the KV cache

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


class Verdict(NamedTuple):
    """What became of all requests. `parted` met a tie and went the other way there."""

    same: int
    parted: int
    ties: int  # answers that met one
    compared: int  # tokens
    faults: tuple[str, ...]
    wrong: tuple[int, ...]  # the requests of the faults


def compare(alone: Sequence[Answer], crowded: Sequence[Answer], tie: float = TIE) -> Verdict:
    """The same-text rule over all answers; stricter: they may part at a tie only, not anywhere after one."""
    same = parted = ties = compared = 0
    faults, wrong = [], []
    for number, (one, other) in enumerate(zip(alone, crowded, strict=True)):
        ties += min(one.gaps, default=1.0) < tie
        pairs = zip_longest(one.tokens, other.tokens)
        first = next((step for step, (here, there) in enumerate(pairs) if here != there), None)
        compared += len(one.tokens) if first is None else first
        if first is None and one.finish == other.finish:
            same += 1
        elif first is not None and first < len(one.gaps) and one.gaps[first] < tie:
            parted += 1
        else:
            faults.append(f"request {number}: another text from token {first} on, which is no tie")
            wrong.append(number)
    return Verdict(same, parted, ties, compared, tuple(faults), tuple(wrong))


class Client(PlainClient):
    """Greedy requests to a server, on a connection each. May be used from several threads."""

    def complete(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Answer:
        """Complete tokens. They come back as ids, because texts of different tokens can be alike."""
        body = {"prompt": list(prompt), "n_predict": max_tokens, "n_probs": 2, **_GREEDY, **fields}
        answer = self.call("POST", "/completion", body)
        steps, timings = answer["completion_probabilities"], answer["timings"]
        return Answer(
            tokens=tuple(step["id"] for step in steps),
            gaps=_gaps(steps),
            finish=answer["stop_type"],
            text=answer["content"],
            prompt_tokens=answer["tokens_evaluated"],
            cached_tokens=timings["cache_n"],
            cached_from=answer.get("cached_from", ""),
        )

    def chat(self, messages: Sequence[Mapping[str, str]], max_tokens: int, **fields: Any) -> Answer:
        """Answer a conversation."""
        logprobs = {"logprobs": True, "top_logprobs": 2}
        body = {"messages": list(messages), "max_tokens": max_tokens, **logprobs, **_GREEDY, **fields}
        answer = self.call("POST", "/v1/chat/completions", body)
        (choice,), usage = answer["choices"], answer["usage"]
        steps, details = choice["logprobs"]["content"], usage["prompt_tokens_details"]
        return Answer(
            tokens=tuple(bytes(step["bytes"]) for step in steps),
            gaps=_gaps(steps),
            finish=choice["finish_reason"],
            text=choice["message"]["content"] or "",
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=details["cached_tokens"],
            cached_from=details.get("cached_from", ""),
        )

    def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(self.call("POST", "/tokenize", {"content": text})["tokens"])


_GREEDY = {"temperature": 0, "ignore_eos": True}


def _gaps(steps: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    gaps = []
    for step in steps:
        best, second = sorted((found["logprob"] for found in step["top_logprobs"]), reverse=True)
        gaps.append(best - second)
    return tuple(gaps)
