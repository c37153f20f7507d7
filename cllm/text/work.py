"""Native text work as messages, so that it can run where it may be killed (law 8)."""

from __future__ import annotations

from typing import Any

import msgspec

from cllm.errors import CllmError
from cllm.text.prompt import PromptBuilder
from cllm.types import Vocabulary


class TokenizeText(msgspec.Struct, frozen=True, tag=True):
    """A raw prompt; answered with Tokens."""

    text: str


class TokenizeChat(msgspec.Struct, frozen=True, tag=True):
    """Messages through the chat template; answered with Tokens."""

    messages: tuple[dict[str, Any], ...]


class Detokenize(msgspec.Struct, frozen=True, tag=True):
    """Token ids back to text; answered with Text."""

    tokens: tuple[int, ...]


class Tokens(msgspec.Struct, frozen=True, tag=True):
    tokens: tuple[int, ...]


class Text(msgspec.Struct, frozen=True, tag=True):
    text: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    code: str
    message: str
    field: str | None = None


TextTask = TokenizeText | TokenizeChat | Detokenize
TextAnswer = Tokens | Text | Refused


class Numbered(msgspec.Struct, frozen=True):
    """A task on its way to the text process."""

    number: int
    task: TextTask


class NumberedAnswer(msgspec.Struct, frozen=True):
    number: int
    answer: TextAnswer


def perform(task: TextTask, vocabulary: Vocabulary, prompts: PromptBuilder) -> TextAnswer:
    """Do a task; what is wrong with it comes back as Refused, never as an exception."""
    try:
        match task:
            case TokenizeText(text):
                return Tokens(tuple(prompts.from_text(text)))
            case TokenizeChat(messages):
                return Tokens(tuple(prompts.from_messages(messages)))
            case Detokenize(tokens):
                return Text(b"".join(map(vocabulary.piece, tokens)).decode("utf-8", "replace"))
    except CllmError as error:
        return Refused(error.code, error.message, getattr(error, "field", None))
