"""How cost grows: measured on a tiny model, shown in tables and a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import growth
from bench.growth import VOCABULARIES, Growth, Machine, main, sampling_times


def made_up() -> Growth:
    return Growth(
        machine=Machine(10e9, 80e9),
        model_bytes=100_000_000,
        by_context={(sequences, context): 20.0 for sequences in (1, 8) for context in growth.CONTEXTS},
        by_sequences={(sequences, 32): 10.0 * sequences for sequences in growth.SEQUENCES},
        by_vocabulary=dict.fromkeys(VOCABULARIES, (50.0, 200.0)),
    )


def test_a_step_is_held_against_reading_the_weights() -> None:
    text = made_up().text()
    assert "at least 10.0 ms a step" in text
    row = next(line for line in text.splitlines() if line.startswith("| 8 "))
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["8", "80.0 ms", "100", "8.0 ×"]


def test_sampling_is_measured_on_the_real_library() -> None:
    found = sampling_times((1_000, 50_000))
    assert list(found) == [1_000, 50_000]
    assert all(ours > 0 and plain > 0 for ours, plain in found.values())


def test_the_command_writes_tables_figures_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    measured = made_up()
    monkeypatch.setattr(growth, "step_times", lambda model, points, *_: dict.fromkeys(points, 1.0))
    monkeypatch.setattr(growth, "sampling_times", lambda sizes: measured.by_vocabulary)
    monkeypatch.setattr(Machine, "measured", lambda cores: measured.machine)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"x" * 1000)
    assert main(["--model", str(model), "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (tmp_path / "growth.md").read_text()
    assert json.loads((tmp_path / "growth.json").read_text())["ms_by_sequences"]["32"] == 1.0
    assert (tmp_path / "plots" / "growth.png").read_bytes().startswith(b"\x89PNG")
