"""Logging: one line per event on standard error, never a prompt or an answer."""

from __future__ import annotations

import logging
import sys

from cllm.names import make_visible

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
    for noisy in ("asyncio", "httpx", "httpcore", "multipart"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
