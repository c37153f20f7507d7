"""Recorded costs: files are read, steps are cut as llama.cpp cuts them, recordings find what they measure."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.costs import MachineCosts, read_costs, split_shape
from bench.costs.record import CONTEXTS, ROWS, record
from bench.simulate import SimulatedClock, SimulatedRunner
from cllm.backend.base import Batch, Row, count_ubatches
from cllm.core.step_cost import TILE, StepShape
from cllm.errors import SetupError

LENGTHS = st.dictionaries(st.integers(0, 12), st.sampled_from([1, 2, TILE, TILE + 1, 100]), min_size=1)


def make_batch(lengths: dict[int, int], position: int = 0) -> Batch:
    rows = (Row(seq_id, position, [0] * lengths[seq_id], 1, None) for seq_id in sorted(lengths))
    return Batch(tuple(rows))


def test_all_recorded_costs_are_read() -> None:
    known = read_costs()
    assert {"x86-amx", "x86-avx512", "x86-vnni", "neoverse-n1", "h200-8b"} <= known.keys()
    for costs in known.values():
        assert costs.source.startswith(("recorded", "derived")) and costs.machine and costs.model
        assert min(*costs.step[:4], costs.transfer_gb_s, costs.state_bytes) > 0
        assert costs.step.tiled <= costs.step.attended


def test_a_bad_file_of_costs_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"machine": "m", "speed": 1}')
    with pytest.raises(SetupError, match=r"mine\.json.*speed"):
        read_costs(tmp_path)


@given(LENGTHS, st.integers(1, 600))
def test_a_step_has_the_ubatches_of_llama_cpp(lengths: dict[int, int], ubatch_tokens: int) -> None:
    batch = make_batch(lengths)
    shape = split_shape(batch, ubatch_tokens)
    assert shape.ubatches == count_ubatches(batch.rows, ubatch_tokens, unified=False)
    assert shape.prefill_tokens + shape.rows == batch.token_count


@given(st.sampled_from([1, 2, TILE - 1, TILE, TILE + 1, 100, 256]), st.integers(0, 1000))
def test_a_lone_row_has_the_shape_that_the_cost_model_sees(count: int, position: int) -> None:
    batch = make_batch({3: count}, position)
    seen = StepShape.of(batch, 1, split=True)
    assert split_shape(batch, 512) == pytest.approx(seen)


def test_rows_of_other_lengths_cut_a_tile() -> None:
    """Beside a decoding row, 65 tokens are one along with it and a whole tile; 64 are none."""
    assert split_shape(make_batch({0: 1, 1: TILE + 1}, 9), 512).tiled > 0
    assert split_shape(make_batch({0: 1, 1: TILE}, 9), 512).tiled == 0
    pair = split_shape(make_batch({0: TILE, 1: TILE + TILE // 2}, 9), 512)
    assert pair.ubatches == 2 and pair.tiled > 0 and pair.attended > 0


@pytest.mark.parametrize("name", ["x86-amx", "neoverse-n1"])
def test_a_recording_finds_the_costs_of_its_runner(name: str) -> None:
    known, clock = read_costs()[name], SimulatedClock()
    slots, cells = max(ROWS), CONTEXTS[-1] + 256
    runner = SimulatedRunner(known, clock, slots=slots, cells=slots * cells)
    labels = {"machine": "m", "instructions": "i", "model": "m", "source": "recorded"}
    found, error = record(runner, labels, 1, clock.perf_counter)
    assert found.step == pytest.approx(known.step, rel=0.05) and error < 0.02
    assert (found.transfer_gb_s, found.state_bytes) == pytest.approx((known.transfer_gb_s, known.state_bytes))
    assert msgspec.json.decode(msgspec.json.encode(found), type=MachineCosts) == found
