"""Journal of a download: which blocks of the part file are written. It survives a killed process and a crash.

A byte for each block: missing, written (the system has it: valid until this boot ends), or synced (on disk).
"""

from __future__ import annotations

import io
import json
import os
import re
import threading
from contextlib import suppress
from pathlib import Path

BLOCK = 64 << 10
MISSING, WRITTEN, SYNCED = 0, 1, 2
_HEADER = 512
_WRITTEN = re.compile(bytes([WRITTEN]))


def boot_id() -> str:
    """Identifies the time since the system was started; a value of its own where that is unknown."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.urandom(8).hex()


class Journal:
    """The states of a part file's blocks, in memory and beside it. A part file of another is removed."""

    def __init__(self, path: Path, part: Path, etag: str, size: int) -> None:
        self._path, self._part = path, part
        self.size = size
        self.count = -(-size // BLOCK)
        header = {"etag": etag, "size": size, "block": BLOCK, "boot": boot_id()}
        self._states = self._read(header) or bytearray(self.count)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not any(self._states):
            part.unlink(missing_ok=True)
        with part.open("ab") as file:
            file.truncate(size)  # its blocks take no space until they are written
        fresh = path.with_name(path.name + ".fresh")
        with fresh.open("wb") as file:  # written in full now: later writes need no new space
            file.write(json.dumps(header).encode().ljust(_HEADER) + self._states)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        self._lock = threading.Lock()
        self._file: io.FileIO | None = io.FileIO(path, "r+")

    def _read(self, header: dict[str, object]) -> bytearray | None:
        with suppress(OSError, ValueError):
            data = self._path.read_bytes()
            before = json.loads(data[:_HEADER])
            states = bytearray(data[_HEADER:])
            if before | {"boot": ""} == header | {"boot": ""} and len(states) == self.count:
                if self._part.stat().st_size != self.size:
                    return None
                if before["boot"] != header["boot"]:  # what was not synced may be lost
                    states = bytearray(state if state == SYNCED else MISSING for state in states)
                return states
        return None

    def is_written(self, block: int) -> bool:
        return self._states[block] != MISSING

    def span(self, block: int) -> tuple[int, int]:
        """First and last byte, plus one, of a block."""
        return block * BLOCK, min(self.size, (block + 1) * BLOCK)

    def mark(self, block: int) -> None:
        """The block's bytes were written to the part file."""
        self._set(block, WRITTEN)

    def _set(self, block: int, state: int) -> None:
        with self._lock:
            if self._file is not None:
                self._states[block] = state
                self._file.seek(_HEADER + block)
                self._file.write(bytes([state]))

    @property
    def missing_bytes(self) -> int:
        missing = self._states.count(MISSING) * BLOCK
        if self.count and self._states[-1] == MISSING:
            missing -= self.count * BLOCK - self.size
        return missing

    def sync(self) -> None:
        """Bring written blocks to disk, then their marks: in this order a mark never precedes its data."""
        if self._file is None:
            return
        written = [found.start() for found in re.finditer(_WRITTEN, self._states)]
        if written:
            with self._part.open("rb") as file:
                os.fsync(file.fileno())
            for block in written:
                self._set(block, SYNCED)
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Later marks, of a thread that is late, are ignored."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def remove(self) -> None:
        """Forget the download: the journal first, so that no part file is ever trusted without it."""
        self.close()
        self._path.unlink(missing_ok=True)
        self._part.unlink(missing_ok=True)
