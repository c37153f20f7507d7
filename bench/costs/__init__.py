"""Recorded costs: what steps and KV transfers take on machines, one file each.

`python -m bench.costs.record NAME` measures the machine at hand. `bench.simulate` runs the scheduler on them,
so a policy can be judged for a machine that is not here.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from cllm.backend.base import Batch
from cllm.core.step_cost import StepCost, StepShape, attended_pairs
from cllm.errors import SetupError

FOLDER = Path(__file__).parent


class MachineCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of one machine and model, in split KV."""

    machine: str
    instructions: str  # those that choose kernels
    model: str
    source: str  # recorded when, or derived from which figures
    ubatch_ms: float  # a pass over the weights
    prefill_token_ms: float
    row_ms: float  # of a decoding sequence
    attended_us: float  # a pair of a token and a cell, token by token
    tiled_us: float  # in tiles of 64 tokens
    transfer_gb_s: float  # KV memory to host RAM, and back
    state_bytes: int  # a token
    stream_copy_ms: float | None = None  # from slot to slot; None: by way of RAM
    asynchronous: bool = False  # a GPU

    @property
    def step(self) -> StepCost:
        return StepCost(
            ubatch=1e-3 * self.ubatch_ms,
            prefill_token=1e-3 * self.prefill_token_ms,
            row=1e-3 * self.row_ms,
            attended=1e-6 * self.attended_us,
            tiled=1e-6 * self.tiled_us,
        )

    def transfer_s(self, size: int) -> float:
        return size / (1e9 * self.transfer_gb_s)


def read_costs(folder: Path = FOLDER) -> dict[str, MachineCosts]:
    """All recorded costs, by name. Raises SetupError with the file's name and what is wrong in it."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path.stem] = msgspec.json.decode(path.read_bytes(), type=MachineCosts)
        except (OSError, msgspec.DecodeError) as error:
            raise SetupError(f"{path}: {error}") from None
    return found


def split_shape(batch: Batch, ubatch_tokens: int) -> StepShape:
    """The shape of a step in split KV, ubatch by ubatch as llama.cpp cuts it.

    `StepShape.of` looks at rows. Here a long row is attended in tiles only where enough of its tokens are in
    one ubatch, which rows of other lengths cut short.
    """
    lengths = Counter({row.seq_id: len(row.tokens) for row in batch.rows})
    long = [row.seq_id for row in batch.rows if len(row.tokens) > max(1, row.outputs)]
    lengths.update(batch.padding)
    positions = dict.fromkeys(batch.padding, 0) | {row.seq_id: row.position for row in batch.rows}
    prefill = sum(lengths[seq_id] for seq_id in long)
    rows = sum(lengths.values()) - prefill
    ubatches, attended, tiled = 0, 0.0, 0.0
    while lengths:
        run = [min(lengths)]
        while run[-1] + 1 in lengths and len(run) < ubatch_tokens:
            run.append(run[-1] + 1)
        take = min(min(lengths[seq_id] for seq_id in run), max(1, ubatch_tokens // len(run)))
        for seq_id in run:
            pairs = attended_pairs(take, positions[seq_id], take)
            attended, tiled = attended + pairs[0], tiled + pairs[1]
            positions[seq_id] += take
            lengths[seq_id] -= take
            if not lengths[seq_id]:
                del lengths[seq_id]
        ubatches += 1
    return StepShape(ubatches, prefill, rows, attended, tiled)
