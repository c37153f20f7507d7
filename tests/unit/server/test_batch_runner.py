"""Lines of batches: their order, what is wrong with them, and that they leave the slots to live requests."""

from __future__ import annotations

import asyncio
import io
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cllm.config import ServerConfig
from cllm.server import batches
from cllm.server.batch_runner import MODEL, SURPLUS, TURN_S, BatchRunner, BatchWork, _decode
from cllm.server.batches import BatchObject, make_opening, read_lines
from cllm.server.job_store import BatchLine, JobDatabase, JobStore, StoredObject
from cllm.server.keys import KeyRing
from tests.unit.frontend.test_engine_registry import FakeLoader, make_registry, run_inline, settle

ROUTE = "/v1/completions"
SLOTS = 4


def test_lines_are_ordered_by_their_system_prompt() -> None:
    def ask(system: str, question: str) -> dict[str, Any]:
        said = [{"role": "user", "content": question}, {"role": "system", "content": system}]
        return {"model": "any", "messages": said}

    bodies = [ask("B", "1"), ask("A", "2"), ask("B", "0"), ask("A", "1")]
    order = [each["messages"][1]["content"] for each in sorted(bodies, key=make_opening)]
    assert order == ["A", "A", "B", "B"]


def test_too_many_and_too_long_lines_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(name: str, prompt: str) -> str:
        return json.dumps({"custom_id": name, "method": "POST", "url": ROUTE, "body": {"prompt": prompt}})

    path = tmp_path / "file"
    path.write_text("\n".join([write("1", "a"), "", write("2", "b" * 200), write("3", "c")]))
    lines, errors = read_lines(path, ROUTE, 150)
    assert [line.number for line in lines] == [1, 4]
    assert path.read_bytes()[lines[1].begin :][: lines[1].size].endswith(b'"c"}}')
    assert [(error.line, "limit of 150 bytes" in error.message) for error in errors] == [(3, True)]
    monkeypatch.setattr(batches, "MAX_BATCH_LINES", 1)
    _, errors = read_lines(path, ROUTE, 500)
    assert [error.code for error in errors] == ["too_many_lines"] and "limit is 1" in errors[0].message


class CountedRunner(BatchRunner):
    """A runner whose lines never end; the test says how many live requests there are."""

    live = 0
    turn = True

    async def _has_turn(self, model: Any) -> bool:
        return self.turn

    def _find_model(self, line: BatchLine) -> Any:
        return "other" if MODEL.match(line.opening) else "first"

    def _count_requests(self, model: Any) -> tuple[int, int, int]:
        return len(self._list_tasks(model)), self.live if model == "first" else 0, SLOTS

    def count_running(self) -> int:
        return sum(not task.done() for work in self._works.values() for task in work.running)

    async def _run_line(self, work: BatchWork, line: BatchLine) -> None:
        await asyncio.get_running_loop().create_future()

    async def look(self) -> int:
        await self._look()
        await asyncio.sleep(0)
        return self.count_running()


async def add_batch(
    store: JobStore, name: str, count: int, opening: bytes = b"", tenant: str = "", window_s: int = 3600
) -> None:
    now = time.time()
    record: dict[str, Any] = {"endpoint": ROUTE, "input_file_id": "file-1", "completion_window": "1h"}
    record["expires_at"] = int(now) + window_s
    batch = BatchObject(id=name, status="in_progress", created_at=0, **record)
    stored = StoredObject(name, tenant, now, active=True, record=batches._encode(batch))
    lines = [BatchLine(number, 0, 1 << 10, opening) for number in range(count)]
    await store.run(JobDatabase.add, "batch", stored, 0, lines)


def make_runner(store: JobStore, keys: str = "") -> CountedRunner:
    return CountedRunner(None, {}, store, None, KeyRing("", keys), ServerConfig())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tenant", "window_s", "status"), [("key1", -1, "expired"), ("removed", 3600, "cancelled")]
)
async def test_a_batch_ends_with_its_window_or_its_key(
    tenant: str, window_s: int, status: str, tmp_path: Path
) -> None:
    store = JobStore(tmp_path, 1 << 20)
    line = {"custom_id": "left", "method": "POST", "url": ROUTE, "body": {}}
    content = json.dumps(line).encode()
    file = StoredObject("file-1", tenant, time.time())
    await store.add_file(file, io.BytesIO(content), len(content))
    await add_batch(store, "b", 1, tenant=tenant, window_s=window_s)
    assert await make_runner(store, keys="one,two").look() == 0
    ended = _decode((await store.run(JobDatabase.get, "batch", tenant, "b")).record)
    assert ended.status == status and ended.error_file_id is not None
    answer = json.loads(store.get_path(ended.error_file_id).read_text())
    assert answer["custom_id"] == "left" and answer["error"]["code"] == f"batch_{status}"
    store.close()


async def test_lines_of_another_model_have_its_slots(tmp_path: Path) -> None:
    store = JobStore(tmp_path, 1 << 20)
    await add_batch(store, "a", 20)
    await add_batch(store, "b", 20, b'["other", null')
    runner = make_runner(store)
    assert await runner.look() == 2 * (SLOTS + SURPLUS)
    runner.live = SLOTS
    assert await runner.look() == SLOTS + SURPLUS
    assert all(task.cancelled() for task in runner._works["a"].running)
    for task in runner._works["b"].running:
        task.cancel()
    store.close()


async def test_a_cancelled_batch_starts_no_lines(tmp_path: Path) -> None:
    store = JobStore(tmp_path, 1 << 20)
    await add_batch(store, "b", 20)
    runner = make_runner(store)
    assert await runner.look() == SLOTS + SURPLUS
    (work,) = runner._works.values()
    batch = work.batch
    batch.enter("cancelling")
    work.stored = msgspec.structs.replace(work.stored, record=batches._encode(batch))
    next(iter(work.running)).cancel()  # one has ended meanwhile
    await asyncio.sleep(0)
    assert await runner.look() == 0
    store.close()


async def test_lines_leave_the_slots_to_live_requests(tmp_path: Path) -> None:
    store = JobStore(tmp_path, 1 << 20)
    await add_batch(store, "b", 20)
    runner = make_runner(store)
    assert await runner.look() == SLOTS + SURPLUS
    runner.live = 1
    assert await runner.look() == SLOTS - 1  # one is given back, with those beyond the slots
    runner.live = SLOTS + 2
    assert await runner.look() == 0
    runner.live = 1
    assert await runner.look() == 0
    runner._started_at -= 3600
    assert await runner.look() == 1  # none starves
    runner.live = 0
    assert await runner.look() == SLOTS + SURPLUS
    runner.turn = False
    assert await runner.look() == 0, "live requests wait for another model"
    runner.turn = True
    assert await runner.look() == SLOTS + SURPLUS
    (work,) = runner._works.values()
    assert {line.number for line in work.running.values()} == set(range(6))
    for task in work.running:
        task.cancel()
    store.close()


async def test_lines_wait_for_the_turn_of_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    run_inline(monkeypatch.setattr)
    registry = make_registry(FakeLoader(), "cat bee ant")  # 30, 50 and 40 of 100
    cat, bee, ant = registry.served
    runner = BatchRunner(None, {}, None, registry, KeyRing("", ""), ServerConfig())  # type: ignore[arg-type]
    (await registry.use(cat)).release()
    assert await runner._has_turn(cat) and await runner._has_turn(bee), "both fit"
    live = await registry.use(bee)
    assert not await runner._has_turn(ant), "cat would be unloaded, and was used just now"
    cat.used_at -= TURN_S
    assert await runner._has_turn(ant)
    other = await registry.use(cat)
    assert not await runner._has_turn(ant), "both are in use"
    waiting = asyncio.ensure_future(registry.use(ant))
    await settle()
    assert not await runner._has_turn(cat) and not await runner._has_turn(bee), "a live request waits for ant"
    other.release()
    live.release()
    (await asyncio.wait_for(waiting, 10)).release()
    assert await runner._has_turn(ant)
    registry.drain()
    registry.stop()
