"""The tokenizer process can crash; only the task it crashed on is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cllm.config import EngineConfig
from cllm.errors import ContextLengthExceeded, EngineDied, InvalidRequest, ShuttingDown, TokenizerBusy
from cllm.messages import Prepare, RenderChat, Text, TokenizeTexts
from cllm.server.dialect import get_status
from cllm.text.prompt import Chat
from cllm.types import ConstraintKind, ConstraintSpec
from cllm.workers import executor
from cllm.workers.executor import THREADS, ProcessTokenizer
from tests.unit.workers.crashing_tokenizer import LONGEST

PATIENCE_S = 60


@pytest.fixture
def tokenizer() -> Iterator[ProcessTokenizer]:
    tokenizer = ProcessTokenizer(EngineConfig(), module="tests.unit.workers.crashing_tokenizer")
    yield tokenizer
    tokenizer.close()


def test_only_tasks_that_crash_it_are_refused(tokenizer: ProcessTokenizer) -> None:
    """Two of many crash it: each twice, the second time alone. All others are answered."""
    words = ["a", "die", "b", "c", "die", "d", "e"]
    futures = [(word, tokenizer.submit(TokenizeTexts((word,)))) for word in words]
    for word, future in futures:
        if word == "die":
            assert isinstance(future.exception(PATIENCE_S), EngineDied)
        else:
            assert future.result(PATIENCE_S) == Text(word)


def test_a_grammar_that_crashes_it_is_too_complex(tokenizer: ProcessTokenizer) -> None:
    bad = tokenizer.submit(Prepare((), constraint=ConstraintSpec(ConstraintKind.GRAMMAR, "x")))
    good = tokenizer.submit(TokenizeTexts(("good",)))
    error = bad.exception(PATIENCE_S)
    assert isinstance(error, InvalidRequest) and error.field == "grammar"
    assert good.result(PATIENCE_S) == Text("good")


def test_an_endless_template_is_blamed_on_no_other_chat(tokenizer: ProcessTokenizer) -> None:
    """The others are answered, even those that were rendered beside it."""
    before, endless, after = (
        tokenizer.submit(RenderChat(Chat(({"content": text},)))) for text in ("a", "endless", "b")
    )
    others = [tokenizer.submit(TokenizeTexts((str(number),))) for number in range(3)]
    error = endless.exception(PATIENCE_S)
    assert isinstance(error, InvalidRequest) and error.field == "messages" and "was stopped" in error.message
    assert before.result(PATIENCE_S) == after.result(PATIENCE_S) == Text("rendered")
    assert [future.result(PATIENCE_S) for future in others] == [Text("0"), Text("1"), Text("2")]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task may take a second in the worker: others take none, but the machine may be busy."""
    monkeypatch.setattr(executor, "TEXT_LIMIT_S", 1.0)


@pytest.mark.usefixtures("impatient")
def test_a_task_that_hangs_is_refused_and_blamed_on_no_other(tokenizer: ProcessTokenizer) -> None:
    for number in range(2):  # twice: more often than a task may be present at a crash
        hanging = tokenizer.submit(TokenizeTexts(("hang",)))
        behind = tokenizer.submit(TokenizeTexts((f"after {number}",)))  # this worker has one thread
        error = hanging.exception(PATIENCE_S)
        assert isinstance(error, InvalidRequest) and "shorten it" in error.message
        assert behind.result(PATIENCE_S) == Text(f"after {number}")


def test_a_task_that_waits_too_long_is_not_the_clients_fault(
    tokenizer: ProcessTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503, and the worker goes on with what it has."""
    assert tokenizer.submit(TokenizeTexts(("up",))).result(PATIENCE_S) == Text("up")
    running = [tokenizer.submit(TokenizeTexts(("slow",))) for _ in range(THREADS)]
    monkeypatch.setattr(executor, "WAIT_LIMIT_S", 0.1)
    error = tokenizer.submit(TokenizeTexts(("late",))).exception(PATIENCE_S)
    assert isinstance(error, TokenizerBusy) and get_status(error) == 503 and error.retry_after_s >= 1
    assert [future.result(PATIENCE_S) for future in running] == [Text("slow")] * THREADS


def test_a_dropped_task_is_never_sent_and_one_in_the_worker_is_let_be(tokenizer: ProcessTokenizer) -> None:
    assert tokenizer.submit(TokenizeTexts(("up",))).result(PATIENCE_S) == Text("up")
    running = [tokenizer.submit(TokenizeTexts(("slow",))) for _ in range(THREADS)]
    dropped = tokenizer.submit(TokenizeTexts(("die",)))
    after = tokenizer.submit(TokenizeTexts(("after",)))
    tokenizer.abort(dropped)
    tokenizer.abort(running[0])
    assert dropped.cancelled()
    assert after.result(PATIENCE_S) == Text("after")
    assert running[1].result(PATIENCE_S) == Text("slow")


def test_a_text_of_too_many_bytes_is_not_sent(tokenizer: ProcessTokenizer) -> None:
    assert tokenizer.submit(TokenizeTexts(("up",))).result(PATIENCE_S) == Text("up")
    with pytest.raises(ContextLengthExceeded, match="at least 4 tokens"):
        tokenizer.submit(TokenizeTexts(("x" * (3 * LONGEST + 1),), 3))
    fits = "x" * 3 * LONGEST
    assert tokenizer.submit(TokenizeTexts((fits,), 3)).result(PATIENCE_S) == Text(fits)


def test_it_restarts_after_a_crash_and_refuses_when_closed(
    tokenizer: ProcessTokenizer,
) -> None:
    assert isinstance(tokenizer.submit(TokenizeTexts(("die",))).exception(PATIENCE_S), EngineDied)
    assert tokenizer.submit(TokenizeTexts(("again",))).result(PATIENCE_S) == Text("again")
    pending = tokenizer.submit(TokenizeTexts(("hang",)))
    tokenizer.close()
    assert isinstance(pending.exception(PATIENCE_S), ShuttingDown)
    with pytest.raises(ShuttingDown):
        tokenizer.submit(TokenizeTexts(("late",)))


@pytest.mark.parametrize(("options", "match"), [({"x": 1 << 64}, "64 bits"), ({"x": "\ud83d"}, "surrogate")])
def test_what_no_message_can_carry_is_refused(
    tokenizer: ProcessTokenizer, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidRequest, match=match):
        tokenizer.submit(RenderChat(Chat((), options=options)))
