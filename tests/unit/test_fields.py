"""Values by name become a struct, or the name of the wrong one is in the error."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cllm.config import EngineConfig, ServerConfig
from cllm.errors import InvalidRequest
from cllm.fields import describe_unknown, parse_fields
from cllm.types import SamplingParams


def test_values_by_name_become_a_struct() -> None:
    assert parse_fields({"parallel": 3, "port": 1}, EngineConfig) == EngineConfig(parallel=3)
    assert parse_fields({"port": "80"}, ServerConfig, strict=False) == ServerConfig(port=80)
    assert parse_fields({"dry_sequence_breakers": ["x"]}, SamplingParams).dry_sequence_breakers == ("x",)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (EngineConfig, "parallel", 256),
        (EngineConfig, "flash_attention", 1),
        (ServerConfig, "max_timeout_s", math.inf),
        (ServerConfig, "slow_reader_s", 0),
        (SamplingParams, "temperature", math.nan),
        (SamplingParams, "dry_sequence_breakers", "abc"),
        (SamplingParams, "logit_bias", [[1, -math.inf]]),
        (SamplingParams, "logit_bias", {1: 2.0}),
    ],
)
def test_a_wrong_value_is_named(kind: Any, field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field} is ") as refusal:
        parse_fields({field: value}, kind)
    assert refusal.value.field == field and len(refusal.value.message) < 200


def test_an_unknown_name_comes_with_the_one_that_was_meant() -> None:
    assert (
        describe_unknown("ctx_sise", EngineConfig.__struct_fields__)
        == "'ctx_sise' (did you mean 'ctx_size'?)"
    )
    assert describe_unknown("xyz", EngineConfig.__struct_fields__) == "'xyz'"
