"""`make stats` counts what it says it counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import stats

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("source", "values"),
    [
        ("x = [0, 1, 2, -1, 1.0, True, None, '7']", []),
        ("LIMIT = 4 << 20", [4, 20]),
        ("def f(a=0.5):\n    return a * -2 + 3e-3", [0.5, -2, 0.003]),
    ],
)
def test_numeric_literals_wherever_they_are(tmp_path: Path, source: str, values: list[float]) -> None:
    (tmp_path / "a.py").write_text(source)
    assert sorted(value for _, value in stats.numeric_literals(tmp_path / "a.py")) == sorted(values)


def test_forbidden_words_are_found_inside_names_but_not_inside_other_words(tmp_path: Path) -> None:
    package = tmp_path / "cllm"
    package.mkdir()
    (package / "a.py").write_text("class Unparked: MOST_X = 1  # nobody guesses\nspark.most_common()\n")
    found = {figure.name: figure for figure in stats.word_figures(tmp_path)}
    assert [found[f"word: {word}"].value for word in stats.FORBIDDEN] == [1, 1, 0, 1, 0, 1]
    assert not found["word: park"].met and not found["word: preempt"].met and found["word: told"].met


def test_functions_have_the_lines_of_their_code_objects(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("@property\n@other\ndef f(a):\n    return a\n")
    assert list(stats.functions_in(tmp_path / "a.py")) == [("f", 1, 2)]


def test_only_functions_of_most_requests_count_and_idle_ones_do_not() -> None:
    def seen(name: str, kind: int, rounds: range) -> list[list[object]]:
        return [[3 * number + kind, "a.py", name, 1] for number in rounds]

    process = {
        "seen": [
            *seen("request", 2, range(9)),
            *seen("after", 3, range(9)),
            *seen("rare", 2, range(4)),
            *seen("heartbeat", 1, range(9)),
            *seen("heartbeat", 2, range(9)),
            *seen("request.<locals>.<listcomp>", 2, range(9)),
        ]
    }
    assert {name for _, name, _ in stats.entered(process)} == {"request", "after"}
    assert {name for _, name, _ in stats.entered(process, until_answer=True)} == {"request"}


def test_static_bars_are_met() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "stats.py"), "--static"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == int("MISSED" in done.stdout), done.stderr
    assert done.returncode == 0 and "shipped lines" in done.stdout, done.stdout
