"""Conversation: turns, settings and files of a transcript; answers that are shown, stopped or fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cllm.cli import conversation
from cllm.cli.conversation import AnswerEnd, Dialog, LocalAnswers, Message, Piece, Transcript, read_text
from cllm.cli.terminal import Screen
from cllm.errors import ConfigError, EngineDied, InvalidRequest


def answered(*questions: str) -> Transcript:
    transcript = Transcript()
    for question in questions:
        transcript.ask(question)
        transcript.messages.append(Message("assistant", f"{question}!", "hm"))
    return transcript


def test_a_question_replaces_one_without_an_answer() -> None:
    transcript = answered("one")
    transcript.ask("failed")
    transcript.ask("two")
    assert [message.content for message in transcript.messages] == ["one", "one!", "two"]
    assert transcript.unanswered and transcript.drop_answer()


def test_messages_and_options_are_those_of_the_api() -> None:
    transcript = answered("one")
    transcript.system, transcript.think, transcript.schema = "Be brief.", "off", {}
    transcript.set("temperature", "0.5")
    transcript.set("stop", "END")
    assert transcript.rendered() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "one!", "reasoning_content": "hm"},
    ]
    assert transcript.options() == {
        "temperature": 0.5,
        "stop": "END",
        "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {"type": "json_object"},
    }
    transcript.schema = {"type": "array"}
    assert transcript.options()["response_format"]["json_schema"]["schema"] == {"type": "array"}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("temperature", "99", "temperature is 99"),
        ("temperature", "hot", "temperature is 'hot'"),
        ("top_k", "1.5", "top_k is 1.5"),
        ("max_tokens", "0", "max_tokens is 0"),
        ("wibble", "1", "there is no setting 'wibble'"),
    ],
)
def test_a_wrong_setting_is_named_and_changes_nothing(name: str, text: str, said: str) -> None:
    transcript = Transcript()
    transcript.set("temperature", "1")
    with pytest.raises(InvalidRequest, match=said):
        transcript.set(name, text)
    assert transcript.settings == {"temperature": 1}
    transcript.set("temperature", "")
    assert transcript.settings == {}


def test_files_of_a_question_are_text(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"\x89PNG\xff")
    (tmp_path / "zero").write_bytes(b"a\0b")
    (tmp_path / "large").write_bytes(b"x" * ((1 << 20) + 1))
    for name in ("image", "zero", "large", "missing"):
        with pytest.raises(ConfigError, match=name):
            read_text(tmp_path / name)


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
    assert opened.transcript.messages[-1] == Message("assistant", "yes", "hmm")


def test_a_server_that_counts_nothing_has_a_line_too() -> None:
    stats = conversation.AnswerStats()
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
