"""What a client asks for costs others at most the inter-token target: gaps of a plain stream beside it."""

from __future__ import annotations

import pytest

from proof.neighbours import MAX_GAP, TARGET_S, gaps_of_all
from tests.driver.server import Server, Stopwatch

ATTEMPTS = 3  # something delays a token now and then; a defect delays it every time


def test_no_request_stops_a_stream_beside_it(wide: Server) -> None:
    """Steps of this model take a hundredth of the target, so how fast the machine is does not matter."""
    watch = Stopwatch(wide.process.pid, wide.child("engine"))
    late: list[dict[str, float]] = []
    for number in range(ATTEMPTS):
        gaps = gaps_of_all(wide.url, number, 2, lambda: watch.seconds, prompt="One fine morning")
        late.append({name: gap for name, gap in gaps.items() if gap > MAX_GAP * TARGET_S})
        if not late[-1]:
            return
    pytest.fail(f"longest gaps, seconds: {late}")
