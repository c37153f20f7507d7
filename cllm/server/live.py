"""Live feed: what the server does, once a second, as events of at most 4 KiB. Figures, never text."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from heapq import nlargest
from itertools import cycle
from typing import Any

import msgspec

from cllm.errors import CllmError, ShuttingDown, TooManyListeners
from cllm.frontend.engine_registry import EngineRegistry
from cllm.frontend.history import COLUMNS, TOTALS, History
from cllm.frontend.metrics import EngineMetrics, RequestLog
from cllm.server.dialect import encode, encode_named
from cllm.types import Health, SlotInfo, Snapshot

log = logging.getLogger(__name__)
PERIOD_S = 1.0
SNAPSHOT_S = 0.5  # how long an event waits for the engine
MAX_EVENT = 4096  # bytes
MAX_LANES = 96  # slots that are shown
MAX_IDS = 900  # bytes of request ids in an event; what is left follows in the next
MAX_POINTS = 12  # of the latency curve in an event
MAX_TENANTS = 8
MAX_NAME = 24  # characters of a tenant's name
_encoder = msgspec.json.Encoder()
_ENDED = (Health.DRAINING, Health.STOPPED)

Lane = list[Any]
"""A lane of the KV map: a slot that keeps tokens has their number. One that is leased has tokens in KV, known
tokens, those of the prompt, those from the cache, the age, and the request's id."""
CACHED = 2  # the length of a lane that keeps tokens


class LiveFeed:
    """Samples once a second. While it has listeners it also asks the engine for a snapshot, and sends both.

    Halfway between two such events come the totals alone: what is shown is never a second old. An event holds
    what has changed; the first event of a listener holds everything, with the history.
    """

    MAX_LISTENERS = 4
    MAX_UNREAD = 10  # events; a listener that reads no more is left out
    KEPT = 16  # snapshots, for /debug/kv

    def __init__(self, registry: EngineRegistry) -> None:
        self._registry = registry
        self._history = History()
        self._listeners: set[asyncio.Queue[bytes | None]] = set()
        self.snapshots: deque[Snapshot] = deque(maxlen=self.KEPT)
        self._lanes: dict[int, Lane] = {}  # as the listeners have them, by slot
        self._sent_records = 0  # number of the newest request that was sent
        self._sent_points = 0  # of the latency curve
        self._sent_width = 1
        self._closed = False

    @property
    def _metrics(self) -> EngineMetrics:
        """Of the default model."""
        return self._registry.default.metrics

    # The feed --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Sample until it is cancelled."""
        due = time.monotonic()
        for tick in cycle((self._tick_totals, self._tick)):
            due = max(due + PERIOD_S / 2, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            try:
                await tick()
            except Exception:
                log.exception("the live feed has missed a second")

    async def _tick_totals(self) -> None:
        if self._listeners:
            self._send(encode_named("totals", self._read_totals()))

    async def _tick(self) -> None:
        row = self._history.sample(self._metrics)
        if self._registry.health in _ENDED:
            self.close()
        if self._listeners:
            self._send(self._make_event(row, await self._take_snapshot()))

    async def _take_snapshot(self) -> Snapshot | None:
        """The engine between two steps; None if it does not answer now."""
        with suppress(TimeoutError, CllmError):
            async with asyncio.timeout(SNAPSHOT_S):
                snapshot = await asyncio.wrap_future(self._registry.current.inspect())
            self.snapshots.append(snapshot)
            return snapshot
        return None

    def _send(self, event: bytes) -> None:
        for listener in tuple(self._listeners):
            if listener.qsize() >= self.MAX_UNREAD:
                self._drop(listener)
            else:
                listener.put_nowait(event)

    def _drop(self, listener: asyncio.Queue[bytes | None]) -> None:
        self._listeners.discard(listener)
        listener.put_nowait(None)

    def close(self) -> None:
        """End every stream; the server drains."""
        self._closed = True
        for listener in tuple(self._listeners):
            self._drop(listener)

    @contextmanager
    def listen(self) -> Iterator[AsyncIterator[bytes]]:
        """Events for one listener. Raises TooManyListeners when there are enough of them."""
        if self._closed:
            raise ShuttingDown("the server is shutting down")
        if len(self._listeners) >= self.MAX_LISTENERS:
            raise TooManyListeners(
                f"/live has {self.MAX_LISTENERS} listeners and takes no more: close another live page first"
            )
        listener: asyncio.Queue[bytes | None] = asyncio.Queue()
        if not self._listeners:
            self._lanes = {}
        listener.put_nowait(self._make_first())
        self._listeners.add(listener)

        async def events() -> AsyncIterator[bytes]:
            while (event := await listener.get()) is not None:
                yield event

        try:
            yield events()
        finally:
            self._listeners.discard(listener)

    # Events ----------------------------------------------------------------------------------------

    def _make_first(self) -> bytes:
        """Everything: an hour of rows, the last requests, the whole latency curve."""
        requests = self._requests
        self._sent_records = requests.count
        self._sent_points, self._sent_width = max(0, len(requests.points) - 1), requests.width
        head = {
            "columns": COLUMNS,
            "latency": self._make_curve(0, len(requests.points)),
            "requests": list(requests.records),
            "lanes": list(self._lanes.values()),
            **self._make_state(),
        }
        rows = b'{"rows":[' + b",".join(self._history.rows) + b"],"
        return b"event: first\ndata: " + rows + _encoder.encode(head)[1:] + b"\n\n"

    def _make_event(self, row: bytes, snapshot: Snapshot | None) -> bytes:
        """Make the event of all changes. The newest requests fill what is left of its size."""
        curve = self._requests
        if curve.width != self._sent_width:  # its points have been merged: they follow once more
            self._sent_points, self._sent_width = 0, curve.width
        end = min(len(curve.points), self._sent_points + MAX_POINTS)
        body: dict[str, Any] = {
            "row": msgspec.Raw(row),
            "latency": self._make_curve(self._sent_points, end),
            **self._make_state(),
        }
        self._sent_points = max(0, end - 1)  # the last one grows on
        if snapshot is not None:
            body["kv"] = self._make_kv(snapshot)
        records = [each for each in self._requests.records if each.number > self._sent_records]
        self._sent_records = self._requests.count
        while records and len(encode({**body, "requests": records})) > MAX_EVENT:
            del records[: max(1, len(records) // 2)]
        return encode({**body, "requests": records})

    @property
    def _requests(self) -> RequestLog:
        return self._metrics.request_log

    def _make_curve(self, begin: int, end: int) -> dict[str, Any]:
        curve = self._requests
        points = [point.figures() for point in curve.points[begin:end]]
        return {"width": curve.width, "count": curve.measured, "begin": begin, "points": points}

    def _make_state(self) -> dict[str, Any]:
        """Totals as `/metrics` has them, in the order of the columns; tenants, and memory by part."""
        metrics = self._metrics
        late = metrics.tenants.count_surplus()
        tenants = nlargest(MAX_TENANTS, metrics.tenants.accounts.values(), key=lambda each: each.tokens)
        return {
            "health": self._registry.health.value,
            "totals": self._read_totals(),
            "sources": metrics.read_labelled("cached_tokens"),
            "memory": {part: int(size) for part, size in metrics.read_labelled("memory_bytes").items()},
            "tenants": [
                [each.name[:MAX_NAME], each.running - late[each], each.waiting + late[each], each.tokens]
                for each in tenants
            ],
        }

    def _read_totals(self) -> list[float]:
        """As they are now: the row of an event is older, by what its snapshot took."""
        return [int(x) if x == int(x) else round(x, 3) for x in self._metrics.read(TOTALS).values()]

    def _make_kv(self, snapshot: Snapshot) -> dict[str, Any]:
        """The lanes of the KV map. A request's id comes once, when its lane becomes its own."""
        limits = self._registry.current.limits
        lanes = {info.seq_id: _make_lane(info) for info in snapshot.leases}
        lanes.update((slot, [slot, tokens]) for slot, tokens in snapshot.cached.items())
        shown = {slot: lanes[slot] for slot in sorted(lanes)[:MAX_LANES]}
        known, self._lanes = self._lanes, {}
        room, sent = MAX_IDS, []
        for slot, lane in shown.items():
            same = len(lane) > CACHED and lane[-1] == known.get(slot, [None])[-1]
            if len(lane) > CACHED and not same and (room := room - len(lane[-1])) < 0:
                lane = [*lane[:-1], ""]  # its id follows in the next event
            self._lanes[slot] = lane
            sent.append(lane[:-1] if same else lane)
        return {
            "snapshot": snapshot.number,
            "slots": snapshot.sequences_total,
            "slot_tokens": limits.sequence_cells if limits is not None else 0,
            "cells": [snapshot.cells_total, snapshot.cells_used, snapshot.cells_cached],
            "waiting": len(snapshot.waiting),
            "lanes": sent,
            "preempted": [_make_lane(info) for info in snapshot.preempted[:4]],
        }


def _make_lane(info: SlotInfo) -> Lane:
    figures = [info.position, info.tokens, info.prompt_tokens, info.cached_tokens, int(info.age_s)]
    return [info.seq_id, *figures, info.request_id]
