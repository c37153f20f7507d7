"""Batch runner: the lines of batches run as requests of their route, in what live requests leave idle.

A line is an HTTP request without a connection: its route reads the body and answers. It has the lowest
priority. While a live request is in an engine, no line starts; lines that run go on, unless a live request
needs their slot. Then the youngest are given back, and run again later. Lines unload no model that is in use,
and leave one where live requests wait for another.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

import msgspec

from cllm.config import ServerConfig
from cllm.errors import CllmError, PoisonRequest
from cllm.frontend.engine_registry import EngineRegistry
from cllm.frontend.served_model import ServedModel
from cllm.server.background import CallRoute
from cllm.server.batches import BatchObject, FileObject, RequestLine, make_answer, make_refusal, read_request
from cllm.server.dialect import Route
from cllm.server.generation import BATCH_PRIORITY
from cllm.server.job_store import (
    DONE,
    FAILED,
    BatchLine,
    JobDatabase,
    JobStore,
    LineCounts,
    LineTokens,
    StoredObject,
)
from cllm.server.keys import KeyRing

log = logging.getLogger(__name__)
LOOK_S = 0.025  # between two looks at the queue while lines run
IDLE_S = 1.0  # while none runs
RETRY_S = 1.0  # after a refusal for want of capacity, or a failure of the store
TURN_S = 60.0  # without a request, then a model is unloaded for lines of another
STARVED_S = 60.0  # without a line that started: then one does, however busy the server is
MAX_ATTEMPTS = 3  # at a line that fails by the server's fault
FETCHED = 64  # lines that are read at a time
MODEL = re.compile(rb'\[("(?:[^"\\]|\\.)*")')  # at the beginning of a line's opening
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
        self.ending = False  # it starts no more lines
        self.running: dict[asyncio.Task[None], BatchLine] = {}
        self.attempts: Counter[int] = Counter()  # of lines that failed, by number

    @property
    def batch(self) -> BatchObject:
        return _decode(self.stored.record)

    async def see_next(self, store: JobStore) -> BatchLine | None:
        """The next line, which stays the next; none of a batch that is ending."""
        if self.ending:
            return None
        if not self.lines and not self.read_all:
            found = await store.run(JobDatabase.next_lines, self.stored.id, self.last, FETCHED)
            self.lines.extend(found)
            self.last, self.read_all = found[-1] if found else self.last, not found
        return self.lines[0] if self.lines else None


class BatchRunner:
    """Runs the batches of all tenants, a tenant with the fewest running lines first."""

    def __init__(
        self,
        call: CallRoute,
        routes: Mapping[str, Route],
        store: JobStore,
        registry: EngineRegistry,
        keys: KeyRing,
        config: ServerConfig,
    ) -> None:
        """`routes` are those of lines, by their path."""
        self._call, self._routes, self._store = call, routes, store
        self._registry, self._keys = registry, keys
        self._ttl = config.response_ttl
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
            for stored in await self._store.run(JobDatabase.list_active, "batch"):
                self._works.setdefault(stored.id, BatchWork(stored)).stored = stored
        for work in [*self._works.values()]:
            self._collect(work)
            await self._end_if_done(work)
        for model in {
            self._find_model(line) for work in self._works.values() for line in work.running.values()
        }:
            lines, live, slots = self._count_requests(model)
            tasks = self._list_tasks(model)[::-1]
            if await self._has_turn(model):
                # Live requests need the slots of the youngest lines.
                tasks = tasks[: max(0, live + lines - slots)] if live else []
            for task in tasks:
                task.cancel()
        if time.monotonic() >= self._paused_until:
            await self._start_lines()

    def _find_model(self, line: BatchLine) -> ServedModel:
        """The model of a line; the default one for a name that its route refuses."""
        named = MODEL.match(line.opening)
        with suppress(CllmError):
            return self._registry.find(msgspec.json.decode(named[1]) if named else None)
        return self._registry.default

    def _count_requests(self, model: ServedModel) -> tuple[int, int, int]:
        """Requests of lines and of others in the engines of a model, and the slots for them."""
        states = model.requests
        lines = sum(state.request.priority == BATCH_PRIORITY for state in states)
        limits = model.engine.limits if model.engine is not None else None
        return lines, len(states) - lines, (limits and limits.max_running) or 1

    def _list_tasks(self, model: ServedModel) -> list[asyncio.Task[None]]:
        """The lines that run on a model, the youngest last."""
        running = [each for work in self._works.values() for each in work.running.items()]
        return [task for task, line in running if self._find_model(line) is model]

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

    def _has_room(self, model: ServedModel) -> bool:
        """True if a line may start on a model."""
        lines, live, slots = self._count_requests(model)
        starved = time.monotonic() - self._started_at > STARVED_S
        limit = int(starved) if live else slots + SURPLUS
        return max(len(self._list_tasks(model)), lines) < limit

    async def _has_turn(self, model: ServedModel) -> bool:
        """True if lines of a model are in the way of no live request for another that is not loaded."""
        registry = self._registry
        others = [each for each in registry.served if each is not model]
        if any(len(each.waiters) > len(self._list_tasks(each)) for each in others):
            return False
        if model.open or not (registry.limit and model.can_load):
            return True
        if any(each.loading is not None for each in others):
            return False
        try:
            needed = (await model.prepare(registry.list_rooms(model))).memory
            chosen = registry.find_in_the_way(model, needed)
        except CllmError:
            return True  # its route says why
        now = time.monotonic()
        return all(each.idle and now - each.used_at >= TURN_S for each in chosen)

    async def _start_lines(self) -> None:
        while True:
            busy: Counter[str] = Counter()
            for work in self._works.values():
                busy[work.stored.tenant] += len(work.running)
            for work in sorted(self._works.values(), key=lambda each: busy[each.stored.tenant]):
                line = await work.see_next(self._store)
                model = self._find_model(line) if line is not None else None
                if line and model and self._has_room(model) and await self._has_turn(model):
                    work.lines.popleft()
                    work.running[asyncio.ensure_future(self._run_line(work, line))] = line
                    self._started_at = time.monotonic()
                    break
            else:
                return

    # One line ----------------------------------------------------------------------------------------

    async def _run_line(self, work: BatchWork, line: BatchLine) -> None:
        """Answer a line. Raises Retry, and StorageFailed where the answer could not be kept."""
        batch = work.batch
        request = await asyncio.to_thread(self._read, batch, line)
        route, tenant = self._routes[batch.endpoint], work.stored.tenant
        response = await self._call(route, tenant, bytes(request.body), priority=BATCH_PRIORITY)
        status, body = response.status_code, bytes(response.body)
        if status >= 500 and PoisonRequest.code.encode() not in body:
            work.attempts[line.number] += 1
        if status in (429, 503) or 0 < work.attempts[line.number] < MAX_ATTEMPTS:
            raise Retry
        answer = make_answer(request.custom_id, status, body)
        state, usage = FAILED, dict[str, int]()
        if status == 200:
            state, usage = DONE, msgspec.json.decode(body)["usage"]
        prompt = usage.get("prompt_tokens") or usage.get("input_tokens", 0)
        counts = (state, prompt, usage.get("total_tokens", 0))
        await self._store.run(JobDatabase.add_answer, work.stored.id, line.number, answer, *counts)

    def _read(self, batch: BatchObject, line: BatchLine) -> RequestLine:
        with self._store.get_path(batch.input_file_id).open("rb") as file:
            return read_request(file, line)

    # The end of a batch ------------------------------------------------------------------------------

    async def _end_if_done(self, work: BatchWork) -> None:
        """Write the files of a batch that has no line left, or was cancelled, or has expired."""
        batch, status, message = work.batch, "completed", ""
        if batch.status == "cancelling" or not self._keys.allows(work.stored.tenant):
            status, message = "cancelled", "the batch was cancelled before this line was computed"
        elif time.time() >= batch.expires_at:
            status, message = "expired", "the batch expired before this line was computed"
        elif work.lines or work.running or not work.read_all:
            return
        work.ending = True
        for task in work.running:
            task.cancel()
        if work.running:
            return  # they end first

        def describe(line: BatchLine) -> bytes:
            return make_refusal(self._read(batch, line).custom_id, f"batch_{status}", message)

        make_file, finish = partial(self._make_file, work.stored), partial(self._finish, status)
        await self._store.run(JobDatabase.finish_batch, work.stored, make_file, finish, describe)
        del self._works[work.stored.id]

    def _make_file(self, batch: StoredObject, file_id: str, size: int) -> StoredObject:
        now = time.time()
        file = FileObject(
            id=file_id,
            bytes=size,
            created_at=int(now),
            expires_at=int(now) + int(batch.more or self._ttl),
            filename=f"{batch.id}_{file_id.rpartition('-')[2]}.jsonl",
            purpose="batch_output",
        )
        return StoredObject(file_id, batch.tenant, now, file.expires_at or None, record=_encode(file))

    def _finish(
        self, status: str, stored: StoredObject, files: dict[int, str], counts: LineCounts, tokens: LineTokens
    ) -> StoredObject:
        batch = _decode(stored.record)
        batch.finalizing_at, batch.request_counts, batch.usage = int(time.time()), counts, tokens
        batch.output_file_id, batch.error_file_id = files.get(DONE), files.get(FAILED)
        batch.enter(status)
        return _replace(stored, active=False, expires=time.time() + self._ttl, record=_encode(batch))
