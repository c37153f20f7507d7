"""The loop of `cllm chat` on a terminal: questions, commands, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from cllm.cli.dialog import Chat
from cllm.cli.line_input import CommandCompleter, clean, open_session
from cllm.cli.transcript import SETTINGS, Transcript, read_text
from cllm.errors import CllmError, InvalidRequest
from cllm.fields import describe_unknown

COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
PATHS = ("file", "save", "load", "json")  # commands that a path follows
LEAVE = "Ctrl-C again, Ctrl-D or /bye leaves"


class Command(NamedTuple):
    """A command of the chat: what follows it, what it does, and what could follow it."""

    run: Callable[[str], None]
    usage: str
    help: str
    words: Callable[[], Iterable[str]] | None = None


class Leave(Exception):
    """The chat ends."""


class ChatLoop:
    """Reads questions and commands until the user leaves."""

    def __init__(self, chat: Chat, history: Path) -> None:
        self._chat, self._screen = chat, chat.screen
        self._files: list[Path] = []  # for the next question
        self._interrupted = False  # by Ctrl-C, and nothing was entered since
        self.commands = self._make_commands()
        completer = CommandCompleter({name: each.words for name, each in self.commands.items()}, PATHS)
        self._session = open_session(history, completer)

    def _make_commands(self) -> dict[str, Command]:
        return {
            "system": Command(self._system, "[TEXT|off]", "show or change the system prompt"),
            "set": Command(
                self._set, "[NAME [VALUE]]", "show or change a setting, as temperature 0.2", lambda: SETTINGS
            ),
            "think": Command(
                self._think, "on|off|hide", "reasoning: shown, none, folded", lambda: ("on", "off", "hide")
            ),
            "file": Command(self._file, "PATH", "put a text file into the next question"),
            "json": Command(self._json, "[SCHEMA|FILE|off]", "answers are JSON: any object, or by a schema"),
            "retry": Command(self._retry, "", "answer the last question again"),
            "undo": Command(self._undo, "", "forget the last question and its answer"),
            "clear": Command(self._clear, "", "forget all questions and answers"),
            "save": Command(self._save, "PATH", "write the chat to a file"),
            "load": Command(self._load, "PATH", "continue a chat from a file"),
            "model": Command(
                self._model, "[NAME]", "list the models, or change to one", self._chat.source.list_models
            ),
            "stats": Command(self._stats, "", "tokens, speed and context so far"),
            "help": Command(self._help, "", "this list"),
            "bye": Command(self._leave, "", "leave (also /exit, Ctrl-D)"),
        }

    def run(self) -> None:
        """Until the user leaves."""
        source = self._chat.source
        self._screen.remark(f"{source.name} ({source.where}); /help lists the commands")
        while True:
            try:
                text = clean(self._session.prompt())
            except KeyboardInterrupt:
                if self._interrupted:
                    return
                self._interrupted = True
                self._screen.remark(LEAVE)
                continue
            except EOFError:
                return
            self._interrupted = False
            try:
                self._take(text)
            except Leave:
                return
            except CllmError as error:
                kept = "; /retry asks again" if self._chat.transcript.unanswered else ""
                self._screen.say(f"cllm: {error}{kept}")
            except KeyboardInterrupt:  # in a command
                self._interrupted = True
                self._screen.remark(LEAVE)

    def _take(self, text: str) -> None:
        if not text:
            return
        found = COMMAND.fullmatch(text)
        if found is None:
            question = "".join(_quote(path) for path in self._files) + text
            self._files = []
            self._chat.transcript.ask(question)
            self._answer()
            return
        name, rest = {"exit": "bye", "quit": "bye", "?": "help"}.get(found[1], found[1]), found[2] or ""
        if name not in self.commands:
            known = describe_unknown(name, self.commands)
            raise InvalidRequest(f"there is no command {known}; /help lists them")
        self.commands[name].run(rest.strip())

    def _answer(self) -> None:
        if self._chat.answer():
            self._screen.remark(self._chat.describe_last())
        else:
            self._interrupted = True
            self._screen.remark(f"stopped; {LEAVE}")

    # The commands ------------------------------------------------------------------------------------

    def _system(self, rest: str) -> None:
        transcript = self._chat.transcript
        if rest:
            transcript.system = "" if rest == "off" else rest
        self._screen.say(transcript.system or "there is no system prompt")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        transcript = self._chat.transcript
        if name:
            transcript.set(name, value.strip())
        shown = ", ".join(f"{key} {json.dumps(value)}" for key, value in transcript.settings.items())
        self._screen.say(shown or f"all settings are the defaults; there are {', '.join(SETTINGS)}")

    def _think(self, rest: str) -> None:
        ways: dict[str, Any] = {
            "on": "reasoning is shown",
            "off": "the model answers without reasoning, where its template can switch it off",
            "hide": "reasoning is folded",
        }
        if rest not in ways:
            raise InvalidRequest("say /think on, off or hide")
        self._chat.transcript.think = rest  # type: ignore[assignment]
        self._screen.say(ways[rest])

    def _file(self, rest: str) -> None:
        if not rest:
            raise InvalidRequest("say /file PATH")
        path = Path(rest).expanduser()
        size = len(read_text(path))
        self._files.append(path)
        self._screen.say(f"{path.name}, {size:,} characters, goes into the next question")

    def _json(self, rest: str) -> None:
        transcript = self._chat.transcript
        if rest == "off":
            transcript.schema = None
        elif not rest:
            transcript.schema = {}
        else:
            try:
                schema = json.loads(rest if rest.startswith("{") else read_text(Path(rest)))
            except ValueError as error:
                raise InvalidRequest(f"this is no JSON schema: {error}") from None
            if not isinstance(schema, dict):
                raise InvalidRequest("this is no JSON schema: it must be an object")
            transcript.schema = schema
        form = transcript.schema
        self._screen.say(
            "answers are text"
            if form is None
            else f"answers are JSON, {'by the schema' if form else 'any object'}"
        )

    def _retry(self, rest: str) -> None:
        if not self._chat.transcript.drop_answer():
            raise InvalidRequest("there is no question yet")
        self._answer()

    def _undo(self, rest: str) -> None:
        transcript = self._chat.transcript
        if not transcript.drop_turn():
            raise InvalidRequest("there is no question to forget")
        self._screen.say(f"forgotten; {_count(transcript)} left")

    def _clear(self, rest: str) -> None:
        self._chat.transcript.messages.clear()
        self._screen.say("all is forgotten but the system prompt and the settings")

    def _save(self, rest: str) -> None:
        if not rest:
            raise InvalidRequest("say /save PATH")
        self._chat.transcript.model = self._chat.source.name
        self._chat.transcript.save(Path(rest))
        self._screen.say(f"saved to {rest}: {_count(self._chat.transcript)}")

    def _load(self, rest: str) -> None:
        if not rest:
            raise InvalidRequest("say /load PATH")
        loaded = Transcript.load(Path(rest))
        self._chat.transcript = loaded
        other = f"; it was with {loaded.model}" if loaded.model != self._chat.source.name else ""
        self._screen.say(f"loaded from {rest}: {_count(loaded)}{other}")

    def _model(self, rest: str) -> None:
        source = self._chat.source
        if rest:
            source.change_model(rest)
            self._screen.say(f"{source.name} answers now")
            return
        for name in source.list_models():
            self._screen.say(f"{'*' if name == source.name else ' '} {name}")

    def _stats(self, rest: str) -> None:
        source, stats = self._chat.source, self._chat.stats
        tokens, seconds = sum(each.tokens for each in stats), sum(each.seconds for each in stats)
        speed = f", {tokens / seconds:.1f} tokens/s" if seconds else ""
        self._screen.say(f"model    {source.name} ({source.where})")
        self._screen.say(
            f"chat     {_count(self._chat.transcript)}, {len(stats)} answers, {tokens:,} tokens{speed}"
        )
        if stats:
            self._screen.say(f"last     {self._chat.describe_last()}")

    def _help(self, rest: str) -> None:
        for name, command in self.commands.items():
            self._screen.say(f"/{name + ' ' + command.usage:26} {command.help}")
        self._screen.say('Alt-Enter, a \\ at the end or """ continue a text; Ctrl-C stops, twice leaves')

    def _leave(self, rest: str) -> None:
        raise Leave


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
