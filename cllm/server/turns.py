"""Turns: what is large is decoded and converted on a thread, one task at a time, tenants in turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

from starlette.requests import Request

LARGE_BODY = 64 << 10  # bytes; a smaller body takes less time than the way to a thread and back costs others
Given = ParamSpec("Given")
Result = TypeVar("Result")


class TenantTurns:
    """A lock whose waiters take turns by tenant, and are in line within one."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # in the order of the tenants' turns
        self._taken = False

    @asynccontextmanager
    async def hold(self, tenant: str) -> AsyncIterator[None]:
        if self._taken:
            turn = asyncio.get_running_loop().create_future()
            self._lines.setdefault(tenant, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it was given already
                    self._release()
                raise
        self._taken = True
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        self._taken = False
        while self._lines and not self._taken:
            tenant = next(iter(self._lines))
            line = self._lines.pop(tenant)
            if not (turn := line.popleft()).done():
                turn.set_result(None)
                self._taken = True
            if line:
                self._lines[tenant] = line


async def run_in_turn(
    http: Request, task: Callable[Given, Result], *arguments: Given.args, **options: Given.kwargs
) -> Result:
    """Run what handles a body: here, or on a thread in turn where the body is large.

    Native calls hold the interpreter's lock, but after `check_shape` each is short: other requests go on.
    """
    if len(await http.body()) < LARGE_BODY:
        return task(*arguments, **options)
    async with http.app.state.large_bodies.hold(http.scope["state"]["tenant"].name):
        return await asyncio.to_thread(task, *arguments, **options)
