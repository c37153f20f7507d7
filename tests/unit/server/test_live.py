"""The live feed: bounded events, few listeners, nothing asked of the engine while there is none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from cllm.errors import ShuttingDown, TooManyListeners
from cllm.frontend.history import COLUMNS
from cllm.frontend.metrics import EngineMetrics
from cllm.frontend.tenants import Tenants
from cllm.server.live import MAX_EVENT, LiveFeed
from cllm.types import FinishReason, Health, Limits, RequestOutput, SlotInfo, Snapshot, Usage


class FakeRegistry:
    """An engine that answers with the snapshot it is given."""

    def __init__(self) -> None:
        self.metrics = EngineMetrics()
        self.metrics.tenants = Tenants()
        self.limits = Limits(
            sequences=64, cells=8192, sequence_cells=1024, request_tokens=1024, batch_tokens=64
        )
        self.health = Health.READY
        self.asked = 0
        self.leases: tuple[SlotInfo, ...] = ()
        self.cached: dict[int, int] = {}

    @property
    def current(self) -> FakeRegistry:
        return self

    default = current

    def inspect(self) -> Future[Snapshot]:
        self.asked += 1
        future: Future[Snapshot] = Future()
        future.set_result(
            Snapshot(
                number=self.asked,
                sequences_total=64,
                cells_total=8192,
                cells_used=1,
                cells_cached=1,
                slots_cached=len(self.cached),
                leases=self.leases,
                waiting=(),
                cached=self.cached,
                leased_total=0,
                released_total=0,
                cleared_cells_total=0,
            )
        )
        return future

    def end(self, count: int) -> None:
        """So many requests end."""
        tenant = SimpleNamespace(name="a-tenant-with-a-long-name")
        times = {"arrived": 1.0, "dispatched": 2.0, "first_token": 3.0, "last_token": 4.0, "generated": 3}
        usage = Usage(prompt_tokens=70_000, completion_tokens=12_345, cached_tokens=60_000)
        for _ in range(count):
            ended = RequestOutput(
                request_id="chatcmpl-0123456789abcdef", finish_reason=FinishReason.CANCELLED, usage=usage
            )
            self.metrics.request_log.add(SimpleNamespace(**times, tenant=tenant), ended, 5.0)  # type: ignore[arg-type]


def lease(slot: int, request: str, tokens: int = 900) -> SlotInfo:
    return SlotInfo(
        seq_id=slot,
        request_id=f"chatcmpl-{request:0>32}",
        tokens=tokens,
        position=tokens - 1,
        state="running",
        age_s=12.34,
        prompt_tokens=800,
        cached_tokens=500,
    )


def parse(event: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(event.partition(b"data: ")[2])
    return found


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def make() -> tuple[FakeRegistry, LiveFeed]:
    registry = FakeRegistry()
    return registry, LiveFeed(registry)  # type: ignore[arg-type]


def test_without_listeners_only_the_row_is_taken() -> None:
    async def test() -> None:
        registry, feed = make()
        for _ in range(3):
            await feed._tick()
        assert registry.asked == 0
        with feed.listen() as events:
            first = parse(await anext(events))
            assert len(first["rows"]) == 3 and first["columns"] == list(COLUMNS)
            await feed._tick()
            assert parse(await anext(events))["kv"]["snapshot"] == 1
        await feed._tick()
        assert registry.asked == 1

    run(test())


def test_an_event_stays_below_its_limit_under_the_worst_load() -> None:
    async def test() -> None:
        registry, feed = make()
        for index in range(40):
            registry.metrics.tenants.open(f"a tenant with a name {index}").charge(100_000_000 + index, 0.0)
        with feed.listen() as events:
            await anext(events)
            for second in range(20):
                registry.end(900)
                registry.metrics.generated_tokens.inc(123_456_789)
                registry.leases = tuple(lease(slot, f"{second}-{slot}") for slot in range(64))
                await feed._tick()
                event = await anext(events)
                assert len(event) <= MAX_EVENT
                assert parse(event)["requests"], "some of the newest are there"

    run(test())


def test_lanes_are_complete_although_ids_come_once() -> None:
    async def test() -> None:
        registry, feed = make()
        with feed.listen() as events:
            await anext(events)
            known: dict[int, str] = {}
            for second in range(60):
                holder = second // 12  # the requests change, each time in all lanes at once
                registry.leases = tuple(lease(slot, f"{holder}-{slot}", 850 + second) for slot in range(48))
                registry.cached = {50: 77, 51: second}
                await feed._tick()
                kv = parse(await anext(events))["kv"]
                lanes = {lane[0]: lane for lane in kv["lanes"]}
                assert set(lanes) == {*range(48), 50, 51}
                assert lanes[51] == [51, second]
                assert lanes[3][1:6] == [849 + second, 850 + second, 800, 500, 12]
                known.update({slot: lane[6] for slot, lane in lanes.items() if len(lane) > 6})
                if second % 12 > 3:
                    assert known == {each.seq_id: each.request_id for each in registry.leases}
                if second % 12 > 4:
                    assert max(map(len, kv["lanes"])) == 6, "no id comes twice"

    run(test())


def test_a_later_listener_has_the_same_lanes() -> None:
    async def test() -> None:
        registry, feed = make()
        registry.leases = (lease(1, "one"),)
        with feed.listen() as early:
            await anext(early)
            await feed._tick()
            with feed.listen() as late:
                first = parse(await anext(late))
                assert first["lanes"][0][6] == registry.leases[0].request_id

    run(test())


def test_the_curve_is_sent_in_parts() -> None:
    async def test() -> None:
        registry, feed = make()
        with feed.listen() as events:
            parse(await anext(events))
            registry.end(1200)
            points: dict[int, Any] = {}
            for _ in range(40):
                await feed._tick()
                latency = parse(await anext(events))["latency"]
                points.update(enumerate(latency["points"], latency["begin"]))
            curve = registry.metrics.request_log
            assert latency["count"] == 1200 and latency["width"] == curve.width == 4
            assert len(points) == len(curve.points) == 300

    run(test())


def test_a_fifth_listener_is_refused() -> None:
    async def test() -> None:
        _, feed = make()
        with feed.listen(), feed.listen(), feed.listen():
            fourth = ExitStack()
            fourth.enter_context(feed.listen())
            with pytest.raises(TooManyListeners, match="4 listeners"), feed.listen():
                pass
            fourth.close()
            with feed.listen():
                pass

    run(test())


def test_a_listener_that_does_not_read_is_left_out() -> None:
    async def test() -> None:
        registry, feed = make()
        with feed.listen() as events:
            for _ in range(feed.MAX_UNREAD + 1):
                await feed._tick()
            asked = registry.asked
            await feed._tick()
            assert registry.asked == asked
            assert len([event async for event in events]) == feed.MAX_UNREAD

    run(test())


def test_listeners_end_when_the_server_drains() -> None:
    async def test() -> None:
        registry, feed = make()
        with feed.listen() as events:
            await anext(events)
            registry.health = Health.DRAINING
            await feed._tick()
            assert [event async for event in events] == []
        with pytest.raises(ShuttingDown), feed.listen():
            pass

    run(test())


def test_an_engine_that_does_not_answer_costs_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr("cllm.server.live.SNAPSHOT_S", 0.01)
        registry, feed = make()
        monkeypatch.setattr(registry, "inspect", Future)
        with feed.listen() as events:
            await anext(events)
            await feed._tick()
            assert "kv" not in parse(await anext(events))

    run(test())
