"""Where one request's deltas wait for their reader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

from cllm.types import Delta


class Stream:
    """A request's answer as it comes. The producer never blocks; a slow reader gets merged deltas.

    Whatever is unread is one delta: so what waits is bounded by the answer itself, not by how many steps
    it took. The last delta has a `finish_reason`; after it there is nothing.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._unread: list[Delta] = []
        self.finished = False  # the last delta has been pushed

    def push(self, delta: Delta) -> None:
        """Add a delta and wake the reader. Nothing may follow the last one."""
        assert not self.finished, f"request {self.request_id} has ended already"
        self._unread.append(delta)
        self.finished = delta.finish_reason is not None
        self._wake()

    def _take(self) -> Delta | None:
        """Everything unread as one delta, or None. An error comes alone: what was said before it is kept."""
        unread, self._unread = self._unread, []
        if len(unread) > 1 and unread[-1].error is not None:
            self._unread = [unread.pop()]
        if len(unread) <= 1:
            return unread[0] if unread else None
        last = unread[-1]
        return Delta(
            request_id=self.request_id,
            text="".join(delta.text for delta in unread),
            tokens=tuple(token for delta in unread for token in delta.tokens),
            logprobs=tuple(entry for delta in unread for entry in delta.logprobs),
            finish_reason=last.finish_reason,
            usage=last.usage,
            error=last.error,
            stop=last.stop,
        )

    def _wake(self) -> None:
        raise NotImplementedError


class AsyncStream(Stream):
    """Read with `async for`, or one `next` at a time, by one reader on the event loop that pushes."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        # A bare future: asyncio.Event would cost more than all the rest here, once a token.
        self._waiter: asyncio.Future[None] | None = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> Delta:
        """Everything unread, or what comes next. Not to be called again after the last delta."""
        while (delta := self._take()) is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return delta

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            delta = await self.next()
            yield delta
            if delta.finish_reason is not None:
                return


class BlockingStream(Stream):
    """Read with `for`, from any one thread."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self._condition = threading.Condition()

    def push(self, delta: Delta) -> None:
        with self._condition:
            super().push(delta)

    def _wake(self) -> None:
        self._condition.notify_all()

    def __iter__(self) -> Iterator[Delta]:
        while True:
            with self._condition:
                while not self._unread:
                    self._condition.wait()
                delta = self._take()
            assert delta is not None
            yield delta
            if delta.finish_reason is not None:
                return
