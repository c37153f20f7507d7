"""Large bodies are handled one at a time on a thread, and tenants take turns."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from cllm.server.body import LARGE_BODY, TenantTurns, run_in_turn
from cllm.types import TenantLimits


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_tenants_take_turns_and_a_waiter_that_leaves_gives_up_its_turn() -> None:
    async def run() -> list[str]:
        turns, order, opened = TenantTurns(), list[str](), asyncio.Event()

        async def wait(name: str) -> None:
            async with turns.hold(name[0]):
                await opened.wait()
                order.append(name)

        tasks = [asyncio.ensure_future(wait(name)) for name in ("a0", "a1", "a2", "a3", "b0", "c0", "b1")]
        await settle()
        tasks[1].cancel()
        await settle()
        opened.set()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        async with asyncio.timeout(5), turns.hold("d"):
            return order

    assert asyncio.run(run()) == ["a0", "b0", "c0", "a2", "b1", "a3"]


async def test_a_waiter_that_leaves_with_its_turn_passes_it_on() -> None:
    turns = TenantTurns()
    async with turns.hold("a"):
        waiter = asyncio.ensure_future(turns.hold("b").__aenter__())
        await settle()
    waiter.cancel()  # the turn is its own already
    with pytest.raises(asyncio.CancelledError):
        await waiter
    async with asyncio.timeout(5), turns.hold("c"):
        pass


@pytest.mark.parametrize(("size", "apart"), [(LARGE_BODY - 1, False), (LARGE_BODY, True)])
def test_only_what_is_large_is_handled_on_a_thread(size: int, apart: bool) -> None:
    async def body() -> bytes:
        return bytes(size)

    async def run() -> threading.Thread:
        http: Any = SimpleNamespace(
            body=body,
            app=SimpleNamespace(state=SimpleNamespace(large_bodies=TenantTurns())),
            scope={"state": {"tenant": TenantLimits()}},
        )
        return await run_in_turn(http, threading.current_thread)

    assert (asyncio.run(run()) is not threading.current_thread()) is apart
