"""An answer as blocks, one after another: thoughts, words, calls. So two of the APIs see it."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from enum import Enum
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cllm.chat.conversation import ChatJob, Step
from cllm.server.sse import GONE, EventStream, encode_named
from cllm.text.output_parser import ContentText, OutputEvent, ReasoningText, ToolCallArguments, ToolCallStart
from cllm.types import FinishReason, RequestOutput, TokenLogprob, Usage


class BlockKind(Enum):
    THOUGHTS = "thoughts"
    WORDS = "words"
    CALL = "call"


class Block(msgspec.Struct):
    """One block. Its pieces are what was thought, said, or written as arguments (JSON text)."""

    index: int
    kind: BlockKind
    id: str  # letters and digits; each API puts its own prefix before it
    name: str = ""  # of the tool that is called
    pieces: list[str] = []
    logprobs: list[TokenLogprob] = []  # of words, where they were asked for
    cut: bool = False  # the answer's length ended it

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Begun(msgspec.Struct, frozen=True):
    block: Block


class Grew(msgspec.Struct, frozen=True):
    block: Block
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class Ended(msgspec.Struct, frozen=True):
    block: Block


BlockEvent = Begun | Grew | Ended


class Blocks:
    """Puts the events of one answer in order: at most one block is open, and every one that begins ends.

    A finished answer has at least one block: who said nothing said an empty text.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.finish_reason: FinishReason | None = None
        self.stop: str | None = None
        self.usage: Usage | None = None
        self.thought_tokens = 0  # a step's tokens count as what the step ended with
        self._open: Block | None = None
        self._waiting: list[TokenLogprob] = []  # of tokens whose text is still held back

    @property
    def called(self) -> bool:
        """At least one tool was called."""
        return any(block.kind is BlockKind.CALL for block in self.blocks)

    def add(self, events: Sequence[OutputEvent], delta: RequestOutput) -> list[BlockEvent]:
        """Take in a step; the last one ends what is open."""
        self._waiting += delta.logprobs
        words = [place for place, event in enumerate(events) if isinstance(event, ContentText)]
        happened: list[BlockEvent] = []
        for place, event in enumerate(events):
            logprobs: tuple[TokenLogprob, ...] = ()
            if words and place == words[-1]:
                logprobs, self._waiting = tuple(self._waiting), []
            happened += self._take(event, logprobs)
        if self._open is not None and self._open.kind is not BlockKind.WORDS:
            self._waiting = []  # nobody asks how likely thoughts and calls were
            if self._open.kind is BlockKind.THOUGHTS:
                self.thought_tokens += len(delta.tokens)
        if delta.finish_reason is not None:
            happened += self._finish(delta)
        return happened

    def _take(self, event: OutputEvent, logprobs: tuple[TokenLogprob, ...]) -> list[BlockEvent]:
        match event:
            case ReasoningText(text):
                return [*self._opened(BlockKind.THOUGHTS), self._grown(text)]
            case ContentText(text):
                return [*self._opened(BlockKind.WORDS), self._grown(text, logprobs)]
            case ToolCallStart(_, name):
                return [*self._closed(), self._begun(BlockKind.CALL, name)]
            case ToolCallArguments(_, text):
                assert self._open is not None and self._open.kind is BlockKind.CALL
                return [self._grown(text)]

    def _finish(self, delta: RequestOutput) -> list[BlockEvent]:
        self.finish_reason, self.stop, self.usage = delta.finish_reason, delta.stop, delta.usage
        if delta.error is not None:
            return []  # what is open stays so: the answer failed
        happened: list[BlockEvent] = [] if self.blocks else [self._begun(BlockKind.WORDS)]
        if self._open is not None:
            self._open.cut = delta.finish_reason is not FinishReason.STOP
            self._open.logprobs += self._waiting
        return happened + self._closed()

    def _opened(self, kind: BlockKind) -> list[BlockEvent]:
        """Make sure that a block of this kind is open."""
        if self._open is not None and self._open.kind is kind:
            return []
        return [*self._closed(), self._begun(kind)]

    def _begun(self, kind: BlockKind, name: str = "") -> BlockEvent:
        self._open = Block(len(self.blocks), kind, secrets.token_hex(12), name)
        self.blocks.append(self._open)
        return Begun(self._open)

    def _grown(self, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> BlockEvent:
        assert self._open is not None
        self._open.pieces.append(text)
        self._open.logprobs += logprobs
        return Grew(self._open, text, logprobs)

    def _closed(self) -> list[BlockEvent]:
        closed, self._open = self._open, None
        return [] if closed is None else [Ended(closed)]


Event = dict[str, Any]


class BlockAnswer(ABC):
    """One answer, built while it comes. A whole one is what the events of a streamed one add up to."""

    def __init__(self) -> None:
        self._blocks = Blocks()

    @abstractmethod
    def start(self) -> list[Event]:
        """The events before anything was generated."""

    @abstractmethod
    def add(self, events: Sequence[OutputEvent], delta: RequestOutput) -> list[Event]:
        """Take in a step; returns its events in order."""

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """The answer as far as it has come."""

    def whole(self, steps: Sequence[Step]) -> dict[str, Any]:
        """The answer to a call that does not stream."""
        for events, delta in steps:
            self._blocks.add(events, delta)
        return self.body()

    async def chunks(self, job: ChatJob) -> AsyncIterator[bytes]:
        """The events as bytes, as they come."""
        yield _encoded(self.start())
        async for _, events, delta in job.events():
            if told := self.add(events, delta):
                yield _encoded(told)

    async def to(self, http: Request, job: ChatJob, *, stream: bool) -> Response | dict[str, Any]:
        """The answer to a call, as it asked for it."""
        if stream:
            return EventStream(job.engine, job.streams, self.chunks(job))
        answers = await job.steps(http)
        return Response(status_code=GONE) if answers is None else self.whole(answers[0])


def _encoded(events: Sequence[Event]) -> bytes:
    return b"".join(encode_named(event["type"], event) for event in events)
