"""Async calls on an engine: text tasks, requests submitted together, and their outputs as they come."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import msgspec

from cllm.errors import ClientGone, CllmError, EngineNotReady
from cllm.frontend.engine_client import EngineClient, StreamKind
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.frontend.request_queue import TRACE
from cllm.messages import Detokenize, EncodeMedia, TokenizerAnswer, TokenizerTask
from cllm.types import SEED_SPACE, Limits, ModelInfo, Prompt, Request, RequestOutput

WATCH_AFTER_S = 0.25  # nearly all text is tokenised before: its client need not be watched
Item = TypeVar("Item")
Result = TypeVar("Result")
AnswerKind = TypeVar("AnswerKind", bound=TokenizerAnswer)
_replace = msgspec.structs.replace
_CALLS: dict[type, str] = {Detokenize: "detokenize", EncodeMedia: "encode_media"}


def loaded(engine: EngineClient) -> tuple[ModelInfo, Limits]:
    """The model and its limits; raises EngineNotReady before the model is loaded."""
    if engine.info is None or engine.limits is None:
        raise EngineNotReady("the model is still loading")
    return engine.info, engine.limits


class Caller(NamedTuple):
    """For whom text is tokenised."""

    tenant: str = ""
    disconnected: Callable[[], Coroutine[Any, Any, None]] | None = None  # waits until the client has left


CALLER: ContextVar[Caller] = ContextVar("caller")
"""The caller of what runs in this context: a server sets it for each request."""


async def run_tokenizer(engine: EngineClient, task: TokenizerTask, kind: type[AnswerKind]) -> AnswerKind:
    """The answer of the tokenizer, or of the media worker, of the kind that the task's docstring names.

    Raises InvalidRequest, TokenizerBusy, EngineDied; ClientGone where the `CALLER` leaves meanwhile.
    """
    caller = CALLER.get(Caller())
    worker, began = engine.tokenizer, time.monotonic()
    if isinstance(task, EncodeMedia):
        assert engine.media is not None, "only a model with an mmproj is sent pictures"
        worker = engine.media
    try:
        future = worker.submit(task, caller.tenant)
        waiting = asyncio.wrap_future(future)
        try:
            await asyncio.wait((waiting,), timeout=WATCH_AFTER_S if caller.disconnected else None)
            if caller.disconnected is not None and not waiting.done():
                leaving = asyncio.ensure_future(caller.disconnected())
                await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
                leaving.cancel()
                if not waiting.done():
                    raise ClientGone("the client disconnected")
        except (asyncio.CancelledError, ClientGone):
            waiting.cancel()
            worker.abort(future)
            raise
        answer = waiting.result()
    except CllmError as error:
        engine.metrics.refused.labels(error.code).inc()
        raise
    finally:
        if (trace := TRACE.get()) is not None:
            trace.calls.append((_CALLS.get(type(task), "tokenize"), began, time.monotonic()))
    assert isinstance(answer, kind)
    return answer


def submit_all(
    engine: EngineClient, request: Request, prompts: Sequence[Prompt], count: int, kind: type[StreamKind]
) -> list[StreamKind]:
    """The streams of `count` choices for each prompt; all are accepted, or none and the refusal is raised.

    `request` gives everything but the prompt. Each choice draws with a seed of its own, so that the same call
    again draws the same.
    """
    streams: list[StreamKind] = []
    seed = request.sampling.seed or 0
    try:
        for number, prompt in enumerate(prompts):
            for index in range(count):
                sampling, choice_id = request.sampling, f"{request.id}-{number}-{index}"
                if index:
                    sampling = _replace(sampling, seed=(seed + index) % SEED_SPACE)
                choice = _replace(request, id=choice_id, prompt=prompt, sampling=sampling)
                streams.append(engine.submit(choice, kind))
    except CllmError:
        for stream in streams:
            engine.cancel(stream.request_id)
        raise
    return streams


async def merged(streams: Sequence[AsyncOutputStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The outputs of several streams as they come, each with its stream's index."""
    if len(streams) == 1:
        while True:
            output = await streams[0].next()
            yield 0, output
            if output.finish_reason is not None:
                return
    queue: asyncio.Queue[tuple[int, RequestOutput]] = asyncio.Queue(len(streams))

    async def pump(index: int, stream: AsyncOutputStream) -> None:
        async for output in stream:
            await queue.put((index, output))

    pumps = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    left = len(streams)
    try:
        while left:
            index, output = await queue.get()
            left -= output.finish_reason is not None
            yield index, output
    finally:
        for task in pumps:
            task.cancel()


# Calls from other threads -----------------------------------------------------------------------------

_LOOP_LOCK = threading.Lock()
_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}  # by process: a thread does not survive a fork


def get_loop(process: int) -> asyncio.AbstractEventLoop:
    """The event loop that runs the models of `LLM` in this process; one, however many threads ask first."""
    with _LOOP_LOCK:
        if process not in _LOOPS:
            _LOOPS[process] = asyncio.new_event_loop()
            threading.Thread(target=_LOOPS[process].run_forever, name="cllm-loop", daemon=True).start()
        return _LOOPS[process]


def wait_for_call(
    loop: asyncio.AbstractEventLoop, call: Callable[..., Awaitable[Result]], *arguments: Any, **options: Any
) -> Result:
    """Await a call on the event loop of another thread; what interrupts the wait, as Ctrl-C, cancels it."""
    left: Future[None] = Future()  # made first: Ctrl-C may come before there is a task

    async def run() -> Result:
        task = asyncio.current_task()
        assert task is not None
        left.add_done_callback(lambda _: loop.call_soon_threadsafe(task.cancel))
        return await call(*arguments, **options)

    try:
        return asyncio.run_coroutine_threadsafe(run(), loop).result()
    except BaseException:
        left.cancel()
        raise


def map_bounded(
    submit: Callable[[Item], Future[Result]], items: Iterable[Item], limit: int
) -> Iterator[Result]:
    """The results in the order of the items, `limit` of them on their way. Leaving it cancels those."""
    running: deque[Future[Result]] = deque()
    try:
        for item in items:
            running.append(submit(item))
            if len(running) >= limit:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()
