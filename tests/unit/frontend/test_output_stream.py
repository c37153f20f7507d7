"""A stream's reader: nothing lost, unread deltas merged, a reader that gave up leaves it usable."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest

from cllm.frontend.output_stream import AsyncOutputStream
from cllm.types import Failure, FinishReason, RequestOutput, TokenLogprob
from tests.driver.thread_engine import BlockingOutputStream


def delta(text: str, reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(request_id="r", text=text, finish_reason=reason)


def test_what_is_unread_is_one_delta() -> None:
    async def read() -> list[str]:
        stream = AsyncOutputStream("r")
        stream.push(delta("a"))
        stream.push(delta("b"))
        stream.push(delta("c", FinishReason.STOP))
        return [each.text async for each in stream]

    assert asyncio.run(read()) == ["abc"]


def test_a_waiting_reader_is_woken_by_each_push() -> None:
    async def read() -> list[str]:
        stream = AsyncOutputStream("r")

        async def produce() -> None:
            for text in "xyz":
                stream.push(delta(text))
                await asyncio.sleep(0.01)
            stream.push(delta("", FinishReason.LENGTH))

        producer = asyncio.ensure_future(produce())
        texts = [each.text async for each in stream]
        await producer
        return texts

    assert asyncio.run(read()) == ["x", "y", "z", ""]


def test_a_cancelled_reader_loses_nothing() -> None:
    async def read() -> RequestOutput:
        stream = AsyncOutputStream("r")
        reader = asyncio.ensure_future(stream.next())
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        stream.push(delta("kept"))
        return await stream.next()

    assert asyncio.run(read()).text == "kept"


def test_what_was_said_before_an_error_is_told_first() -> None:
    failed = RequestOutput(request_id="r", finish_reason=FinishReason.ERROR, error=Failure("bad_batch", "no"))

    async def read() -> list[RequestOutput]:
        stream = AsyncOutputStream("r")
        for each in (delta("a"), delta("b"), failed):
            stream.push(each)
        return [each async for each in stream]

    blocking = BlockingOutputStream("r")
    for each in (delta("a"), delta("b"), failed):
        blocking.push(each)
    for deltas in (asyncio.run(read()), list(blocking)):
        assert [each.text for each in deltas] == ["ab", ""] and deltas[-1].error == failed.error


ATTEMPTS = 3  # threads that other tests left behind may allocate meanwhile


def plain(number: int) -> RequestOutput:
    return RequestOutput(request_id="r" * 36, text=" word", tokens=(1000 + number,))


def long_text(number: int) -> RequestOutput:
    return RequestOutput(request_id="r" * 36, text=f"{number} träumt 夢 " * 20, tokens=(1000 + number,) * 40)


def with_logprobs(number: int) -> RequestOutput:
    top = tuple((1000 + number + place, -place / 7 - number) for place in range(20))
    pieces = tuple(b" piece%d" % place for place in range(21))
    entry = TokenLogprob(1000 + number, -0.25 - number, top, pieces)
    return RequestOutput(request_id="r" * 36, text=" word", tokens=(1000 + number,), logprobs=(entry,))


@pytest.mark.parametrize(("make", "count"), [(plain, 10_000), (long_text, 1000), (with_logprobs, 1000)])
def test_what_is_unread_takes_the_memory_that_is_counted(
    make: Callable[[int], RequestOutput], count: int
) -> None:
    """Outputs come decoded from a socket: each is made of objects of its own."""
    frames = [msgspec.msgpack.encode(make(number)) for number in range(count)]
    decoder = msgspec.msgpack.Decoder(RequestOutput)
    for _ in range(ATTEMPTS):
        stream = BlockingOutputStream("r")
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for frame in frames:
                stream.push(decoder.decode(frame))
            gc.collect()  # it empties the interpreter's lists of free objects
            taken = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        if stream.unread_bytes == pytest.approx(taken, rel=0.2):
            break
    assert stream.unread_bytes == pytest.approx(taken, rel=0.2)
    stream.push(delta("", FinishReason.STOP))
    (read,) = stream
    made = [make(number) for number in range(count)]
    assert read.text == "".join(each.text for each in made)
    assert read.tokens == tuple(token for each in made for token in each.tokens)
    assert read.logprobs == tuple(entry for each in made for entry in each.logprobs)
    assert stream.unread_bytes == 0
