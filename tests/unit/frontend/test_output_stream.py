"""A stream's reader: nothing lost, unread deltas merged, a reader that gave up leaves it usable."""

from __future__ import annotations

import asyncio

import pytest

from cllm.frontend.output_stream import AsyncOutputStream, BlockingOutputStream
from cllm.types import Failure, FinishReason, RequestOutput


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


def test_two_pushes_before_the_reader_runs_wake_it_once() -> None:
    async def read() -> RequestOutput:
        stream = AsyncOutputStream("r")
        reader = asyncio.ensure_future(stream.next())
        await asyncio.sleep(0)
        stream.push(delta("a"))
        stream.push(delta("b"))
        return await reader

    assert asyncio.run(read()).text == "ab"


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
