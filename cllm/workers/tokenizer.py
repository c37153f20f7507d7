"""Native text work as messages, so that it can run where it may be killed (law 8)."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import msgspec

from cllm.errors import CllmError, ContextLengthExceeded
from cllm.text.chat_template import ChatTemplate, Guard
from cllm.text.prompt import Gap, PromptBuilder, infill_prompt
from cllm.text.structured_output import GrammarCompiler
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


class TokenizeInfill(msgspec.Struct, frozen=True, tag=True):
    """A text with a gap; answered with Tokens, as above. With `room`, what does not fit there is cut away."""

    gap: Gap
    most: int = 0
    room: int = 0


class RenderChat(msgspec.Struct, frozen=True, tag=True):
    """What the chat template makes of a conversation; answered with Text."""

    chat: Chat


class Detokenize(msgspec.Struct, frozen=True, tag=True):
    """Token ids back to text; answered with Text."""

    tokens: tuple[int, ...]


class CheckConstraint(msgspec.Struct, frozen=True, tag=True):
    """Does this grammar compile? Answered with Text (empty)."""

    spec: ConstraintSpec


class TokenizeTexts(msgspec.Struct, frozen=True, tag=True):
    """Texts to embed; answered with TokenLists. One of more than `most` tokens is refused (0: no limit)."""

    texts: tuple[str, ...]
    most: int = 0
    field: str = "input"  # where they came from, for a refusal


class TokenizePairs(msgspec.Struct, frozen=True, tag=True):
    """A query with each document, as a reranker reads them; answered with TokenLists, as above."""

    query: str
    documents: tuple[str, ...]
    most: int = 0


class Tokens(msgspec.Struct, frozen=True, tag=True):
    tokens: tuple[int, ...]
    thinking: bool = False  # they end inside the model's thoughts


class TokenLists(msgspec.Struct, frozen=True, tag=True):
    lists: tuple[tuple[int, ...], ...]


class Text(msgspec.Struct, frozen=True, tag=True):
    text: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    code: str
    message: str
    field: str | None = None


TokenizerTask = (
    TokenizeText
    | TokenizeChat
    | TokenizeInfill
    | TokenizeTexts
    | TokenizePairs
    | RenderChat
    | Detokenize
    | CheckConstraint
)
TokenizerAnswer = Tokens | TokenLists | Text | Refused


class Numbered(msgspec.Struct, frozen=True):
    """A task on its way to the text process."""

    number: int
    task: TokenizerTask


class NumberedAnswer(msgspec.Struct, frozen=True, tag=True):
    number: int
    answer: TokenizerAnswer


class TokenizerWorker:
    """Does text tasks for one model. Safe from several threads."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: str | None,
        guard: Guard = nullcontext,
        *,
        tool_template: str | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        templates = (ChatTemplate(source, guard) if source else None for source in (template, tool_template))
        self._prompts = PromptBuilder(vocabulary, *templates)
        self._lock = threading.Lock()

    @cached_property
    def _constraints(self) -> GrammarCompiler:
        return GrammarCompiler(self._vocabulary)  # takes half a second: only where it is needed

    def perform(self, task: TokenizerTask) -> TokenizerAnswer:
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
                case TokenizeInfill(gap, most, room):
                    return _within(infill_prompt(self._vocabulary, gap, room), most)
                case TokenizeTexts(texts, most, field):
                    tokenize = self._vocabulary.tokenize
                    inputs = (tokenize(text, add_special=True, parse_special=False) for text in texts)
                    return _all_within(inputs, most, field)
                case TokenizePairs(query, documents, most):
                    pairs = (self._vocabulary.tokenize_pair(query, document) for document in documents)
                    return _all_within(pairs, most, "documents")
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


def _all_within(inputs: Iterable[list[int]], most: int, field: str) -> TokenLists:
    lists: list[tuple[int, ...]] = []
    for index, tokens in enumerate(inputs):
        if most and len(tokens) > most:
            raise ContextLengthExceeded.of_input(index, len(tokens), most, field)
        lists.append(tuple(tokens))
    return TokenLists(tuple(lists))
