"""Progress of a pull: a bar with speed and time left on a terminal, else a line now and then."""

from __future__ import annotations

import logging
import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from cllm.models.files import format_size

log = logging.getLogger(__name__)
LINE_S = 15.0  # between lines where there is no terminal


class PullProgress:
    """Shows how far a pull is."""

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total = name, total
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task(name, total=total)
        self._began = self._shown = time.monotonic()
        self._first: int | None = None

    def __enter__(self) -> PullProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, before: int, here: int) -> None:
        """Bytes of the files before, and of the present one, that are here."""
        done, now = before + here, time.monotonic()
        if self._first is None:
            self._first = done
            self._bar.reset(self._task, completed=done)
        self._bar.update(self._task, completed=done)
        if self._bar.disable and now - self._shown > LINE_S:
            self._shown = now
            speed = (done - self._first) / (now - self._began)
            left = (self._total - done) / speed if speed else 0.0
            log.warning(
                *("%s: %s of %s, %s/s, %.0f s left", self._name, format_size(done)),
                *(format_size(self._total), format_size(speed), left),
            )
