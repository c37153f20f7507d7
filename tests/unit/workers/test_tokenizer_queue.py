"""Tasks that wait for a tokenizer: tenants take turns, a thread is kept for small ones, bytes are bounded."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.config import EngineConfig
from cllm.errors import TokenizerBusy
from cllm.messages import Prepare, Text, TokenizerCall, TokenizerReply, TokenizerTask, TokenizeTexts
from cllm.text.prompt import RawText
from cllm.types import ConstraintKind, ConstraintSpec
from cllm.workers import executor
from cllm.workers.executor import LARGE_BYTES, THREADS, ProcessTokenizer


class QueueingTokenizer(ProcessTokenizer):
    """A tokenizer without a process: its worker takes what it is sent, and ends it when the test says so."""

    def __init__(self, *, ready: bool = True) -> None:
        super().__init__(EngineConfig())
        self._up, self._ready = True, ready
        self._supervisor.send = self._note
        self.sent: list[int] = []  # numbers of tasks, from 0 in the order they were put

    def _note(self, frame: bytes) -> None:
        self.sent.append(msgspec.msgpack.decode(frame, type=TokenizerCall).call_id)

    def put(self, tenant: str = "", size: int = 10, task: TokenizerTask | None = None) -> None:
        self.submit(task or TokenizeTexts(("x" * size,)), tenant)

    def finish(self, number: int) -> None:
        self._receive(TokenizerReply(number, Text("")))

    def finish_all(self) -> Sequence[int]:
        """One after the other."""
        self._ready = True
        self._dispatch()
        while self._running:
            self.finish(next(iter(self._running)))
        return self.sent


def test_tenants_take_turns() -> None:
    tokenizer = QueueingTokenizer(ready=False)
    for tenant in "aaaabc":
        tokenizer.put(tenant)
    assert tokenizer.finish_all() == [0, 4, 5, 1, 2, 3]


def test_a_small_task_never_waits_for_two_large_ones() -> None:
    tokenizer = QueueingTokenizer()
    for _ in range(3):
        tokenizer.put("a", LARGE_BYTES + 1)
    tokenizer.put("a")
    tokenizer.put("b")
    assert tokenizer.sent == [0, 3], "past the large ones of its own tenant"
    tokenizer.finish(3)
    assert tokenizer.sent == [0, 3, 4]
    tokenizer.finish(4)
    assert tokenizer.sent == [0, 3, 4]
    tokenizer.finish(0)
    assert tokenizer.sent == [0, 3, 4, 1]


def test_grammars_are_compiled_one_at_a_time() -> None:
    """On both threads the second would wait for the first, and run out of its own time."""
    tokenizer = QueueingTokenizer()
    spec = ConstraintSpec(ConstraintKind.REGEX, "a")
    for _ in range(2):
        tokenizer.put(task=Prepare((RawText(("x",)),), constraint=spec))
    assert tokenizer.sent == [0]
    tokenizer.finish(0)
    assert tokenizer.sent == [0, 1]


def test_a_suspect_runs_alone_and_before_the_others() -> None:
    tokenizer = QueueingTokenizer()
    tokenizer.put()
    suspect = tokenizer._running.pop(0)
    suspect.blame()
    tokenizer.put()
    tokenizer._again.append(suspect)
    tokenizer.put()
    assert tokenizer.sent == [0, 1], "not beside another one"
    tokenizer.finish(1)
    assert tokenizer.sent == [0, 1, 0]
    tokenizer.finish(0)
    assert tokenizer.sent == [0, 1, 0, 2]


def test_what_waits_is_bounded_and_a_tenant_within_its_share_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor, "MAX_WAITING_BYTES", 1000)
    tokenizer = QueueingTokenizer(ready=False)
    for _ in range(3):
        tokenizer.put("a", 200)
    with pytest.raises(TokenizerBusy):
        tokenizer.put("a", 200)
    tokenizer.put("a", 10)  # there is room for a small one
    tokenizer.put("b", 200)
    with pytest.raises(TokenizerBusy):
        tokenizer.put("b", 200)
    tokenizer.finish_all()
    tokenizer._ready = False
    tokenizer.put("a", 900)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40), st.data())
def test_every_task_is_taken_once_and_the_worker_is_never_overfull(
    tasks: list[tuple[str, bool]], data: st.DataObject
) -> None:
    tokenizer = QueueingTokenizer()
    for tenant, large in tasks:
        tokenizer.put(tenant, LARGE_BYTES + 1 if large else 1)
    while running := list(tokenizer._running.values()):
        assert len(running) <= THREADS and sum(one.large for one in running) < THREADS
        tokenizer.finish(data.draw(st.sampled_from(running)).call_id)
    assert sorted(tokenizer.sent) == list(range(len(tasks))) and not tokenizer._waiting()
