"""One supervisor: how a worker ended is reported once, silence ends it, restarts back off, blame is fair."""

from __future__ import annotations

import queue
import signal
import socket
import threading
import time
from typing import Any

import msgspec
import pytest

from cllm.config import EngineConfig
from cllm.workers.channel import Channel
from cllm.workers.messages import Died, Text, TokenizerCall, TokenizerReply, TokenizeText
from cllm.workers.supervisor import Attempt, Backoff, Supervisor

PATIENCE_S = 60


class Worker:
    """A supervised worker that crashes on request, and what it reported."""

    def __init__(self, *, heartbeats: bool = False) -> None:
        self.reports: queue.Queue[Any] = queue.Queue()
        self.supervisor = Supervisor(
            "tokenizer",
            EngineConfig(),
            TokenizerReply | Died,
            heartbeats=heartbeats,
            module="tests.unit.workers.crashing_worker",
        )
        self.supervisor.start(self.reports.put)

    def ask(self, text: str) -> Any:
        self.supervisor.send(msgspec.msgpack.encode(TokenizerCall(0, TokenizeText(text))))
        return self.reports.get(timeout=PATIENCE_S)


def test_a_crash_is_reported_with_its_signal_after_the_last_answer() -> None:
    worker = Worker()
    assert worker.ask("one") == TokenizerReply(0, Text("one"))
    died = worker.ask("die")
    assert isinstance(died, Died) and died.signal == signal.SIGKILL and "SIGKILL" in died.message
    assert "tokenizer" in died.message
    worker.supervisor.send(b"to a process that is gone")
    worker.supervisor.start(worker.reports.put)
    assert worker.ask("two") == TokenizerReply(0, Text("two"))
    worker.supervisor.close()
    assert isinstance(worker.reports.get(timeout=PATIENCE_S), Died) and worker.reports.empty()


def test_the_workers_own_reason_goes_before_the_exit_code() -> None:
    worker = Worker()
    assert worker.ask("give up") == Died("model_file_error", "no such file")
    worker.supervisor.close()


def test_silence_ends_a_worker_that_should_send_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Supervisor, "START_LIMIT_S", 0.2)
    worker = Worker(heartbeats=True)
    died = worker.reports.get(timeout=PATIENCE_S)
    assert isinstance(died, Died) and "said nothing" in died.message
    worker.supervisor.close()


def test_restarts_back_off_until_there_is_progress() -> None:
    backoff = Backoff()
    restarted = threading.Event()
    assert backoff.schedule(restarted.set) and restarted.wait(PATIENCE_S)
    restarted.clear()
    started = time.monotonic()
    assert backoff.schedule(restarted.set) and restarted.wait(PATIENCE_S)
    assert time.monotonic() - started >= 0.4, "the second in a row waits"
    backoff.count = Backoff.MAX_IN_A_ROW
    assert not backoff.schedule(restarted.set), "it is not coming back"
    backoff.progress()
    assert backoff.schedule(lambda: None)


@pytest.mark.parametrize("retries_together", [0, 1, 2])
def test_work_is_retried_together_then_alone_then_rejected(retries_together: int) -> None:
    work = Attempt()
    work.retries_together = retries_together
    for _ in range(retries_together):
        assert not work.blame() and not work.alone
    assert not work.blame() and work.alone
    assert work.blame()


def test_frames_of_any_size_arrive_whole_and_the_end_is_none() -> None:
    ours, theirs = map(Channel, socket.socketpair())
    frames = [b"", b"x", b"y" * (1 << 20), b"z"]
    sender = threading.Thread(target=lambda: [*map(ours.send, frames)])
    sender.start()
    assert [theirs.receive(PATIENCE_S) for _ in frames] == frames
    sender.join()
    with pytest.raises(TimeoutError):
        theirs.receive(0.01)
    ours.close()
    assert theirs.receive() is None
    theirs.close()
