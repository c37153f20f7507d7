"""What a process and all its descendants take from the machine. Reads /proc: Linux only."""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from cllm.errors import SetupError

_PROC = Path("/proc")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sums over a process tree. Memory shared inside the tree counts once for each process."""

    processes: int
    rss_bytes: int
    file_descriptors: int
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
    return Footprint(
        processes=len(totals),
        rss_bytes=sum(each.rss_bytes for each in totals),
        file_descriptors=sum(each.file_descriptors for each in totals),
        threads=sum(each.threads for each in totals),
        cpu_s=sum(each.cpu_s for each in totals),
    )


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
    except OSError:
        return None
    return Footprint(
        processes=1,
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
        file_descriptors=descriptors,
        threads=int(fields[17]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND,
    )


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state (field 3 of proc(5)) on; empty if it has gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()
