"""The input of a chat: what continues a text, and what is completed."""

from __future__ import annotations

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from cllm.cli.chat_commands import Command, CommandCompleter, clean, continues


@pytest.mark.parametrize(
    ("text", "more", "meant"),
    [
        ("hello ", False, "hello"),
        ("a\\", True, "a\\"),
        ("a\\\nb", False, "a\nb"),
        ('"""a', True, "a"),
        ('"""a\n\nb"""', False, "a\n\nb"),
        ('say """x""" twice', False, 'say """x""" twice'),
    ],
)
def test_a_text_continues(text: str, more: bool, meant: str) -> None:
    assert continues(text) is more
    assert clean(text) == meant


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        ("/s", ["set", "save"]),
        ("/set t", ["top_k", "top_p"]),
        ("/save t", []),
        ("hello", []),
        ("/unknown x", []),
    ],
)
def test_commands_and_their_words_are_completed(text: str, offered: list[str]) -> None:
    words = lambda: ("top_k", "top_p", "seed")  # noqa: E731
    commands = {"set": Command(print, "[NAME]", "", words), "save": Command(print, "", "")}
    found = CommandCompleter(commands).get_completions(Document(text), CompleteEvent())
    assert [completion.text for completion in found] == offered
