"""The sampling fields of a body: those of `SamplingParams`, with its defaults, bounds and descriptions."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec
import pytest

from cllm.errors import InvalidRequest
from cllm.server.examples import TEXTS
from cllm.server.generation import GenerationBody
from cllm.types import SEED_SPACE, SamplingParams

PARAMETERS = {field.name: field for field in msgspec.structs.fields(SamplingParams)}
FIELDS = {field.name: field for field in msgspec.structs.fields(GenerationBody)}
HINTS = get_type_hints(SamplingParams, include_extras=True)
DIFFERENT = {"top_k", "seed", "logit_bias", "dry_sequence_breakers"}  # see GenerationBody


def sampling(**fields: Any) -> SamplingParams:
    return GenerationBody.parse(fields).sampling(vocabulary_size=100)


def test_an_empty_body_samples_by_the_defaults() -> None:
    found = sampling()
    assert msgspec.structs.replace(found, seed=None) == SamplingParams()
    assert found.seed is not None and 0 <= found.seed < SEED_SPACE
    assert sampling().seed != found.seed, "a random seed"


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter_is_a_field_with_a_description(name: str) -> None:
    if name in DIFFERENT:
        assert TEXTS.fields["GenerationBody"][name]
    else:
        assert FIELDS[name].default == PARAMETERS[name].default
        assert TEXTS.fields["SamplingParams"][name]


@pytest.mark.parametrize("name", sorted(PARAMETERS.keys() - DIFFERENT - {"ignore_eos"}))
def test_the_bounds_of_a_parameter_are_those_of_its_field(name: str) -> None:
    (meta,) = HINTS[name].__metadata__
    lowest = meta.ge if meta.ge is not None else meta.gt
    assert lowest is not None and meta.le is not None
    assert getattr(sampling(**{name: meta.le}), name) == meta.le
    for wrong in (meta.le + 1, lowest - 1, "1", True):
        with pytest.raises(InvalidRequest, match=name):
            sampling(**{name: wrong})


def test_what_differs_over_http() -> None:
    assert sampling(top_k=-1).top_k == 0
    assert sampling(seed=7).seed == 7 and sampling(seed=SEED_SPACE + 7).seed == 7
    assert sampling(seed=-1).seed != sampling(seed=-1).seed
    assert sampling(seed=-5).seed == sampling(seed=-5).seed == SEED_SPACE - 5
    assert sampling(logit_bias={"42": -1.5}).logit_bias == ((42, -1.5),)
    assert sampling(dry_sequence_breakers=["x"]).dry_sequence_breakers == ("x",)
    with pytest.raises(InvalidRequest, match="'100' is not a token id"):
        sampling(logit_bias={"100": 1.0})
