"""Batch runner: the lines of batches run as requests of their route, in what live requests leave idle.

A line is an HTTP request without a connection: its route reads the body and answers. It has the lowest
priority. While a live request is in an engine, no line starts but those that `beside` allows; lines that
run go on, unless a live request needs their slot. Then the youngest are given back, and run again later.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from cllm.config import ServerConfig
from cllm.errors import CllmError, PoisonRequest
from cllm.frontend.async_calls import CALLER, Caller
from cllm.frontend.engine_registry import EngineRegistry, ModelLease
from cllm.server.batches import BatchObject, FileObject, make_answer, make_refusal, read_request
from cllm.server.dialect import Route
from cllm.server.generation import BATCH_PRIORITY
from cllm.server.job_store import DONE, FAILED, BatchLine, JobDatabase, JobStore, LineCounts, StoredObject
from cllm.server.keys import KeyRing
from cllm.server.middleware import LEASES, ROUTE_SEND
from cllm.types import TenantLimits

log = logging.getLogger(__name__)
LOOK_S = 0.025  # between two looks at the queue while lines run
IDLE_S = 1.0  # while none runs
RETRY_S = 1.0  # after a refusal for want of capacity, or a failure of the store
STARVED_S = 60.0  # without a line that started: then one does, however busy the server is
MAX_ATTEMPTS = 3  # at a line that fails by the server's fault
FETCHED = 64  # lines that are read at a time
SURPLUS = 2  # lines beyond the slots: a freed slot has a successor at once
_encode, _replace = msgspec.json.Encoder().encode, msgspec.structs.replace
_decode = msgspec.json.Decoder(BatchObject).decode


class Retry(Exception):
    """A line was not answered, and runs again."""


class BatchWork:
    """A batch that runs: its lines are taken in order, and those that were given back first."""

    def __init__(self, stored: StoredObject) -> None:
        self.stored = stored
        self.lines: deque[BatchLine] = deque()
        self.last: BatchLine | None = None  # that was read
        self.read_all = False
        self.running: dict[asyncio.Task[None], BatchLine] = {}
        self.attempts: Counter[int] = Counter()  # of lines that failed, by number

    @property
    def batch(self) -> BatchObject:
        return _decode(self.stored.record)

    async def next_line(self, store: JobStore) -> BatchLine | None:
        if not self.lines and not self.read_all:
            found = await store.run(JobDatabase.next_lines, self.stored.id, self.last, FETCHED)
            self.lines.extend(found)
            self.last, self.read_all = found[-1] if found else self.last, not found
        return self.lines.popleft() if self.lines else None


class BatchRunner:
    """Runs the batches of all tenants, a tenant with the fewest running lines first."""

    def __init__(
        self,
        app: Any,
        routes: Mapping[str, Route],
        store: JobStore,
        registry: EngineRegistry,
        keys: KeyRing,
        config: ServerConfig,
    ) -> None:
        """`routes` are those of lines, by their path."""
        self._app, self._routes, self._store = app, routes, store
        self._registry, self._keys = registry, keys
        self._ttl, self._beside = config.response_ttl, config.batch_beside
        self._works: dict[str, BatchWork] = {}
        self._changed = asyncio.Event()
        self._changed.set()
        self._started_at = time.monotonic()  # the last line
        self._paused_until = 0.0

    def wake(self) -> None:
        """Look at the batches: one is new, or is to be cancelled."""
        self._changed.set()

    async def run(self) -> None:
        """Run lines until it is cancelled; what runs then runs again after the next start."""
        try:
            while True:
                try:
                    await self._look()
                except Exception as error:
                    log.error("batches wait: %s", error, exc_info=not isinstance(error, CllmError))
                    await asyncio.sleep(RETRY_S)
                await self._wait()
        finally:
            for work in self._works.values():
                for task in work.running:
                    task.cancel()

    async def _wait(self) -> None:
        """Wait until a line has ended, or a batch has changed, or it is time to look again."""
        running = [task for work in self._works.values() for task in work.running]
        changed = asyncio.ensure_future(self._changed.wait())
        waiting = any(work.lines or not work.read_all for work in self._works.values())
        timeout = LOOK_S if running or waiting else IDLE_S
        await asyncio.wait((*running, changed), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()

    async def _look(self) -> None:
        if self._changed.is_set():
            self._changed.clear()
            await self._read_batches()
        for work in [*self._works.values()]:
            self._collect(work)
            await self._end_if_done(work)
        lines, live, slots = self._count_requests()
        if live:
            self._give_back(live + lines - slots)
        if time.monotonic() >= self._paused_until:
            await self._start_lines(lines, live, slots)

    async def _read_batches(self) -> None:
        for stored in await self._store.run(JobDatabase.list_active, "batch"):
            if (work := self._works.get(stored.id)) is None:
                self._works[stored.id] = BatchWork(stored)
            else:
                work.stored = stored

    def _count_requests(self) -> tuple[int, int, int]:
        """Requests of lines and of others in the engines, and the slots for them."""
        states = self._registry.requests
        lines = sum(state.request.priority == BATCH_PRIORITY for state in states)
        slots = 1
        with suppress(CllmError):
            slots = ((limits := self._registry.current.limits) and limits.max_running) or 1
        return lines, len(states) - lines, slots

    def _collect(self, work: BatchWork) -> None:
        """Take the lines that have ended out of the running ones; one without an answer runs again."""
        for task, line in [*work.running.items()]:
            if task.done():
                del work.running[task]
                if task.cancelled() or task.exception() is not None:
                    work.lines.appendleft(line)
                if not task.cancelled() and (error := task.exception()) is not None:
                    self._paused_until = time.monotonic() + RETRY_S
                    if not isinstance(error, Retry | CllmError):
                        log.error("a line of %s failed", work.stored.id, exc_info=error)

    def _give_back(self, count: int) -> None:
        """Cancel the youngest lines: live requests need their slots."""
        tasks = [task for work in self._works.values() for task in work.running]
        for task in tasks[len(tasks) - min(count, len(tasks)) :] if count > 0 else ():
            task.cancel()

    async def _start_lines(self, lines: int, live: int, slots: int) -> None:
        limit = slots + SURPLUS if not live else min(self._beside, slots - live)
        if live and time.monotonic() - self._started_at > STARVED_S:
            limit = max(1, limit)
        running = sum(len(work.running) for work in self._works.values())
        while max(running, lines) < limit:
            busy: Counter[str] = Counter()
            for work in self._works.values():
                busy[work.stored.tenant] += len(work.running)
            for work in sorted(self._works.values(), key=lambda each: busy[each.stored.tenant]):
                if (line := await work.next_line(self._store)) is not None:
                    task = asyncio.ensure_future(self._run_line(work, line))
                    work.running[task] = line
                    self._started_at = time.monotonic()
                    running += 1
                    break
            else:
                return

    # One line ----------------------------------------------------------------------------------------

    async def _run_line(self, work: BatchWork, line: BatchLine) -> None:
        """Answer a line. Raises Retry, and StorageFailed where the answer could not be kept."""
        batch = work.batch
        request = await asyncio.to_thread(self._read, batch, line)
        response = await self._call(self._routes[batch.endpoint], work.stored.tenant, bytes(request.body))
        status, body = response.status_code, bytes(response.body)
        if status >= 500 and PoisonRequest.code.encode() not in body:
            work.attempts[line.number] += 1
        if status in (429, 503) or 0 < work.attempts[line.number] < MAX_ATTEMPTS:
            raise Retry
        answer = make_answer(request.custom_id, status, f"batch_req_{secrets.token_hex(12)}", body)
        state = DONE if status == 200 else FAILED
        await self._store.run(JobDatabase.add_answer, work.stored.id, line.number, answer, state)

    def _read(self, batch: BatchObject, line: BatchLine) -> Any:
        with self._store.get_path(batch.input_file_id).open("rb") as file:
            file.seek(line.begin)
            return read_request(file.read(line.size))

    async def _call(self, route: Route, tenant: str, body: bytes) -> Response:
        """What the route answers to a request of a tenant."""
        leases: list[ModelLease] = []
        messages = deque([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            if messages:
                return messages.popleft()
            await asyncio.get_running_loop().create_future()  # there is no client to disconnect
            raise AssertionError

        limits = self._keys.tenants.get(tenant) or TenantLimits(name=tenant)
        state = {"tenant": limits, "dialect": route.dialect, "priority": BATCH_PRIORITY}
        scope = {"type": "http", "method": "POST", "path": route.path, "path_params": {}, "query_string": b""}
        more = {"headers": [], "app": self._app, "state": state, LEASES: leases, ROUTE_SEND: None}
        CALLER.set(Caller(tenant))
        try:
            return await route.respond(Request({**scope, **more}, receive))
        finally:
            for lease in leases:
                lease.release()

    # The end of a batch ------------------------------------------------------------------------------

    async def _end_if_done(self, work: BatchWork) -> None:
        """Write the files of a batch that has no line left, or was cancelled, or has expired."""
        batch, status = work.batch, ""
        if batch.status == "cancelling" or not self._is_allowed(work.stored.tenant):
            status, message = "cancelled", "the batch was cancelled before this line was computed"
        elif time.time() >= batch.expires_at:
            status, message = "expired", "the batch expired before this line was computed"
        elif work.read_all and not work.lines and not work.running:
            status, message = "completed", ""
        if not status:
            return
        for task in work.running:
            task.cancel()
        if work.running:
            return  # they end first
        files = {state: self._make_file(work, name) for state, name in ((DONE, "output"), (FAILED, "error"))}
        finish = partial(self._finish, status, files)

        def describe(line: BatchLine) -> bytes:
            custom_id = self._read(batch, line).custom_id
            return make_refusal(custom_id, f"batch_req_{secrets.token_hex(12)}", f"batch_{status}", message)

        stored = {
            state: StoredObject(
                file.id, work.stored.tenant, time.time(), file.expires_at or None, record=_encode(file)
            )
            for state, file in files.items()
        }
        await self._store.run(JobDatabase.finish_batch, work.stored, stored, finish, describe)
        del self._works[work.stored.id]

    def _is_allowed(self, tenant: str) -> bool:
        """False for the tenant of a key that was removed."""
        return not self._keys.closed or tenant in self._keys.tenants

    def _make_file(self, work: BatchWork, name: str) -> FileObject:
        batch_id, now = work.stored.id, int(time.time())
        return FileObject(
            id=f"file-{batch_id.removeprefix('batch_')}-{name}",
            bytes=0,
            created_at=now,
            expires_at=now + int(work.stored.more or self._ttl),
            filename=f"{batch_id}_{name}.jsonl",
            purpose="batch_output",
        )

    def _finish(
        self, status: str, files: Mapping[int, FileObject], stored: StoredObject, counts: LineCounts
    ) -> StoredObject:
        batch = _decode(stored.record)
        batch.finalizing_at, batch.request_counts = int(time.time()), counts
        batch.output_file_id = files[DONE].id if counts.completed else None
        batch.error_file_id = files[FAILED].id if counts.failed else None
        batch.enter(status)
        return _replace(stored, active=False, expires=time.time() + self._ttl, record=_encode(batch))
