"""An answer goes on in another engine on llama.cpp: greedy text, and drawn text with its seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cllm.backend.base import ModelRunner
from cllm.types import ConstraintKind, ConstraintSpec, SamplingParams
from tests.driver.engine import StepDriver, ask, words
from tests.driver.kinds import RECURRENT, Kind, Opened, open_runner

EXACT = Kind("dense", flash=False)
TOKENS = 24
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 7, "ignore_eos": True}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "ignore_eos": True},
    "drawn": {**DRAWN, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "top-k": {**DRAWN, "top_k": 5},
    "top-p of few": {**DRAWN, "top_k": 0, "top_p": 0.3},
    "penalties": {**DRAWN, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "penalty_last_n": 12},
    "greedy penalties": {
        "temperature": 0,
        "repetition_penalty": 1.5,
        "presence_penalty": 1.0,
        "ignore_eos": True,
    },
    "dry": {**DRAWN, "dry_multiplier": 2.0, "dry_allowed_length": 1},
    "bias": {**DRAWN, "logit_bias": ((65, 4.0), (66, 4.0), (67, -100.0))},
}
DIGITS = ConstraintSpec(ConstraintKind.REGEX, "([0-9]{3}, ){4}[a-z]{9}!")
CHOICES = ConstraintSpec(
    ConstraintKind.JSON_SCHEMA,
    '{"type": "array", "items": {"enum": ["one", "two"]}, "minItems": 5, "maxItems": 5}',
)
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 3},
    "digits": {"constraint": DIGITS},
    "forced tokens": {"constraint": CHOICES},
}


@pytest.fixture(scope="module")
def exact(models: dict[str, Path]) -> Iterator[ModelRunner]:
    with closing(open_runner(models, EXACT, sequences=4)) as runner:
        yield runner


def check_resumed(runner: ModelRunner, sampling: dict[str, Any], fields: dict[str, Any]) -> None:
    """Resumed from four places, in one batch."""
    request = msgspec.structs.replace(
        ask("r", words(3, 12), TOKENS, logprobs=0), sampling=SamplingParams(**sampling), **fields
    )
    driver = StepDriver(runner)
    driver.submit(request)
    places: list[tuple[str, tuple[int, ...], int]] = []
    while not driver.core.idle:
        driver.step()
        said = driver.answers["r"]
        places.append((said.text, said.tokens, len(said.logprobs)))
    whole = driver.answers["r"]
    assert len(places) > 4
    places = places[:-1]
    places = [places[number * len(places) // 4] for number in range(4)]
    driver = StepDriver(runner)
    for number, (_, tokens, _) in enumerate(places):
        driver.submit(msgspec.structs.replace(request, id=f"r{number}", generated_prefix=tokens))
    driver.finish()
    for number, (text, tokens, scored) in enumerate(places):
        rest = driver.answers[f"r{number}"]
        assert tokens + rest.tokens == whole.tokens, f"another text from token {len(tokens)} on"
        assert text + rest.text == whole.text
        assert rest.finish_reason is whole.finish_reason
        assert rest.work.completion_tokens == whole.work.completion_tokens
        logprobs = [each.logprob for each in rest.logprobs]
        assert logprobs == pytest.approx([each.logprob for each in whole.logprobs[scored:]], abs=1e-3)


@pytest.mark.parametrize("name", SAMPLING)
def test_each_way_to_sample(name: str, exact: ModelRunner) -> None:
    check_resumed(exact, SAMPLING[name], {})


@pytest.mark.parametrize("sampling", ["greedy", "top-k"])
@pytest.mark.parametrize("fields", FIELDS)
def test_each_kind_of_answer(fields: str, sampling: str, exact: ModelRunner) -> None:
    check_resumed(exact, SAMPLING[sampling], FIELDS[fields])


def test_a_recurrent_model(opened: Opened) -> None:
    check_resumed(opened(RECURRENT, sequences=4), SAMPLING["drawn"], {})
