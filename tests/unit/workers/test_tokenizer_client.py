"""The text process can die; only the task it died of pays."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from cllm.config import EngineConfig
from cllm.errors import EngineDied, InvalidRequest
from cllm.types import ConstraintKind, ConstraintSpec
from cllm.workers.executor import ProcessTokenizer
from cllm.workers.messages import Chat, CheckConstraint, RenderChat, Text, TokenizeText

PATIENCE_S = 60


@pytest.fixture
def host() -> Iterator[ProcessTokenizer]:
    host = ProcessTokenizer(EngineConfig(), module="tests.unit.workers.crashing_worker")
    yield host
    host.close()


def test_only_those_it_died_of_are_refused(host: ProcessTokenizer) -> None:
    """Two killers among many: each dies twice, the second time alone, and everybody else is answered."""
    words = ["a", "die", "b", "c", "die", "d", "e"]
    futures = [(word, host.submit(TokenizeText(word))) for word in words]
    for word, future in futures:
        if word == "die":
            assert isinstance(future.exception(PATIENCE_S), EngineDied)
        else:
            assert future.result(PATIENCE_S) == Text(word)


def test_a_grammar_it_dies_of_is_too_complex(host: ProcessTokenizer) -> None:
    bad = host.submit(CheckConstraint(ConstraintSpec(ConstraintKind.GRAMMAR, "x")))
    good = host.submit(TokenizeText("good"))
    error = bad.exception(PATIENCE_S)
    assert isinstance(error, InvalidRequest) and error.field == "grammar"
    assert good.result(PATIENCE_S) == Text("good")


def test_a_template_that_was_stopped_is_not_tried_again(host: ProcessTokenizer) -> None:
    chat = host.submit(RenderChat(Chat(({"content": "endless"},))))
    others = [host.submit(TokenizeText(str(number))) for number in range(3)]
    error = chat.exception(PATIENCE_S)
    assert isinstance(error, InvalidRequest) and error.field == "messages"
    assert [future.result(PATIENCE_S) for future in others] == [Text("0"), Text("1"), Text("2")]


def test_a_task_that_is_given_up_is_nobody_elses_death(host: ProcessTokenizer) -> None:
    assert host.submit(TokenizeText("up")).result(PATIENCE_S) == Text("up")
    waiting = []
    for number in range(3):  # three times: more often than a task may be present at a death
        hanging = host.submit(TokenizeText("hang"))
        if number == 0:
            waiting = [host.submit(TokenizeText(f"after {number}"))]
        time.sleep(0.1)
        host.abort(hanging)
    assert [future.result(PATIENCE_S) for future in waiting] == [Text("after 0")]
