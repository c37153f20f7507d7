"""Input of a chat: lines and texts of several lines, with history and completion."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'
Words = Callable[[], Iterable[str]]


def continues(text: str) -> bool:
    """Whether Enter begins a new line of a text, and does not send it."""
    return text.endswith("\\") or text.count(QUOTES) % 2 == 1


def clean(text: str) -> str:
    """A text without what made it continue."""
    text = text.strip()
    if text.startswith(QUOTES):
        text = text[len(QUOTES) :].removesuffix(QUOTES).strip("\n")
    return text.replace("\\\n", "\n")


class CommandCompleter(Completer):
    """Completes commands, and the words or paths that follow them."""

    def __init__(self, commands: Mapping[str, Words | None], paths: Iterable[str]) -> None:
        self._commands = commands
        self._paths = frozenset(paths)
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/"):
            return
        command, space, rest = text[1:].partition(" ")
        if space and command in self._paths:
            yield from self._files.get_completions(Document(rest), complete_event)
            return
        words = (self._commands.get(command) or tuple)() if space else self._commands
        begun = rest if space else command
        for word in words:
            if word.startswith(begun):
                yield Completion(word, start_position=-len(begun))


def open_history(path: Path) -> History:
    """The history in a file that only this user can read; without a file where none can be written."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
        return FileHistory(str(path))
    return InMemoryHistory()


def open_session(history: Path, completer: Completer) -> PromptSession[str]:
    """Enter sends a text that does not continue; Alt-Enter begins a new line."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def _send(event: KeyPressEvent) -> None:
        if continues(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        PROMPT,
        multiline=True,
        prompt_continuation=MORE,
        key_bindings=bindings,
        history=open_history(history),
        completer=completer,
        complete_while_typing=False,
        enable_open_in_editor=False,
    )
