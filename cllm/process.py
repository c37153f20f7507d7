"""The process: its log (one line per event, never a prompt or an answer), event loop and available memory."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cllm.names import make_visible

if TYPE_CHECKING:
    import asyncio

FORMAT = "%(asctime)s %(levelname)-7s %(name)s %(message)s"


class VisibleFormatter(logging.Formatter):
    """Formats records without control characters, whatever names are in them."""

    def format(self, record: logging.LogRecord) -> str:
        return make_visible(super().format(record))


def configure_logging(level: str) -> None:
    """Set up the root logger of a process that cllm owns (server, worker, CLI); not for library use.

    `level` is a name or a number.
    """
    number = int(level) if level.isdigit() else level.upper()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(VisibleFormatter(FORMAT))
    logging.basicConfig(handlers=[handler], level=number, force=True)
    # Verbose at debug level, of no use to an operator.
    for noisy in ("asyncio", "httpx", "httpcore", "multipart", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Use uvloop where it runs (not on every platform): the server shares its cores with the model."""
    with suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop()
    import asyncio  # not above: workers import this file, too, and run no loop

    return asyncio.new_event_loop()


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
