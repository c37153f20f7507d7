"""Reply to a conversation: blocks of reasoning, text and tool calls, built while the output arrives."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

import msgspec

from cllm.text.output_parser import (
    ContentText,
    OutputEvent,
    OutputParser,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from cllm.types import FinishReason, RequestOutput, TokenLogprob, Usage


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call of a reply; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    """A finished reply. With `n` choices it is the first of them."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]  # of every token, where they were asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's tokens, where they were asked for
    finish_reason: FinishReason
    usage: Usage
    others: tuple[ChatReply, ...] = ()

    @property
    def choices(self) -> tuple[ChatReply, ...]:
        """All `n` choices, this one included."""
        return (self, *self.others)


class BlockKind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    TOOL_CALL = "tool call"


_KINDS: dict[type[OutputEvent], BlockKind] = {
    ReasoningText: BlockKind.REASONING,
    ContentText: BlockKind.TEXT,
    ToolCallArguments: BlockKind.TOOL_CALL,
}


class Block(msgspec.Struct):
    """One block of a reply. Its text is reasoning, content, or the arguments of a call (JSON text)."""

    index: int
    kind: BlockKind
    id: str  # hexadecimal digits; each API adds its own prefix
    name: str = ""  # of the called tool
    call: int = 0  # of a call: how many came before it
    pieces: list[str] = []
    logprobs: list[TokenLogprob] = []  # of content, where they were asked for
    cut: bool = False  # ended by the length limit

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def as_tool_call(self, arguments: str | None = None) -> ToolCall:
        return ToolCall(f"call_{self.id}", self.name, self.text if arguments is None else arguments)


class BlockStart(msgspec.Struct, frozen=True):
    block: Block


class BlockDelta(msgspec.Struct, frozen=True):
    block: Block
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class BlockEnd(msgspec.Struct, frozen=True):
    block: Block


BlockEvent = BlockStart | BlockDelta | BlockEnd


class ReplyBuilder:
    """Accumulates one reply. At most one block is open, and each block that starts also ends.

    A finished reply has at least one block: an empty one has an empty text. Without a parser all is text.
    """

    def __init__(self, parser: OutputParser | None = None, outputs: Iterable[RequestOutput] = ()) -> None:
        self._parser = parser
        self.blocks: list[Block] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.stop: str | None = None
        self.usage: Usage | None = None
        self.reasoning_tokens = 0  # all tokens of a step count as the block that the step ends in
        self._open: Block | None = None
        self._held: list[TokenLogprob] = []  # of tokens whose text the parser holds back
        for output in outputs:
            self.add(output)

    def join(self, kind: BlockKind) -> str:
        """The text of all blocks of one kind."""
        return "".join(block.text for block in self.blocks if block.kind is kind)

    @property
    def tool_calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind is BlockKind.TOOL_CALL]

    def reply(self, others: Sequence[ChatReply] = ()) -> ChatReply:
        """The finished reply."""
        assert self.finish_reason is not None and self.usage is not None
        return ChatReply(
            text=self.join(BlockKind.TEXT),
            reasoning=self.join(BlockKind.REASONING),
            tool_calls=tuple(block.as_tool_call() for block in self.tool_calls),
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs),
            finish_reason=self.finish_reason,
            usage=self.usage,
            others=tuple(others),
        )

    def add(self, output: RequestOutput) -> list[BlockEvent]:
        """Add a step's output; the last one ends the open block."""
        events = self._parse(output)
        self.tokens += output.tokens
        plain = output.finish_reason is None and not output.logprobs and not output.prompt_logprobs
        if plain and len(events) == 1 and self._open is not None and self._open.kind is BlockKind.TEXT:
            event = events[0]
            if type(event) is ContentText and not self._held:  # nearly every step of an answer
                self._open.pieces.append(event.text)
                return [BlockDelta(self._open, event.text)]
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self._held += output.logprobs
        contents = [place for place, event in enumerate(events) if isinstance(event, ContentText)]
        changes: list[BlockEvent] = []
        for place, event in enumerate(events):
            logprobs: tuple[TokenLogprob, ...] = ()
            if contents and place == contents[-1]:
                logprobs, self._held = tuple(self._held), []
            changes += self._add_event(event, logprobs)
        if self._open is not None and self._open.kind is not BlockKind.TEXT:
            self._held = []  # blocks have log-probabilities of content only
            if self._open.kind is BlockKind.REASONING:
                self.reasoning_tokens += len(output.tokens)
        if output.finish_reason is not None:
            changes += self._finish(output)
        return changes

    def _parse(self, output: RequestOutput) -> list[OutputEvent]:
        if self._parser is None:
            return [ContentText(output.text)] if output.text else []
        events = self._parser.feed(output.text) if output.text else []
        if output.finish_reason is None:
            return events
        return events + self._parser.finish(cut=output.finish_reason is not FinishReason.STOP)

    def _add_event(self, event: OutputEvent, logprobs: tuple[TokenLogprob, ...]) -> list[BlockEvent]:
        if isinstance(event, ToolCallStart):
            return [*self._end(), self._start(BlockKind.TOOL_CALL, event.name)]
        kind = _KINDS[type(event)]
        changes: list[BlockEvent] = []
        if self._open is None or self._open.kind is not kind:
            changes = [*self._end(), self._start(kind)]
        block = self.blocks[-1]
        block.pieces.append(event.text)
        block.logprobs += logprobs
        return [*changes, BlockDelta(block, event.text, logprobs)]

    def _finish(self, output: RequestOutput) -> list[BlockEvent]:
        self.finish_reason, self.stop, self.usage = output.finish_reason, output.stop, output.usage
        if output.error is not None:
            return []  # the reply failed: an open block stays open
        changes: list[BlockEvent] = [] if self.blocks else [self._start(BlockKind.TEXT)]
        if self._open is not None:
            self._open.cut = output.finish_reason is not FinishReason.STOP
            self._open.logprobs += self._held
        return changes + self._end()

    def _start(self, kind: BlockKind, name: str = "") -> BlockEvent:
        self._open = Block(len(self.blocks), kind, secrets.token_hex(12), name, len(self.tool_calls))
        self.blocks.append(self._open)
        return BlockStart(self._open)

    def _end(self) -> list[BlockEvent]:
        ended, self._open = self._open, None
        return [] if ended is None else [BlockEnd(ended)]


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a streamed reply: of its text, reasoning or a tool call. The last one has the `reply`."""

    choice: int = 0  # which of the n choices
    text: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None  # id and name of the call, and only the new part of its arguments
    reply: ChatReply | None = None


def make_chunks(choice: int, changes: Iterable[BlockEvent]) -> Iterator[ChatChunk]:
    """The chunks of a step."""
    for change in changes:
        block, text = change.block, change.text if isinstance(change, BlockDelta) else ""
        if block.kind is BlockKind.TOOL_CALL:
            if not isinstance(change, BlockEnd):
                yield ChatChunk(choice=choice, tool_call=block.as_tool_call(text))
        elif text and block.kind is BlockKind.TEXT:
            yield ChatChunk(choice=choice, text=text)
        elif text:
            yield ChatChunk(choice=choice, reasoning=text)
