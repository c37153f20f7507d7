"""What a process and all its descendants take from the machine. Reads /proc: Linux only."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import NamedTuple

from cllm.errors import SetupError

_PROC = Path("/proc")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Footprint(NamedTuple):
    """Sums over a process tree. Memory is the anonymous part: what is mapped from files does not count."""

    memory_bytes: int
    descriptors: int
    threads: int
    cpu_s: float


def name_processor() -> str:
    try:
        lines = (_PROC / "cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def measure(pid: int) -> Footprint:
    """The tree under `pid`, now; processes that end while it looks are left out. Raises SetupError."""
    totals = [found for found in map(_measure_one, descendants(pid)) if found is not None]
    if not totals:
        raise SetupError(f"process {pid} has ended (or this system has no /proc)")
    return Footprint(*map(sum, zip(*totals, strict=True)))


def cpu_seconds(pid: int) -> float:
    """User and system time of one process, all its threads, none of its children. Raises SetupError."""
    found = _measure_one(pid)
    if found is None:
        raise SetupError(f"process {pid} has ended (or this system has no /proc)")
    return found.cpu_s


def descendants(pid: int) -> list[int]:
    """`pid` and every process below it."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for each in found:
        found.extend(children.get(each, ()))
    return found


def library_digest(pid: int, name: str) -> str | None:
    """Hash of the shared library called `name`* that the tree has mapped; None if there is none."""
    for each in descendants(pid):
        try:
            maps = (_PROC / str(each) / "maps").read_text()
        except OSError:
            continue
        for line in maps.splitlines():
            path = Path(line.split(maxsplit=5)[-1])
            if path.name.startswith(name) and path.is_file():
                return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return None


def _measure_one(pid: int) -> Footprint | None:
    fields = _stat(pid)
    if not fields or fields[0] == "Z":
        return None
    try:
        descriptors = len(list((_PROC / str(pid) / "fd").iterdir()))
        anonymous = (_PROC / str(pid) / "status").read_text().partition("RssAnon:")[2].split()
    except OSError:
        return None
    memory_bytes = 1024 * int(anonymous[0]) if anonymous else 0
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
    return Footprint(memory_bytes, descriptors, int(fields[17]), cpu_s)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state (field 3 of proc(5)) on; empty if it has gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()
