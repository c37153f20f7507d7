"""Native text work as messages, so that it can run where it may be killed (law 8)."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any

import msgspec

from cllm.errors import CllmError, ContextLengthExceeded
from cllm.text.constraint import ConstraintCompiler
from cllm.text.prompt import PromptBuilder
from cllm.types import ConstraintSpec, Vocabulary


class TokenizeText(msgspec.Struct, frozen=True, tag=True):
    """A raw prompt; answered with Tokens. One of more than `most` tokens is refused here (0: no limit)."""

    text: str
    most: int = 0
    add_special: bool = True
    parse_special: bool = False  # True only where the client is trusted to write control tokens


class Chat(msgspec.Struct, frozen=True):
    """A conversation as the chat template takes it; see `PromptBuilder.from_messages`."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    options: dict[str, Any] = {}
    opening: str = ""
    prefill: str = ""
    think: bool = True


class TokenizeChat(msgspec.Struct, frozen=True, tag=True):
    """A conversation through the chat template; answered with Tokens, as above."""

    chat: Chat
    most: int = 0


class RenderChat(msgspec.Struct, frozen=True, tag=True):
    """What the chat template makes of a conversation; answered with Text."""

    chat: Chat


class Detokenize(msgspec.Struct, frozen=True, tag=True):
    """Token ids back to text; answered with Text."""

    tokens: tuple[int, ...]


class CheckConstraint(msgspec.Struct, frozen=True, tag=True):
    """Does this grammar compile? Answered with Text (empty)."""

    spec: ConstraintSpec


class Tokens(msgspec.Struct, frozen=True, tag=True):
    tokens: tuple[int, ...]
    thinking: bool = False  # they end inside the model's thoughts


class Text(msgspec.Struct, frozen=True, tag=True):
    text: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    code: str
    message: str
    field: str | None = None


TextTask = TokenizeText | TokenizeChat | RenderChat | Detokenize | CheckConstraint
TextAnswer = Tokens | Text | Refused


class Numbered(msgspec.Struct, frozen=True):
    """A task on its way to the text process."""

    number: int
    task: TextTask


class NumberedAnswer(msgspec.Struct, frozen=True, tag=True):
    number: int
    answer: TextAnswer


class TextWorker:
    """Does text tasks for one model. Safe from several threads."""

    def __init__(self, vocabulary: Vocabulary, template: str | None) -> None:
        self._vocabulary = vocabulary
        self._prompts = PromptBuilder(vocabulary, template)
        self._lock = threading.Lock()

    @cached_property
    def _constraints(self) -> ConstraintCompiler:
        return ConstraintCompiler(self._vocabulary)  # takes half a second: only where it is needed

    def perform(self, task: TextTask) -> TextAnswer:
        """Do a task; what is wrong with it comes back as Refused, never as an exception."""
        try:
            match task:
                case TokenizeText(text, most, add_special, parse_special):
                    tokens = self._vocabulary.tokenize(
                        text, add_special=add_special, parse_special=parse_special
                    )
                    return _within(tokens, most)
                case RenderChat(chat):
                    rendered = self._prompts.render(chat.messages, tools=chat.tools, options=chat.options)
                    return Text(rendered + chat.opening + chat.prefill)
                case TokenizeChat(chat, most):
                    prompt = self._prompts.from_messages(
                        chat.messages,
                        tools=chat.tools,
                        options=chat.options,
                        opening=chat.opening,
                        prefill=chat.prefill,
                        think=chat.think,
                    )
                    return _within(prompt.tokens, most, thinking=prompt.thinking)
                case Detokenize(tokens):
                    pieces = map(self._vocabulary.piece, tokens)
                    return Text(b"".join(pieces).decode("utf-8", "replace"))
                case CheckConstraint(spec):
                    with self._lock:
                        self._constraints.compile(spec).mask()
                    return Text("")
        except CllmError as error:
            return Refused(error.code, error.message, getattr(error, "field", None))


def _within(tokens: list[int], most: int, *, thinking: bool = False) -> Tokens:
    """Millions of tokens that are refused anyway need not cross to the parent."""
    if most and len(tokens) > most:
        raise ContextLengthExceeded(len(tokens), most)
    return Tokens(tuple(tokens), thinking)
