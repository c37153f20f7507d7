"""A disk that does not answer, for the disk tier of an engine."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from cllm.core.kv_cache.disk_cache import DiskThread, Operation

LIMIT_S = 30.0


class DiskGate:
    """While it is closed, the disk does not answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self._open.set()
        submit = DiskThread.submit

        def wait_and_do(disk: DiskThread, operation: Operation) -> Future[Any]:
            def gated() -> Any:
                assert self._open.wait(LIMIT_S)
                return operation()

            return submit(disk, gated)

        monkeypatch.setattr(DiskThread, "submit", wait_and_do)

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()
