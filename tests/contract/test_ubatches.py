"""`count_ubatches` is the work counter of a step: it must say what llama.cpp really does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.backend.base import Batch, Row, StepStatus, count_ubatches
from tests.driver.kinds import NATIVE, Kind, open_runner
from tests.driver.runner import GREEDY, Aborts, native


def rows(lengths: dict[int, int]) -> tuple[Row, ...]:
    """Rows of empty sequences: id -> how many tokens."""
    return tuple(Row(i, 0, (65,) * count, 0, None) for i, count in sorted(lengths.items()))


@pytest.mark.parametrize(
    ("lengths", "split", "unified"),
    [
        ({0: 1}, 1, 1),
        ({0: 64}, 1, 1),
        ({0: 1, 1: 1, 2: 1}, 1, 1),  # a run of ids, equally long: one
        ({0: 1, 2: 1}, 2, 1),  # a gap ends the run
        ({0: 1, 1: 1, 3: 1, 4: 1}, 2, 1),
        ({0: 1, 1: 5}, 2, 1),  # 1 + 1 tokens, then the other 4
        ({0: 5, 1: 1}, 2, 1),
        ({0: 3, 1: 1, 3: 7}, 3, 1),  # {0, 1} × 1; {0} × 2; {3} × 7
        ({0: 3, 1: 1, 2: 3}, 3, 1),  # {0, 1, 2} × 1; {0} × 2, as 1 is done; {2} × 2
        ({0: 3, 1: 2, 2: 1}, 3, 1),  # {0, 1, 2} × 1; {0, 1} × 1; {0} × 1
        ({0: 20, 1: 20, 2: 20}, 1, 1),
        ({0: 30, 1: 34}, 2, 1),
    ],
)
def test_hand_worked_cases(lengths: dict[int, int], split: int, unified: int) -> None:
    assert count_ubatches(rows(lengths), 64, unified=False) == split
    assert count_ubatches(rows(lengths), 64, unified=True) == unified


def test_a_small_physical_batch_cuts_by_size() -> None:
    assert count_ubatches(rows({0: 33}), 16, unified=True) == 3
    assert count_ubatches(rows({0: 33}), 16, unified=False) == 3
    assert count_ubatches(rows({0: 10, 1: 10}), 16, unified=False) == 2  # 8 of each, then 2 of each
    assert count_ubatches(rows({0: 1, 1: 1, 2: 1}), 2, unified=False) == 2


def test_no_rows_are_no_work() -> None:
    assert count_ubatches((), 64, unified=False) == count_ubatches((), 64, unified=True) == 0


@pytest.fixture(scope="module", params=NATIVE, ids=lambda kind: kind.label)
def counting(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[Aborts]:
    """A runner whose graph nodes are counted."""
    kind: Kind = request.param
    runner = open_runner(models, kind, sequences=5)
    with Aborts(native(runner)).watching() as aborts:
        yield aborts
    runner.close()


def computed(aborts: Aborts, lengths: dict[int, int]) -> tuple[int, int]:
    """Of a step with these rows: the graph nodes computed, and the ubatches the runner tells."""
    runner = aborts.runner
    sampler = runner.create_sampler(GREEDY)
    aborts.nodes = 0
    result = runner.run(Batch(tuple(row._replace(outputs=1, sampler=sampler) for row in rows(lengths))))
    assert result.status is StepStatus.DONE
    for seq_id in lengths:
        runner.truncate(seq_id, 0)
    return aborts.nodes, result.ubatches


# Was (recurrent, unified): llama_memory_recurrent splits by equal length and consecutive ids in either layout
# (split_equal with sequential=true), so LlamaRunner must not count such a model as unified.
@settings(max_examples=25, deadline=None)
@given(lengths=st.dictionaries(st.integers(0, 4), st.integers(1, 12), min_size=1))
def test_as_many_graphs_are_computed_as_are_counted(counting: Aborts, lengths: dict[int, int]) -> None:
    nodes_of_one, _ = computed(counting, {0: 1})
    nodes, counted = computed(counting, lengths)
    assert nodes == counted * nodes_of_one
