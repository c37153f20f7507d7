"""Cached tokens, and the tier of the KV cache they came from, in the words of each API."""

from __future__ import annotations

import msgspec

from cllm.server.dialects.openai.completions import make_usage
from cllm.types import Usage

USAGE = Usage(prompt_tokens=90, completion_tokens=4, cached_tokens=80, cached_from="ram")


def test_of_several_choices_the_one_that_had_least_counts() -> None:
    other = Usage(prompt_tokens=90, completion_tokens=4, cached_tokens=60, cached_from="device")
    assert msgspec.to_builtins(make_usage([USAGE, None, other], 90)) == {
        "prompt_tokens": 90,
        "completion_tokens": 8,
        "total_tokens": 98,
        "prompt_tokens_details": {"cached_tokens": 60, "cached_from": "device"},
    }
    assert make_usage([None], 90).prompt_tokens_details.cached_tokens == 0
