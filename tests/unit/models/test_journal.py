"""The journal of a download: what counts after a kill, and what after a crash of the system."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cllm.models import journal as module
from cllm.models.journal import BLOCK, Journal

SIZE = 3 * BLOCK + 5


OpenJournal = Callable[..., Journal]


@pytest.fixture
def open_journal(tmp_path: Path) -> Iterator[OpenJournal]:
    """Opens journals of the same file; the one before is left as it is, as after kill -9."""
    with ExitStack() as stack:

        def make(etag: str = "e", size: int = SIZE) -> Journal:
            journal = Journal(tmp_path / "x.journal", tmp_path / "x.part", etag, size)
            stack.callback(journal.close)
            return journal

        yield make


def written(journal: Journal) -> list[bool]:
    return [journal.is_written(block) for block in range(journal.count)]


def test_marks_survive_without_being_closed(open_journal: OpenJournal, tmp_path: Path) -> None:
    first = open_journal()
    first.mark(1)
    first.mark(3)
    again = open_journal()
    assert written(again) == [False, True, False, True]
    assert again.missing_bytes == 2 * BLOCK and again.span(3) == (3 * BLOCK, SIZE)
    assert (tmp_path / "x.part").stat().st_size == SIZE


def test_after_a_crash_only_what_was_synced_counts(
    open_journal: OpenJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_journal()
    first.mark(0)
    first.sync()
    first.mark(1)
    monkeypatch.setattr(module, "boot_id", lambda: "the next boot")
    assert written(open_journal()) == [True, False, False, False]


@pytest.mark.parametrize("change", ["etag", "size", "part is gone", "journal is damaged"])
def test_what_does_not_match_begins_again(open_journal: OpenJournal, tmp_path: Path, change: str) -> None:
    first = open_journal()
    (tmp_path / "x.part").write_bytes(b"\1" * SIZE)
    first.mark(0)
    if change == "part is gone":
        (tmp_path / "x.part").unlink()
    if change == "journal is damaged":
        (tmp_path / "x.journal").write_bytes(b"{")
    again = open_journal("f" if change == "etag" else "e", SIZE + (change == "size"))
    assert not any(written(again))
    assert not any((tmp_path / "x.part").read_bytes())


def test_a_late_mark_is_ignored(open_journal: OpenJournal, tmp_path: Path) -> None:
    journal = open_journal()
    journal.close()
    journal.mark(0)
    assert not any(written(open_journal()))


def test_an_empty_file_has_no_blocks(open_journal: OpenJournal, tmp_path: Path) -> None:
    journal = open_journal(size=0)
    assert journal.count == 0 and journal.missing_bytes == 0
