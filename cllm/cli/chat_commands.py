"""The loop of `cllm chat` on a terminal: input with history and completion, commands, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from cllm.cli.conversation import SETTINGS, Dialog, Transcript, read_text
from cllm.errors import CllmError, InvalidRequest
from cllm.fields import describe_unknown

QUOTES = '"""'
COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
LEAVE = "Ctrl-C again, Ctrl-D or /bye leaves"
THINK = {
    "on": "reasoning is shown",
    "off": "the model answers without reasoning, where its template can switch it off",
    "hide": "reasoning is folded",
}


def continues(text: str) -> bool:
    """Return True if Enter begins a new line of the text instead of sending it."""
    return text.endswith("\\") or text.count(QUOTES) % 2 == 1


def clean(text: str) -> str:
    """A text without what made it continue."""
    text = text.strip()
    if text.startswith(QUOTES):
        text = text[len(QUOTES) :].removesuffix(QUOTES).strip("\n")
    return text.replace("\\\n", "\n")


class Command(NamedTuple):
    """A command of the chat, the words that follow it, and those that complete it."""

    run: Callable[[str], None]
    usage: str
    help: str
    words: Callable[[], Iterable[str]] = tuple


class CommandCompleter(Completer):
    """Completes commands, and the words or paths that follow them."""

    def __init__(self, commands: Mapping[str, Command]) -> None:
        self._commands = commands
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/"):
            return
        command, space, rest = text[1:].partition(" ")
        known = self._commands.get(command)
        if space and known is not None and ("PATH" in known.usage or "FILE" in known.usage):
            yield from self._files.get_completions(Document(rest), complete_event)
            return
        words = (known.words() if known else ()) if space else self._commands
        begun = rest if space else command
        for word in words:
            if word.startswith(begun):
                yield Completion(word, start_position=-len(begun))


def open_history(path: Path) -> History:
    """The history in a file that only this user can read; without a file where none can be written."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600)
        path.chmod(0o600)  # where it was there
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

    bindings.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))

    return PromptSession(
        ">>> ",
        multiline=True,
        prompt_continuation="... ",
        key_bindings=bindings,
        history=open_history(history),
        completer=completer,
        complete_while_typing=False,
        enable_open_in_editor=False,
    )


class ChatLoop:
    """Reads questions and commands until the user leaves."""

    def __init__(self, dialog: Dialog, history: Path) -> None:
        self._dialog, self._screen = dialog, dialog.screen
        self._files: list[Path] = []  # for the next question
        self._interrupted = False  # by Ctrl-C, and nothing was entered since
        self.commands = self._make_commands()
        self._session = open_session(history, CommandCompleter(self.commands))

    def _make_commands(self) -> dict[str, Command]:
        list_models = self._dialog.source.list_models
        return {
            "system": Command(self._system, "[TEXT|off]", "show or change the system prompt"),
            "set": Command(self._set, "[NAME [VALUE]]", "show or change a setting", lambda: SETTINGS),
            "think": Command(self._think, "on|off|hide", "reasoning: shown, none, folded", lambda: THINK),
            "file": Command(self._file, "PATH", "put a text file into the next question"),
            "image": Command(self._image, "PATH", "put a picture or a sound into the next question"),
            "json": Command(self._json, "[SCHEMA|FILE|off]", "answers are JSON: any object, or by a schema"),
            "retry": Command(self._retry, "", "answer the last question again"),
            "undo": Command(self._undo, "", "forget the last question and its answer"),
            "clear": Command(self._clear, "", "forget all questions and answers"),
            "save": Command(self._save, "PATH", "write the chat to a file"),
            "load": Command(self._load, "PATH", "continue a chat from a file"),
            "model": Command(self._model, "[NAME]", "list the models, or change to one", list_models),
            "stats": Command(self._stats, "", "tokens, speed and context so far"),
            "help": Command(self._help, "", "this list"),
            "bye": Command(self._leave, "", "leave (also /exit, Ctrl-D)"),
        }

    def run(self) -> None:
        """Until the user leaves."""
        source = self._dialog.source
        self._screen.remark(f"{source.name} ({source.where}); /help lists the commands")
        while True:
            try:
                text = clean(self._session.prompt())
                self._interrupted = False
                self._take(text)
            except EOFError:
                return
            except CllmError as error:
                kept = "; /retry asks again" if self._dialog.transcript.unanswered else ""
                self._screen.say(f"cllm: {error}{kept}")
            except KeyboardInterrupt:
                if self._interrupted:
                    return
                self._interrupted = True
                self._screen.remark(LEAVE)

    def _take(self, text: str) -> None:
        if not text:
            return
        if (found := COMMAND.fullmatch(text)) is None:
            question = "".join(_quote(path) for path in self._files) + text
            self._files = []
            self._dialog.transcript.ask(question)
            self._answer()
            return
        name, rest = {"exit": "bye", "quit": "bye", "?": "help"}.get(found[1], found[1]), found[2] or ""
        if name not in self.commands:
            known = describe_unknown(name, self.commands)
            raise InvalidRequest(f"there is no command {known}; /help lists them")
        command, rest = self.commands[name], rest.strip()
        if command.usage and not command.usage.startswith("[") and not rest:
            raise InvalidRequest(f"say /{name} {command.usage}")
        command.run(rest)

    def _answer(self) -> None:
        if self._dialog.answer():
            self._screen.remark(self._dialog.describe_last())
        else:
            self._interrupted = True
            self._screen.remark(f"stopped; {LEAVE}")

    # The commands ------------------------------------------------------------------------------------

    def _system(self, rest: str) -> None:
        transcript = self._dialog.transcript
        if rest:
            transcript.system = "" if rest == "off" else rest
        self._screen.say(transcript.system or "there is no system prompt")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        transcript = self._dialog.transcript
        if name:
            transcript.set(name, value.strip())
        shown = ", ".join(f"{key} {json.dumps(value)}" for key, value in transcript.settings.items())
        self._screen.say(shown or f"all settings are the defaults; there are {', '.join(SETTINGS)}")

    def _think(self, rest: str) -> None:
        if rest not in THINK:
            raise InvalidRequest("say /think on, off or hide")
        self._dialog.transcript.think = rest  # type: ignore[assignment]
        self._screen.say(THINK[rest])

    def _file(self, rest: str) -> None:
        path = Path(rest).expanduser()
        size = len(read_text(path))
        self._files.append(path)
        self._screen.say(f"{path.name}, {size:,} characters, goes into the next question")

    def _image(self, rest: str) -> None:
        self._dialog.transcript.show(Path(rest))
        self._screen.say(f"{Path(rest).name} goes into the next question")

    def _json(self, rest: str) -> None:
        schema: dict[str, Any] | None = None if rest == "off" else {}
        if rest not in ("", "off"):
            text = rest if rest.startswith("{") else read_text(Path(rest))
            try:
                schema = msgspec.json.decode(text, type=dict[str, Any])
            except msgspec.MsgspecError as error:
                raise InvalidRequest(f"this is no JSON schema: {error}") from None
        self._dialog.transcript.schema = schema
        form = "by the schema" if schema else "any object"
        self._screen.say("answers are text" if schema is None else f"answers are JSON, {form}")

    def _retry(self, rest: str) -> None:
        if not self._dialog.transcript.drop_answer():
            raise InvalidRequest("there is no question yet")
        self._answer()

    def _undo(self, rest: str) -> None:
        transcript = self._dialog.transcript
        if not transcript.drop_answer():
            raise InvalidRequest("there is no question to forget")
        transcript.messages.pop()
        self._screen.say(f"forgotten; {_count(transcript)} left")

    def _clear(self, rest: str) -> None:
        self._dialog.transcript.messages.clear()
        self._screen.say("all is forgotten but the system prompt and the settings")

    def _save(self, rest: str) -> None:
        self._dialog.transcript.model = self._dialog.source.name
        self._dialog.transcript.save(Path(rest))
        self._screen.say(f"saved to {rest}: {_count(self._dialog.transcript)}")

    def _load(self, rest: str) -> None:
        loaded = Transcript.load(Path(rest))
        self._dialog.transcript = loaded
        other = f"; it was with {loaded.model}" if loaded.model != self._dialog.source.name else ""
        self._screen.say(f"loaded from {rest}: {_count(loaded)}{other}")

    def _model(self, rest: str) -> None:
        source = self._dialog.source
        if rest:
            source.change_model(rest)
            self._screen.say(f"{source.name} answers now")
            return
        for name in source.list_models():
            self._screen.say(f"{'*' if name == source.name else ' '} {name}")

    def _stats(self, rest: str) -> None:
        source, stats = self._dialog.source, self._dialog.stats
        tokens, seconds = sum(each.tokens for each in stats), sum(each.seconds for each in stats)
        speed = f", {tokens / seconds:.1f} tokens/s" if seconds else ""
        self._screen.say(f"model    {source.name} ({source.where})")
        questions = _count(self._dialog.transcript)
        self._screen.say(f"chat     {questions}, {len(stats)} answers, {tokens:,} tokens{speed}")
        if stats:
            self._screen.say(f"last     {self._dialog.describe_last()}")

    def _help(self, rest: str) -> None:
        for name, command in self.commands.items():
            self._screen.say(f"/{name + ' ' + command.usage:26} {command.help}")
        self._screen.say('Alt-Enter, a \\ at the end or """ continue a text; Ctrl-C stops, twice leaves')

    def _leave(self, rest: str) -> None:
        raise EOFError


def _count(transcript: Transcript) -> str:
    questions = sum(message.role == "user" for message in transcript.messages)
    return f"{questions} question{'s' * (questions != 1)}"


def _quote(path: Path) -> str:
    """A file as a part of a question."""
    text = read_text(path)
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{path.name}:\n{fence}\n{text.rstrip()}\n{fence}\n\n"
