"""Adapters by name: what a setting says, and the keys of their sets."""

from __future__ import annotations

import pytest

from cllm.adapters import Adapter, find_invocation, join_key, make_salt, parse_adapter, split_key
from cllm.errors import ConfigError
from cllm.types import Prompt


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sql=a.gguf", Adapter(name="sql", file="a.gguf")),
        ("sql=/x=y/a.gguf:0.5", Adapter(name="sql", file="/x=y/a.gguf", scale=0.5)),
        ("sql=hf:me/repo:Q8_0", Adapter(name="sql", file="hf:me/repo:Q8_0")),
        ("sql=hf:me/repo/a.gguf:-2", Adapter(name="sql", file="hf:me/repo/a.gguf", scale=-2.0)),
    ],
)
def test_a_scale_follows_the_last_colon(text: str, expected: Adapter) -> None:
    assert parse_adapter(text) == expected


@pytest.mark.parametrize("text", ["a.gguf", "=a.gguf", "sql=", "a b=x", "sql=a:1000", "sql=a:nan"])
def test_a_wrong_adapter_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write NAME=FILE or NAME=FILE:SCALE"):
        parse_adapter(text)


def test_a_key_has_the_scales_of_its_adapters() -> None:
    key = join_key([("b", 0.1), ("a", 1.0), ("c", 0.0)])
    assert key == join_key([("a", 1.0), ("b", 0.1)]) and split_key(key) == {"a": 1.0, "b": 0.1}
    assert join_key([]) == join_key([("a", 0.0)]) == "" and split_key("") == {}


def test_keys_keep_sets_apart() -> None:
    base, one, other = (Prompt((1, 2, 3), adapter=key) for key in ("", "a:1.0", "a:0.5"))
    assert len({prompt.key(tenant) for prompt in (base, one, other) for tenant in ("", "t")}) == 6


def test_an_alora_has_the_key_of_the_base_up_to_its_invocation() -> None:
    first, second = (Prompt((1, 2, 3), adapter=key, adapter_from=2) for key in ("a:1.0", "b:1.0"))
    assert first.key("t") == second.key("t") == Prompt((1,)).key("t")
    assert first.keyed((1, 2, 3, 4))[:2] == second.keyed((1, 2, 3, 4))[:2] == [1, 2]
    tokens = {*first.keyed((1, 2, 3, 4))[2:], *second.keyed((1, 2, 3, 4))[2:]}
    assert len(tokens) == 4 and min(tokens) >= 1 << 30 and max(tokens) < 1 << 31
    assert make_salt("a:1.0") != make_salt("b:1.0")


def test_the_last_invocation_counts() -> None:
    assert find_invocation((7, 8, 1, 7, 8, 2), (7, 8)) == 3
    assert find_invocation((7, 7, 8), (7, 8)) == 1
    assert find_invocation((7,), (7, 8)) is None and find_invocation((1, 2), (3,)) is None
