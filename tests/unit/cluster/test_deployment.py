"""How many replicas are asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from cllm.cluster.deployment import count_replicas, decide
from cllm.cluster.directory import name_deployment
from cllm.config import EngineConfig


@pytest.mark.parametrize(
    ("now", "kv_used", "requests", "waiting", "needed"),
    [
        (1, [0.59], 8, 0, 1),
        (1, [0.6], 8, 0, 2),
        (2, [0.9], 8, 0, 2),  # the second is on its way
        (1, [0.1], 8, 1, 2),  # one waits for a slot
        (1, [0.1], 8, 9, 3),
        (2, [0.3, 0.3], 8, 0, 2),  # as it was with one: no flapping
        (2, [0.1, 0.1], 3, 0, 1),
        (2, [0.1, 0.1], 6, 0, 2),  # too many for the slots of one
        (1, [0.0], 0, 0, 1),
        (3, [], 0, 0, 3),  # nothing is known
    ],
)
def test_counts(now: int, kv_used: list[float], requests: int, waiting: int, needed: int) -> None:
    assert count_replicas(now, kv_used, requests, waiting, slots=8) == needed


def test_the_decision_keeps_the_bounds() -> None:
    figures = {"kv_used": {"a": 0.9}, "requests": {"a": 9.0}, "waiting": {"a": 99.0}, "slots": {"a": 8.0}}
    context = SimpleNamespace(
        aggregated_metrics=figures,
        target_num_replicas=1,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=2,
        policy_state={},
    )
    assert decide(context) == (2, {})


@pytest.mark.parametrize(("alias", "name"), [("a/b, c", "a-b"), (" ,", "file"), ("", "file")])
def test_a_deployment_has_the_first_name_of_its_model(alias: str, name: str) -> None:
    assert name_deployment(EngineConfig(alias=alias), Path("file.gguf")) == name
