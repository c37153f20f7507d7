"""Output stream: where the outputs of one request wait for their reader."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from cllm.types import Failure, RequestOutput, TokenLogprob

_logprobs_encoder = msgspec.msgpack.Encoder()
_logprobs_decoder = msgspec.msgpack.Decoder(tuple[TokenLogprob, ...])


@dataclass(eq=False, repr=False)
class AsyncOutputStream:
    """A request's outputs as they come: read with `async for`, or one `next` at a time, by one reader.

    The producer, on the same event loop, never blocks; what is unread is read as one output. The newest
    unread output is kept as it is; a reader that keeps up sees nothing else. Those before it are packed: as
    objects they would take fifty times the memory. The terminal output has a `finish_reason`; after it there
    is nothing.
    """

    request_id: str
    queue_position: int = 0  # when it was accepted; 0: it got a slot at once
    finished: bool = False  # the terminal output has been pushed
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None  # when it came
    generated: int = 0  # tokens
    ended: float | None = None
    _newest: RequestOutput | None = None
    _packed: PackedOutputs | None = None  # what is unread before the newest
    # A bare future: asyncio.Event would cost more than all the rest here, once a token.
    _waiter: asyncio.Future[None] | None = None

    def push(self, output: RequestOutput) -> None:
        """Add an output and wake the reader. Nothing may follow the terminal one."""
        assert not self.finished, f"request {self.request_id} has ended already"
        if self._newest is not None:
            if self._packed is None:
                self._packed = PackedOutputs()
            self._packed.add(self._newest)
        self._newest = output
        if output.tokens:
            self.generated += len(output.tokens)
            if self.first_token is None:
                self.first_token = time.perf_counter()
        if output.finish_reason is not None:
            self.finished, self.ended = True, time.perf_counter()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def unread_bytes(self) -> int:
        """The memory that unread outputs take, but for the newest."""
        return self._packed.size if self._packed is not None else 0

    @property
    def failure(self) -> Failure | None:
        """Why it failed, if that is the first thing to read."""
        return self._newest.error if self._newest is not None and self._packed is None else None

    async def next(self) -> RequestOutput:
        """All that is unread as one output, or what comes next. An error comes alone, after the text before.

        Not to be called again after the terminal output.
        """
        while self._newest is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        newest, packed, self._packed = self._newest, self._packed, None
        if packed is not None and newest.error is not None:
            return packed.unpack(RequestOutput(request_id=self.request_id))
        self._newest = None
        return newest if packed is None else packed.unpack(newest)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while True:
            output = await self.next()
            yield output
            if output.finish_reason is not None:
                return


class PackedOutputs:
    """Outputs of one request, one after the other, in little more memory than their contents."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._tokens = array("i")
        self._logprobs = bytearray()
        self._ends = array("q")  # of the parts of it, one for each output
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()  # they come once, as they are

    def add(self, output: RequestOutput) -> None:
        self._text += output.text.encode("utf-8", "surrogatepass")
        self._tokens.extend(output.tokens)
        self._prompt_logprobs += output.prompt_logprobs
        if output.logprobs:
            self._logprobs += _logprobs_encoder.encode(output.logprobs)
            self._ends.append(len(self._logprobs))

    @property
    def size(self) -> int:
        """Bytes of memory."""
        arrays = len(self._tokens) * self._tokens.itemsize + len(self._ends) * self._ends.itemsize
        return len(self._text) + len(self._logprobs) + arrays

    def unpack(self, newest: RequestOutput) -> RequestOutput:
        """All of it, and then `newest`, as one output."""
        parts = (self._logprobs[begin:end] for begin, end in pairwise((0, *self._ends)))
        logprobs = [entry for part in parts for entry in _logprobs_decoder.decode(part)]
        return msgspec.structs.replace(
            newest,
            text=self._text.decode("utf-8", "surrogatepass") + newest.text,
            tokens=(*self._tokens, *newest.tokens),
            logprobs=(*logprobs, *newest.logprobs),
            prompt_logprobs=self._prompt_logprobs + newest.prompt_logprobs,
        )
