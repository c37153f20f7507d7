"""A chat with answers made up here: reasoning, times, what is kept when one is stopped or fails."""

from __future__ import annotations

from typing import Any

import pytest

from cllm.cli.chat import Dialog
from cllm.cli.conversation import AnswerEnd, AnswerStats, LocalAnswers, Piece, Transcript
from cllm.cli.terminal import Screen
from cllm.errors import EngineDied


class Source(LocalAnswers):
    """Answers with these pieces; an error is raised."""

    name, context = "model", 100

    def __init__(self, *pieces: Piece | AnswerEnd | BaseException) -> None:
        self._pieces = pieces

    def answer(self, messages: Any, options: Any) -> Any:
        for piece in self._pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield piece


THOUGHT, TEXT, END = Piece("hmm", reasoning=True), Piece("yes"), AnswerEnd(8, 4, 6)


def chat(*pieces: Piece | AnswerEnd | BaseException, think: Any = "on") -> Dialog:
    opened = Dialog(Source(*pieces), Transcript(think=think), Screen())
    opened.screen.is_terminal = True
    opened.transcript.ask("well?")
    return opened


@pytest.mark.parametrize(("think", "shown"), [("on", "hmm\nyes\n"), ("hide", "thinking …\nyes\n")])
def test_reasoning_is_shown_or_folded(capsys: pytest.CaptureFixture[str], think: str, shown: str) -> None:
    opened = chat(THOUGHT, THOUGHT._replace(text=""), TEXT, END, think=think)
    assert opened.answer()
    assert capsys.readouterr().out == shown
    assert opened.transcript.rendered()[-1] == {
        "role": "assistant",
        "content": "yes",
        "reasoning_content": "hmm",
    }


def test_one_line_says_what_an_answer_took() -> None:
    opened = chat(TEXT, TEXT, END)
    opened.answer()
    line = opened.describe_last()
    assert line.startswith("4 tokens, ") and " tokens/s, first token " in line
    assert line.endswith("6 of 8 prompt tokens cached, context 12 of 100")


def test_a_server_that_counts_nothing_has_a_line_too() -> None:
    stats = AnswerStats()
    stats.see_piece()
    assert stats.describe(0) == "first token 0.00 s"


def test_a_stopped_answer_counts_as_far_as_it_came() -> None:
    opened = chat(TEXT, KeyboardInterrupt())
    assert not opened.answer()
    assert opened.transcript.messages[-1].content == "yes"
    opened = chat(KeyboardInterrupt())
    assert not opened.answer() and opened.transcript.unanswered


def test_a_failed_answer_leaves_the_question() -> None:
    opened = chat(TEXT, EngineDied("the engine died"))
    with pytest.raises(EngineDied):
        opened.answer()
    assert opened.transcript.unanswered
