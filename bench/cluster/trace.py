"""The trace: when requests come, how long they are, and which blocks of prompts they share."""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

TRACE = Path(__file__).with_name("mooncake_conversation.json.xz")
BLOCK_TOKENS = 512


class TraceRequest(NamedTuple):
    """A request of the trace. `blocks` are those of its prompt that are whole."""

    name: str
    at_s: float
    tokens: int
    answer_tokens: int
    blocks: tuple[int, ...]


def load_trace(path: Path = TRACE, *, compress: float = 1.0, count: int | None = None) -> list[TraceRequest]:
    """The requests in order of arrival; with `compress` 5 they come five times as fast."""
    lines: Sequence[Sequence[int]] = json.loads(lzma.decompress(path.read_bytes()))
    requests, now_ms = [], 0
    for number, (passed_ms, tokens, answer_tokens, *runs) in enumerate(islice(lines, count)):
        now_ms += passed_ms
        pairs = zip(runs[::2], runs[1::2], strict=True)
        blocks = tuple(block for first, length in pairs for block in range(first, first + length))
        whole = blocks[: (tokens - 1) // BLOCK_TOKENS]  # the last token is always computed
        at_s = now_ms / 1000 / compress
        requests.append(TraceRequest(f"r{number}", at_s, tokens, max(1, answer_tokens), whole))
    return requests
