"""Output stream: where the outputs of one request wait for their reader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import msgspec

from cllm.types import Failure, RequestOutput


class OutputStream:
    """A request's outputs as they come. The producer never blocks; what is unread is read as one output.

    Beyond `unread_limit` the stream is `overfull` and is to be ended.
    The terminal output has a `finish_reason`; after it there is nothing.
    """

    unread_limit: int | None = None  # bytes, about; None: the answer's own length is limit enough

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.queue_position = 0  # when it was accepted; 0: went to the engine at once
        self.finished = False  # the terminal output has been pushed
        self.overfull = False
        self._unread: list[RequestOutput] = []
        self._unread_bytes = 0

    def push(self, output: RequestOutput) -> None:
        """Add an output and wake the reader. Nothing may follow the terminal one."""
        assert not self.finished, f"request {self.request_id} has ended already"
        self._unread.append(output)
        self._unread_bytes += len(output.text) + 8 * len(output.tokens)
        for entry in output.logprobs:
            self._unread_bytes += 64 * (1 + len(entry.top))
        self.overfull = self.unread_limit is not None and self._unread_bytes > self.unread_limit
        self.finished = output.finish_reason is not None
        self._wake()

    @property
    def failure(self) -> Failure | None:
        """Why it failed, if that is the first thing to read."""
        return self._unread[0].error if self._unread else None

    def _take(self) -> RequestOutput:
        """All that is unread (something is) as one output. An error comes alone, after the text before it."""
        unread, self._unread = self._unread, []
        self._unread_bytes = 0
        self.overfull = False
        if len(unread) > 1 and unread[-1].error is not None:
            self._unread = [unread.pop()]
        if len(unread) == 1:
            return unread[0]
        return msgspec.structs.replace(
            unread[-1],
            text="".join(output.text for output in unread),
            tokens=tuple(token for output in unread for token in output.tokens),
            logprobs=tuple(entry for output in unread for entry in output.logprobs),
        )

    def _wake(self) -> None:
        raise NotImplementedError


class AsyncOutputStream(OutputStream):
    """Read with `async for`, or one `next` at a time, by one reader on the event loop that pushes."""

    unread_limit = 1 << 20

    # A bare future: asyncio.Event would cost more than all the rest here, once a token.
    _waiter: asyncio.Future[None] | None = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> RequestOutput:
        """All that is unread, or what comes next. Not to be called again after the terminal output."""
        while not self._unread:  # as `begun`, without another coroutine: this runs once a token
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._take()

    async def begun(self) -> None:
        """Return when there is something to read. Takes nothing."""
        while not self._unread:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while True:
            output = await self.next()
            yield output
            if output.finish_reason is not None:
                return


class BlockingOutputStream(OutputStream):
    """Read with `for`, from any one thread."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self._condition = threading.Condition()

    def push(self, output: RequestOutput) -> None:
        with self._condition:
            super().push(output)

    def _wake(self) -> None:
        self._condition.notify_all()

    def __iter__(self) -> Iterator[RequestOutput]:
        while True:
            with self._condition:
                while not self._unread:
                    self._condition.wait()
                output = self._take()
            yield output
            if output.finish_reason is not None:
                return
