"""The targets of `proof/fuzz_parsers.py` hold for their seeds and for random bytes, without a fuzzer."""

from __future__ import annotations

import random

import pytest

from proof.fuzz_parsers import NAMES
from proof.shared.fuzz_targets import TARGETS
from proof.timing import welch


@pytest.mark.parametrize("name", NAMES)
def test_a_target_holds_for_its_seeds_and_random_bytes(name: str) -> None:
    target, draw = TARGETS[name], random.Random(1)
    for data in (*target.seeds(), *(draw.randbytes(draw.randint(0, 120)) for _ in range(40))):
        target.run(data)


def test_every_target_is_run() -> None:
    assert set(NAMES) == TARGETS.keys()


def test_welchs_test_tells_means_apart_and_no_others() -> None:
    draw = random.Random(1)
    first, second = ([draw.gauss(5, 1) for _ in range(500)] for _ in range(2))
    assert welch(first, second) > 0.001
    assert welch(first, [each + 1 for each in second]) < 1e-9
    assert abs(welch([1.0, 2.0, 3.0, 4.0] * 50, [1.1, 2.1, 3.1, 4.1] * 50) - 0.37) < 0.01
