"""Results of a long run, kept in a file of lines: a run that was ended goes on after them."""

from __future__ import annotations

from pathlib import Path
from typing import Generic, TypeVar

import msgspec

Result = TypeVar("Result")


class Kept(Generic[Result]):
    """Results by name. The last one of a name counts."""

    def __init__(self, path: Path, kind: type[Result], *, fresh: bool = False) -> None:
        """`fresh` forgets what is in the file."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            path.unlink(missing_ok=True)
        lines = path.read_bytes().splitlines() if path.exists() else []
        self.found: dict[str, Result] = {}
        for line in lines:
            name, result = msgspec.json.decode(line, type=tuple[str, kind])  # type: ignore[valid-type]
            self.found[name] = result

    def add(self, name: str, result: Result) -> None:
        self.found[name] = result
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode((name, result)) + b"\n")
