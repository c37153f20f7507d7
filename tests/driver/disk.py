"""The disk tier of an engine: what comes from it, and a disk that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from cllm.core.kv_cache.disk_cache import DiskThread, Operation
from tests.driver.engine import StepDriver, Tokens, words

LIMIT_S = 30.0
PROMPT = words(1, 200)
Start = Callable[..., StepDriver]


def serve(driver: StepDriver, prompt: Tokens = PROMPT, **fields: Any) -> tuple[int, str]:
    """Answer a prompt: how many of its tokens were cached, and where."""
    return finish(driver, driver.add(prompt, 8, ignore_eos=True, **fields))


def check(driver: StepDriver) -> None:
    """Answer all requests, rightly."""
    driver.finish()
    for name in driver.requests:
        driver.check_answer(name)


def finish(driver: StepDriver, name: str) -> tuple[int, str]:
    """Answer all requests: how many tokens of this one were cached, and where."""
    check(driver)
    usage = driver.usage(name)
    return usage.cached_tokens, usage.cached_from


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
