"""Another process on the machine, busy on one core."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# It ends with its parent: a bench that is killed leaves nothing spinning.
_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy_neighbour(busy: bool = True) -> Iterator[int]:
    """A process that never waits, for as long as the block lasts; yields its id, 0 if none is wanted."""
    if not busy:
        yield 0
        return
    process = subprocess.Popen([sys.executable, "-S", "-c", _SPIN])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()
