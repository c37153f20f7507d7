"""The life cycle of requests, slots and cached cells: every order of events in a small world.

No path is without exactly one terminal event for each request, no slot is leased twice, and no cell is both
in use and cached. `proof/life_cycle.py` goes further from the start.
"""

from __future__ import annotations

import pytest

from tests.driver.life_cycle import WORLDS, World, explore, small_scale

# From the start; from two running requests and one that waits; from cached slots.
STARTS = {
    (): (3, 170, 105),
    ("add r0", "add r1", "add r2", "step", "step"): (2, 55, 38),
    ("add r0", *["step"] * 8): (3, 125, 60),
}


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_every_order_of_events(world: World) -> None:
    outcomes: set[str] = set()
    preempted = 0
    for begin, (depth, min_transitions, min_states) in STARTS.items():
        with small_scale():
            found = explore(world, depth, begin)
        assert found.complete and found.depth == depth
        assert found.transitions >= min_transitions and found.states >= min_states, str(found)
        outcomes |= found.outcomes
        preempted += found.preempted
    assert outcomes == {"length", "cancelled", "error"} and preempted > 0
