"""Conversation: its transcript, sent and saved; answers of a server or a model loaded here; the dialog."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from cllm.cli.client import RECONNECT_S, ServerClient
from cllm.cli.terminal import Screen
from cllm.config import EngineConfig
from cllm.errors import CllmError, ConfigError, InvalidRequest, ModelNotFound, Unauthorized
from cllm.fields import describe_unknown, parse_fields
from cllm.limits import MAX_PICTURE_BYTES
from cllm.types import SamplingParams

if TYPE_CHECKING:
    from cllm.chat.reply import ChatReply
    from cllm.llm import TextStream

MAX_FILE_BYTES = 1 << 20  # of a text that goes into a question
MAX_SAVED_BYTES = 64 << 20
SAMPLING = frozenset(SamplingParams.__struct_fields__)
Messages = Sequence[Mapping[str, Any]]
Options = Mapping[str, Any]  # fields of /v1/chat/completions
Think = Literal["on", "off", "hide"]


class ChatSettings(msgspec.Struct):
    """Settings of `/set` beside the fields of sampling."""

    max_tokens: Annotated[int, Meta(ge=1)] = 0
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    stop: str | list[str] = ""
    reasoning_effort: str = ""
    reasoning_budget: Annotated[int, Meta(ge=-1)] = -1


SETTINGS = tuple(sorted((SAMPLING | frozenset(ChatSettings.__struct_fields__)) - {"logit_bias"}))


class Message(msgspec.Struct, omit_defaults=True):
    """One message of a chat."""

    role: Literal["user", "assistant"]
    content: str
    reasoning_content: str = ""
    pictures: list[str] = []  # or sounds: files in base64

    def rendered(self) -> dict[str, Any]:
        """The message as an API takes it."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        if pictures := fields.pop("pictures", ()):
            shown = [{"type": "image_url", "image_url": f"data:;base64,{each}"} for each in pictures]
            fields["content"] = [*shown, {"type": "text", "text": self.content}]
        return fields


class Transcript(msgspec.Struct):
    """A chat so far. A question at the end has no answer yet: it failed, or is being answered."""

    model: str = ""
    system: str = ""
    settings: dict[str, Any] = {}
    think: Think = "on"
    raw: bool = False  # complete the question as it is: no chat template
    schema: dict[str, Any] | None = None  # of the answers; an empty one: any object
    messages: list[Message] = []
    pictures: list[str] = []  # for the next question

    @property
    def unanswered(self) -> bool:
        return bool(self.messages) and self.messages[-1].role == "user"

    def ask(self, question: str) -> None:
        """Add a question; it replaces one that has no answer."""
        if self.unanswered:
            self.messages.pop()
        self.messages.append(Message("user", question, pictures=self.pictures))
        self.pictures = []

    def show(self, path: Path) -> None:
        """Put a picture into the next question. Raises ConfigError."""
        self.pictures.append(base64.b64encode(_read(path, MAX_PICTURE_BYTES)).decode())

    def drop_answer(self) -> bool:
        """Make the last question one without an answer; False where there is none."""
        if self.messages and not self.unanswered:
            self.messages.pop()
        return self.unanswered

    def rendered(self) -> str | list[dict[str, Any]]:
        """The messages, or the raw question, as an API takes them."""
        if self.raw:
            return self.messages[-1].content
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *(message.rendered() for message in self.messages)]

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
        parse_fields({name: value}, SamplingParams if name in SAMPLING else ChatSettings)
        self.settings[name] = value

    def save(self, path: Path) -> None:
        """Write it as JSON, for this user only. Raises ConfigError."""
        data = msgspec.json.format(msgspec.json.encode(self), indent=2)
        try:
            with open(path.expanduser(), "wb", opener=partial(os.open, mode=0o600)) as file:
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


class Piece(NamedTuple):
    """A piece of an answer."""

    text: str
    reasoning: bool = False


class AnswerEnd(NamedTuple):
    """Tokens of an answer; None where the server does not count them."""

    prompt_tokens: int | None = None
    tokens: int | None = None
    cached_tokens: int = 0
    cut: bool = False  # by the limit of tokens


class AnswerStats:
    """The times and tokens of one answer, as its reader sees them."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self._first: float | None = None
        self.end = AnswerEnd()

    def see_piece(self) -> None:
        self._last = time.perf_counter()
        self._first = self._first or self._last

    @property
    def tokens(self) -> int:
        return self.end.tokens or 0

    @property
    def seconds(self) -> float:
        """From the first token to the last."""
        return self._last - (self._first or self._last)

    def describe(self, context: int) -> str:
        """One line: tokens, tokens/s, first token, cached tokens, context used."""
        parts = []
        if self.end.tokens is not None:
            parts.append(f"{self.tokens} tokens")
        if self.tokens > 1 and self.seconds > 0:
            parts.append(f"{(self.tokens - 1) / self.seconds:.1f} tokens/s")
        if self._first is not None:
            parts.append(f"first token {self._first - self._began:.2f} s")
        if self.end.prompt_tokens is not None:
            parts.append(f"{self.end.cached_tokens} of {self.end.prompt_tokens} prompt tokens cached")
            used = self.end.prompt_tokens + self.tokens
            parts.append(f"context {used:,}" + (f" of {context:,}" if context else ""))
        return ", ".join(parts) + ("; cut by the limit of tokens" if self.end.cut else "")


Answer = Generator[Piece | AnswerEnd, None, None]  # pieces, then one end


class ServerAnswers(ServerClient):
    """Answers of a running server, once a model of it is chosen."""

    name, context, reconnects = "", 0, False  # a context of 0 is unknown
    is_base = False  # a server has a chat template for each model

    @property
    def where(self) -> str:
        return self.url

    def list_models(self) -> list[str]:
        """List the names that `change_model` takes."""
        return [model.name for model in self.models()]

    def change_model(self, name: str) -> None:
        """Take the model of this name, or any for "". Raise ModelNotFound, with the list."""
        model = self.find_model(name)
        self.name, self.context, self.reconnects = model.name, model.context, model.reconnects

    def answer(self, messages: str | Messages, options: Options) -> Answer:
        usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        usage |= {"reconnect_s": RECONNECT_S} if self.reconnects else {}
        raw = isinstance(messages, str)
        body = {"model": self.name, "prompt" if raw else "messages": messages, **options, **usage}
        end = AnswerEnd()
        with closing(self.stream("/v1/completions" if raw else "/v1/chat/completions", body)) as events:
            for event in events:
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                        yield Piece(thought, reasoning=True)
                    if text := delta.get("content") or choice.get("text"):
                        yield Piece(text)
                    end = end._replace(cut=end.cut or choice.get("finish_reason") == "length")
                if used := event.get("usage"):
                    cached = (used.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                    end = AnswerEnd(used["prompt_tokens"], used["completion_tokens"], cached, end.cut)
        yield end


class LocalAnswers:
    """Answers of a model that is loaded for them. Its methods are those of `ServerAnswers`."""

    where = "loaded here"

    def __init__(self, config: EngineConfig, report: Callable[[str], None]) -> None:
        """Load the model, which is pulled first where it is missing. `report` takes what goes on."""
        self._report = report
        self._open(config)

    def _open(self, config: EngineConfig) -> None:
        from cllm.llm import LLM

        llm = LLM(config=config)
        self._report(f"loading {config.model or 'the embedded model'} …")
        self._llm, self._config = llm.open(), config
        self.name, self.is_base = llm.info.name, llm.info.chat_template is None
        self.context = llm.limits.request_tokens

    def list_models(self) -> list[str]:
        from cllm.models.store import scan

        return [model.name for model in scan(os.environ.get("CLLM_MODEL_DIR", ""))]

    def change_model(self, name: str) -> None:
        """Open another model in the place of this one, which is opened again where that fails."""
        config = msgspec.structs.replace(self._config, model=name)
        self._llm.close()  # memory may not suffice for both
        try:
            self._open(config)
        except CllmError:
            self._open(self._config)
            raise

    def answer(self, messages: str | Messages, options: Options) -> Answer:
        given: dict[str, Any] = {"max_tokens": self.context, **options}
        if isinstance(messages, str):
            stream = self._llm.stream(messages, **given)
            yield from map(Piece, stream)
            yield _make_end(stream)
            return
        for chunk in self._llm.chat(messages, stream=True, **given):
            if chunk.reasoning:
                yield Piece(chunk.reasoning, reasoning=True)
            if chunk.text:
                yield Piece(chunk.text)
            if chunk.reply is not None:
                yield _make_end(chunk.reply)

    def close(self) -> None:
        self._llm.close()


def _make_end(ended: TextStream | ChatReply) -> AnswerEnd:
    usage, cut = ended.usage, ended.finish_reason == "length"
    assert usage is not None
    return AnswerEnd(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, cut)


AnswerSource = ServerAnswers | LocalAnswers  # every method raises CllmError with one line


def open_source(
    model: str, url: str, config: EngineConfig, report: Callable[[str], None], *, local: bool = False
) -> AnswerSource:
    """Return the server that runs, if it has the model, else load it here. A `url` allows no other server."""
    if local:
        return LocalAnswers(config, report)
    with ExitStack() as stack:
        source = stack.enter_context(ServerAnswers(url))
        if url or source.is_running():
            try:
                source.change_model(model)
                stack.pop_all()
                return source
            except ModelNotFound as error:
                if url:
                    raise
                report(f"{error}; it is loaded here")
            except Unauthorized:
                needed = f"the server at {source.url} needs an API key: set CLLM_API_KEY"
                raise ConfigError(f"{needed}; --local loads a model here") from None
    return LocalAnswers(config, report)


class Dialog:
    """A conversation on the screen, with the source of its answers."""

    def __init__(self, source: AnswerSource, transcript: Transcript, screen: Screen) -> None:
        self.source, self.transcript, self.screen = source, transcript, screen
        self.stats: list[AnswerStats] = []  # of all answers

    def answer(self) -> bool:
        """Answer the last question. Return False if Ctrl-C stops it; the text so far is the answer then.

        Raise CllmError if it fails; the question then stays, without an answer.
        """
        stats, text, reasoning = AnswerStats(), list[str](), list[str]()
        try:
            self._read(stats, text, reasoning)
            stopped = False
        except KeyboardInterrupt:
            stopped = True
        finally:
            self.screen.end()
        self.stats.append(stats)
        if text or not stopped:
            self.transcript.messages.append(Message("assistant", "".join(text), "".join(reasoning)))
        return not stopped

    def _read(self, stats: AnswerStats, text: list[str], reasoning: list[str]) -> None:
        hidden = self.transcript.think == "hide"
        thinking = False
        self.screen.markdown = not self.transcript.raw and self.transcript.schema is None  # no JSON
        with closing(self.source.answer(self.transcript.rendered(), self.transcript.options())) as answer:
            for piece in answer:
                if isinstance(piece, AnswerEnd):
                    stats.end = piece
                    continue
                stats.see_piece()
                (reasoning if piece.reasoning else text).append(piece.text)
                if piece.reasoning and hidden:
                    self.screen.write("" if thinking else "thinking …", dim=True)
                else:
                    if thinking and not piece.reasoning:
                        self.screen.end()
                    self.screen.write(piece.text, dim=piece.reasoning)
                thinking = piece.reasoning

    def describe_last(self) -> str:
        return self.stats[-1].describe(self.source.context)
