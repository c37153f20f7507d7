"""Transcript of a chat: system prompt, settings and messages, as they are sent and as they are saved."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cllm.cli.answers import SAMPLING
from cllm.errors import ConfigError, InvalidRequest
from cllm.fields import describe_unknown, parse_fields
from cllm.types import SamplingParams

MAX_FILE_BYTES = 1 << 20  # of a text that goes into a question
MAX_SAVED_BYTES = 64 << 20


class Limits(msgspec.Struct):
    """What `/set` takes besides the fields of sampling."""

    max_tokens: Annotated[int, Meta(ge=1)] = 0
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    stop: str | list[str] = ""
    reasoning_effort: str = ""
    reasoning_budget: Annotated[int, Meta(ge=-1)] = -1


SETTINGS = tuple(sorted((SAMPLING | frozenset(Limits.__struct_fields__)) - {"logit_bias"}))


class Message(msgspec.Struct, omit_defaults=True):
    """One message of a chat."""

    role: Literal["user", "assistant"]
    content: str
    reasoning_content: str = ""


class Transcript(msgspec.Struct):
    """A chat so far. A question at the end has no answer yet: it failed, or is being answered."""

    model: str = ""
    system: str = ""
    settings: dict[str, Any] = {}
    think: Literal["on", "off", "hide"] = "on"
    schema: dict[str, Any] | None = None  # of the answers; an empty one: any object
    messages: list[Message] = []

    @property
    def unanswered(self) -> bool:
        return bool(self.messages) and self.messages[-1].role == "user"

    def ask(self, question: str) -> None:
        """Add a question; it replaces one that has no answer."""
        if self.unanswered:
            self.messages.pop()
        self.messages.append(Message("user", question))

    def answer(self, text: str, reasoning: str = "") -> None:
        self.messages.append(Message("assistant", text, reasoning))

    def drop_answer(self) -> bool:
        """Make the last question one without an answer; False where there is none."""
        if self.messages and not self.unanswered:
            self.messages.pop()
        return self.unanswered

    def drop_turn(self) -> bool:
        """Forget the last question and its answer; False where there is none."""
        if not self.drop_answer():
            return False
        self.messages.pop()
        return True

    def rendered(self) -> list[dict[str, Any]]:
        """The messages as an API takes them."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *(msgspec.to_builtins(message) for message in self.messages)]

    def options(self) -> dict[str, Any]:
        """The fields of `/v1/chat/completions` that follow from the settings."""
        options = dict(self.settings)
        if self.think == "off":
            options["chat_template_kwargs"] = {"enable_thinking": False}
        if self.schema:
            named = {"name": "answer", "schema": self.schema}
            options["response_format"] = {"type": "json_schema", "json_schema": named}
        elif self.schema is not None:
            options["response_format"] = {"type": "json_object"}
        return options

    def set(self, name: str, text: str) -> None:
        """Change a setting; an empty text takes it back. Raises InvalidRequest."""
        if name not in SETTINGS:
            raise InvalidRequest(f"there is no setting {describe_unknown(name, SETTINGS)}")
        if not text:
            self.settings.pop(name, None)
            return
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        parse_fields({name: value}, SamplingParams if name in SAMPLING else Limits)
        self.settings[name] = value

    def save(self, path: Path) -> None:
        """Write it as JSON, for this user only. Raises ConfigError."""
        data = msgspec.json.format(msgspec.json.encode(self), indent=2)
        try:
            with open(path.expanduser(), "wb", opener=_open_private) as file:
                file.write(data + b"\n")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, path: Path) -> Transcript:
        """Read what `save` wrote. Raises ConfigError."""
        try:
            return msgspec.json.decode(_read(path, MAX_SAVED_BYTES), type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} is no saved chat: {error}") from None


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _read(path: Path, limit: int) -> bytes:
    path = path.expanduser()
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > limit:
        raise ConfigError(f"{path} is larger than {limit >> 20} MiB")
    return data


def read_text(path: Path) -> str:
    """A text file for a question. Raises ConfigError."""
    try:
        text = _read(path, MAX_FILE_BYTES).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text in UTF-8") from None
    if "\0" in text:
        raise ConfigError(f"{path} is no text")
    return text
