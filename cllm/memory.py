"""Memory of the machine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def read_available_memory() -> int | None:
    """Bytes that the system has available, or None where it does not say. A container's limit counts."""
    found = []
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    with suppress(OSError, ValueError):  # the word "max": no limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        usage = Path("/sys/fs/cgroup/memory.stat").read_text().split()
        held = sum(int(usage[usage.index(name) + 1]) for name in ("anon", "shmem"))
        found.append(max(0, limit - held))
    return min(found, default=None)
