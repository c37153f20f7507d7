"""The tokenizer process can crash; only the task it crashed on is refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from cllm.config import EngineConfig
from cllm.errors import EngineDied, InvalidRequest, ShuttingDown
from cllm.types import ConstraintKind, ConstraintSpec
from cllm.workers.executor import ProcessTokenizer
from cllm.workers.messages import Chat, CheckConstraint, RenderChat, Text, TokenizeText

PATIENCE_S = 60


@pytest.fixture
def tokenizer() -> Iterator[ProcessTokenizer]:
    tokenizer = ProcessTokenizer(EngineConfig(), module="tests.unit.workers.crashing_worker")
    yield tokenizer
    tokenizer.close()


def test_only_tasks_that_crash_it_are_refused(tokenizer: ProcessTokenizer) -> None:
    """Two of many crash it: each twice, the second time alone. All others are answered."""
    words = ["a", "die", "b", "c", "die", "d", "e"]
    futures = [(word, tokenizer.submit(TokenizeText(word))) for word in words]
    for word, future in futures:
        if word == "die":
            assert isinstance(future.exception(PATIENCE_S), EngineDied)
        else:
            assert future.result(PATIENCE_S) == Text(word)


def test_a_grammar_that_crashes_it_is_too_complex(tokenizer: ProcessTokenizer) -> None:
    bad = tokenizer.submit(CheckConstraint(ConstraintSpec(ConstraintKind.GRAMMAR, "x")))
    good = tokenizer.submit(TokenizeText("good"))
    error = bad.exception(PATIENCE_S)
    assert isinstance(error, InvalidRequest) and error.field == "grammar"
    assert good.result(PATIENCE_S) == Text("good")


def test_a_template_that_was_stopped_is_not_tried_again(tokenizer: ProcessTokenizer) -> None:
    chat = tokenizer.submit(RenderChat(Chat(({"content": "endless"},))))
    others = [tokenizer.submit(TokenizeText(str(number))) for number in range(3)]
    error = chat.exception(PATIENCE_S)
    assert isinstance(error, InvalidRequest) and error.field == "messages"
    assert [future.result(PATIENCE_S) for future in others] == [Text("0"), Text("1"), Text("2")]


def test_an_aborted_task_is_blamed_on_no_other(tokenizer: ProcessTokenizer) -> None:
    assert tokenizer.submit(TokenizeText("up")).result(PATIENCE_S) == Text("up")
    waiting = []
    for number in range(3):  # three times: more often than a task may be present at a crash
        hanging = tokenizer.submit(TokenizeText("hang"))
        if number == 0:
            waiting = [tokenizer.submit(TokenizeText(f"after {number}"))]
        time.sleep(0.1)
        tokenizer.abort(hanging)
    assert [future.result(PATIENCE_S) for future in waiting] == [Text("after 0")]


def test_it_restarts_after_a_crash_and_refuses_when_closed(
    tokenizer: ProcessTokenizer,
) -> None:
    assert isinstance(tokenizer.submit(TokenizeText("die")).exception(PATIENCE_S), EngineDied)
    assert tokenizer.submit(TokenizeText("again")).result(PATIENCE_S) == Text("again")
    pending = tokenizer.submit(TokenizeText("hang"))
    tokenizer.close()
    assert isinstance(pending.exception(PATIENCE_S), ShuttingDown)
    with pytest.raises(ShuttingDown):
        tokenizer.submit(TokenizeText("late"))


@pytest.mark.parametrize(("options", "match"), [({"x": 1 << 64}, "64 bits"), ({"x": "\ud83d"}, "surrogate")])
def test_what_no_message_can_carry_is_refused(
    tokenizer: ProcessTokenizer, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidRequest, match=match):
        tokenizer.submit(RenderChat(Chat((), options=options)))
