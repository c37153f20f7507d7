"""One supervisor: how a worker ended is reported once, silence ends it, restarts back off, blame is fair."""

from __future__ import annotations

import errno
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from cllm.config import EngineConfig
from cllm.errors import EngineNotReady
from cllm.messages import (
    Died,
    Ready,
    Report,
    Text,
    TokenizerCall,
    TokenizerReady,
    TokenizerReply,
    TokenizeTexts,
)
from cllm.workers.channel import WorkerProcess
from cllm.workers.supervisor import START_FAILED, Attempt, Backoff, Supervisor

PATIENCE_S = 60
MIB = 1 << 20


class Worker:
    """A supervised worker that crashes on request, and what it reported."""

    def __init__(self, module: str = "tests.unit.workers.crashing_worker", role: str = "tokenizer") -> None:
        self.reports: queue.Queue[Any] = queue.Queue()
        reports = Report if role == "engine" else TokenizerReady | TokenizerReply
        self.supervisor = Supervisor(role, EngineConfig(model="0"), reports, module=module)

    def start(self, delay_s: float = 0.0) -> None:
        self.supervisor.start(self.reports.put, delay_s)

    def send(self, text: str) -> None:
        self.supervisor.send(msgspec.msgpack.encode(TokenizerCall(0, TokenizeTexts((text,)))), refusable=True)

    def next(self) -> Any:
        return self.reports.get(timeout=PATIENCE_S)

    def ask(self, text: str) -> Any:
        self.send(text)
        return self.next()

    def died(self) -> Died:
        report = self.next()
        assert isinstance(report, Died)
        return report


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    worker.start()
    yield worker
    worker.supervisor.close()


def test_a_crash_is_reported_with_its_signal_after_the_last_answer(worker: Worker) -> None:
    assert worker.ask("one") == TokenizerReply(0, Text("one"))
    died = worker.ask("die")
    assert isinstance(died, Died) and died.signal == signal.SIGKILL and "SIGKILL" in died.message
    assert "tokenizer" in died.message
    worker.supervisor.send(b"to a process that is gone")
    worker.start()
    assert worker.ask("two") == TokenizerReply(0, Text("two"))
    worker.supervisor.close()
    assert isinstance(worker.next(), Died) and worker.reports.empty()


def test_the_workers_own_reason_goes_before_the_exit_code(worker: Worker) -> None:
    assert worker.ask("give up") == Died("model_file_error", "no such file")


def test_a_worker_without_a_first_heartbeat_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Supervisor, "START_LIMIT_S", 0.01)
    monkeypatch.setattr(WorkerProcess, "SETTLE_S", 0.001)
    worker = Worker()
    worker.start()
    assert "said nothing" in worker.died().message
    worker.supervisor.close()


def test_sending_to_a_stopped_worker_never_waits_and_is_bounded(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: `sendall` on the caller's thread, until the worker went on."""
    monkeypatch.setattr(Supervisor, "SILENCE_LIMIT_S", 0.6)
    assert worker.ask("one") == TokenizerReply(0, Text("one"))
    worker.send("stop")
    slowest = 0.0
    with pytest.raises(EngineNotReady, match=r"tokenizer process does not read.*at most 64 MiB"):
        for _ in range(32):
            began = time.monotonic()
            worker.send("x" * (4 * MIB))
            slowest = max(slowest, time.monotonic() - began)
    assert slowest < 0.5
    worker.supervisor.send(b"what must not be refused is taken")
    assert worker.died().message == "the tokenizer process was killed: it said nothing for 1 s"


def test_a_worker_that_goes_on_gets_every_frame_whole(worker: Worker) -> None:
    pid = int(worker.ask("who").answer.text)
    os.kill(pid, signal.SIGSTOP)
    texts = ["a" * (3 * MIB), "b", "c" * MIB]
    for text in texts:
        worker.send(text)
    os.kill(pid, signal.SIGCONT)
    assert [worker.next().answer.text for _ in texts] == texts


def test_a_report_that_cannot_be_decoded_ends_the_worker(worker: Worker) -> None:
    """Was: the thread that reads died of it, the worker lived on unheard."""
    died = worker.ask("mumble")
    assert isinstance(died, Died) and "cannot be decoded" in died.message


def test_a_report_that_cannot_be_handled_ends_the_worker_and_no_more() -> None:
    worker = Worker()

    def broken(report: object) -> None:
        worker.reports.put(report)
        raise RuntimeError("a bug")

    worker.supervisor.start(broken)
    assert worker.ask("one") == TokenizerReply(0, Text("one"))
    assert "could not be handled" in worker.died().message
    worker.start()
    assert worker.ask("two") == TokenizerReply(0, Text("two"))
    worker.supervisor.close()


@pytest.mark.parametrize("role", ["engine", "tokenizer"])
def test_a_command_that_cannot_be_decoded_ends_the_worker_with_a_code(role: str) -> None:
    """Was (engine): the thread that reads commands died of it, the heartbeats went on."""
    worker = Worker("cllm.testing", role)
    worker.start()
    while not isinstance(worker.next(), Ready | TokenizerReady):
        pass
    worker.supervisor.send(b"\xc1 is no MessagePack")
    assert worker.died().message == f"the {role} process exited with code 3"
    worker.supervisor.close()


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_start_that_fails_is_reported_and_tried_again_without_a_new_thread(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: Popen or Thread.start raised on a timer's thread, and no other start followed."""
    worker.ask("die")

    def no_process(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", no_process)
        for _ in range(3):
            worker.start(0.01)
            died = worker.ask("sent to a process that never was")
            message = f"the tokenizer process could not be started: {os.strerror(errno.EAGAIN)}"
            assert died == Died(START_FAILED, message)
    worker.start(0.01)
    assert worker.ask("two") == TokenizerReply(0, Text("two"))


def test_without_a_first_thread_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    worker = Worker()
    with pytest.raises(EngineNotReady, match="cannot be started: can't start new thread"):
        worker.start()
    worker.supervisor.close()


def test_closing_during_the_delay_or_the_start_is_prompt(worker: Worker) -> None:
    began = time.monotonic()
    waiting = Worker()
    waiting.start(600.0)
    waiting.supervisor.close()
    worker.supervisor.close()  # its interpreter starts just now
    assert time.monotonic() - began < WorkerProcess.END_LIMIT_S
    assert waiting.reports.empty()


def test_what_is_killed_before_it_starts_is_not_started() -> None:
    worker = Worker()
    worker.start(600.0)
    worker.send("never done")
    worker.supervisor.kill()
    assert worker.died().signal == signal.SIGKILL
    worker.start()
    assert worker.ask("two") == TokenizerReply(0, Text("two")), "it gets nothing that was for the other"
    worker.supervisor.close()


def test_a_stopped_worker_is_ended_at_close(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerProcess, "END_LIMIT_S", 0.2)
    pid = int(worker.ask("who").answer.text)
    os.kill(pid, signal.SIGSTOP)
    worker.supervisor.close()
    assert worker.died().signal == signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_restarts_back_off_up_to_a_limit_until_there_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    backoff = Backoff()
    assert [backoff.next_delay() for _ in range(5)] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert not backoff.exhausted
    assert [backoff.next_delay() for _ in range(4)] == [8.0, 16.0, 32.0, 60.0] and backoff.exhausted
    backoff.count = 10_000
    assert backoff.next_delay() == 60.0
    backoff.progress()
    assert not backoff.exhausted and backoff.next_delay() == 0.0


def test_a_run_that_was_ready_for_long_starts_the_back_off_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    backoff = Backoff()
    for _ in range(7):
        backoff.ready()
        now += Backoff.STABLE_S
        delay_s = backoff.next_delay()
    assert delay_s == 16.0 and backoff.exhausted
    backoff.ready()
    now += Backoff.STABLE_S + 1
    assert backoff.next_delay() == 0.0 and not backoff.exhausted


@pytest.mark.parametrize("retries_together", [0, 1, 2])
def test_work_is_retried_together_then_alone_then_rejected(retries_together: int) -> None:
    work = Attempt()
    work.retries_together = retries_together
    for _ in range(retries_together):
        assert not work.blame() and not work.alone
    assert not work.blame() and work.alone
    assert work.blame()
