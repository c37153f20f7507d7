"""The engine is killed in mid-answer, and each answer is as if not: a sample of `proof/resume.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from proof.resume import STREAMS, open_session


@pytest.mark.parametrize(
    ("model", "group", "positions"), [("scripted", "features", (1, 30)), ("tiny", "features", (6,))]
)
def test_a_sample_of_kills(model: str, group: str, positions: tuple[int, ...], tmp_path: Path) -> None:
    with open_session(tmp_path, model, group) as session:
        for tokens in positions:
            outcome = session.kill_at(tokens)
            assert outcome.faults == [] and outcome.same == STREAMS
            assert outcome.exact >= STREAMS - 2, "all but forced tokens come one at a time"
