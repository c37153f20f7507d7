"""Where one request's deltas wait for their reader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

from cllm.types import Failure, RequestOutput


class OutputStream:
    """A request's answer as it comes. The producer never blocks; a slow reader gets merged deltas.

    Whatever is unread is one delta: so what waits is bounded by the answer itself, not by how many steps
    it took, and where `unread_limit` is set by that: then the stream is `overfull` and is to be ended.
    The last delta has a `finish_reason`; after it there is nothing.
    """

    unread_limit: int | None = None  # bytes, about; None: the answer's own length is limit enough

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.queue_position = 0  # when it was accepted; 0: went to the engine at once
        self._unread_bytes = 0
        self._unread: list[RequestOutput] = []
        self.finished = False  # the last delta has been pushed

    def push(self, delta: RequestOutput) -> None:
        """Add a delta and wake the reader. Nothing may follow the last one."""
        assert not self.finished, f"request {self.request_id} has ended already"
        self._unread.append(delta)
        self._unread_bytes += _size(delta)
        self.finished = delta.finish_reason is not None
        self._wake()

    @property
    def overfull(self) -> bool:
        return self.unread_limit is not None and self._unread_bytes > self.unread_limit

    @property
    def failure(self) -> Failure | None:
        """Why it failed, if it did before anything of it was read or is there to be read."""
        return self._unread[0].error if self._unread else None

    def _take(self) -> RequestOutput | None:
        """Everything unread as one delta, or None. An error comes alone: what was said before it is kept."""
        unread, self._unread = self._unread, []
        self._unread_bytes = 0
        if len(unread) == 1:
            return unread[0]
        if len(unread) > 1 and unread[-1].error is not None:
            self._unread = [unread.pop()]
        if len(unread) <= 1:
            return unread[0] if unread else None
        last = unread[-1]
        return RequestOutput(
            request_id=self.request_id,
            text="".join(delta.text for delta in unread),
            tokens=tuple(token for delta in unread for token in delta.tokens),
            logprobs=tuple(entry for delta in unread for entry in delta.logprobs),
            finish_reason=last.finish_reason,
            usage=last.usage,
            error=last.error,
            stop=last.stop,
            vectors=last.vectors,
        )

    def _wake(self) -> None:
        raise NotImplementedError


def _size(delta: RequestOutput) -> int:
    """About how many bytes a delta waits with."""
    if not delta.logprobs:
        return len(delta.text) + 8 * len(delta.tokens)
    logprobs = sum(1 + len(entry.top) for entry in delta.logprobs)
    return len(delta.text) + 8 * len(delta.tokens) + 64 * logprobs


class AsyncOutputStream(OutputStream):
    """Read with `async for`, or one `next` at a time, by one reader on the event loop that pushes."""

    unread_limit = 1 << 20

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        # A bare future: asyncio.Event would cost more than all the rest here, once a token.
        self._waiter: asyncio.Future[None] | None = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> RequestOutput:
        """Everything unread, or what comes next. Not to be called again after the last delta."""
        while not self._unread:  # as `begun`, without another coroutine: this runs once a token
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        delta = self._take()
        assert delta is not None
        return delta

    async def begun(self) -> None:
        """Return when there is something to read. Takes nothing."""
        while not self._unread:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while True:
            delta = await self.next()
            yield delta
            if delta.finish_reason is not None:
                return


class BlockingOutputStream(OutputStream):
    """Read with `for`, from any one thread."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self._condition = threading.Condition()

    def push(self, delta: RequestOutput) -> None:
        with self._condition:
            super().push(delta)

    def _wake(self) -> None:
        self._condition.notify_all()

    def __iter__(self) -> Iterator[RequestOutput]:
        while True:
            with self._condition:
                while not self._unread:
                    self._condition.wait()
                delta = self._take()
            assert delta is not None
            yield delta
            if delta.finish_reason is not None:
                return
