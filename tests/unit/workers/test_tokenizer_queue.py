"""The tokenizer's queue: tenants take turns, a thread is kept for small tasks, bytes are bounded."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.errors import TokenizerBusy
from cllm.messages import Prepare, TokenizerTask, TokenizeTexts
from cllm.text.prompt import RawText
from cllm.types import ConstraintKind, ConstraintSpec
from cllm.workers import executor
from cllm.workers.executor import LARGE_BYTES, THREADS, PendingTask, TokenizerQueue

_ids = itertools.count()


def call(tenant: str = "", size: int = 10, task: TokenizerTask | None = None) -> PendingTask:
    return PendingTask(next(_ids), task or TokenizeTexts(("",)), bytes(size), tenant)


def put(queue: TokenizerQueue, *calls: PendingTask) -> list[PendingTask]:
    for one in calls:
        queue.put(one)
    return list(calls)


def take_all(queue: TokenizerQueue) -> list[PendingTask]:
    """One at a time, as for a worker that is done with each at once."""
    return list(iter(lambda: queue.take([]), None))


def test_tenants_take_turns() -> None:
    queue = TokenizerQueue()
    many = put(queue, *(call("a") for _ in range(4)))
    few = put(queue, call("b"), call("c"))
    assert take_all(queue) == [many[0], *few, *many[1:]]
    assert not list(queue)


def test_a_small_task_never_waits_for_two_large_ones() -> None:
    queue = TokenizerQueue()
    large = put(queue, *(call("a", LARGE_BYTES + 1) for _ in range(3)))
    small = put(queue, call("a"), call("b"))
    first = queue.take([])
    assert first is large[0]
    assert queue.take([first]) is small[1]  # the other tenant's turn
    assert queue.take([first]) is small[0]  # past the large ones of its own tenant
    assert queue.take([first]) is None
    assert queue.take([small[0]]) is large[1]


def test_grammars_are_compiled_one_at_a_time() -> None:
    """On both threads the second would wait for the first, and run out of its own time."""
    queue = TokenizerQueue()
    spec = ConstraintSpec(ConstraintKind.REGEX, "a")
    grammars = put(queue, *(call(task=Prepare((RawText(("x",)),), constraint=spec)) for _ in range(2)))
    assert queue.take([]) is grammars[0]
    assert queue.take([grammars[0]]) is None


def test_a_suspect_runs_alone_and_before_the_others() -> None:
    queue = TokenizerQueue()
    suspect, (other,) = call(), put(queue, call())
    suspect.blame()
    queue.again.append(suspect)
    assert queue.take([call()]) is None
    assert queue.take([]) is suspect
    assert queue.take([suspect]) is None
    assert queue.take([]) is other


def test_what_waits_is_bounded_and_a_tenant_within_its_share_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor, "MAX_WAITING_BYTES", 1000)
    queue = TokenizerQueue()
    mine = put(queue, *(call("a", 300) for _ in range(3)))
    with pytest.raises(TokenizerBusy):
        queue.put(call("a", 300))
    put(queue, call("a", 100))  # there is room for a small one
    put(queue, call("b", 300))
    with pytest.raises(TokenizerBusy):
        queue.put(call("b", 300))
    for one in mine:
        queue.remove(one)
    put(queue, call("a", 300), call("b", 300))
    take_all(queue)
    put(queue, call("a", 1000))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40), st.data())
def test_every_task_is_taken_once_and_the_worker_is_never_overfull(
    given_calls: list[tuple[str, bool]], data: st.DataObject
) -> None:
    queue = TokenizerQueue()
    waiting = put(queue, *(call(tenant, LARGE_BYTES + 1 if large else 1) for tenant, large in given_calls))
    running: list[PendingTask] = []
    taken: list[PendingTask] = []
    while len(taken) < len(waiting) or running:
        if (one := queue.take(running)) is not None:
            running.append(one)
            taken.append(one)
        else:
            assert running, "it stands still"
            running.pop(data.draw(st.integers(0, len(running) - 1)))
        assert len(running) <= THREADS and sum(one.large for one in running) < THREADS
    assert sorted(taken, key=lambda one: one.call_id) == waiting
