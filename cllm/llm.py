"""The Python API: a model in this process, for scripts (`LLM`) and for asyncio (`AsyncLLM`).

    with LLM("model.gguf") as llm:
        print(llm.generate(["Once upon a time"], max_tokens=32)[0].text)
        print(llm.chat([{"role": "user", "content": "What is AI?"}]).text)

Requests of one call, and of several threads or tasks, are batched automatically.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, Self, Unpack, overload

import msgspec

from cllm.backend.base import ModelRunner
from cllm.backend.llama.memory import prepare
from cllm.backend.llama.probe import find_working
from cllm.backend.llama.runner import LlamaRunner
from cllm.chat.conversation import Conversation
from cllm.chat.options import (
    GenerateOptions,
    Messages,
    Sampling,
    StreamOptions,
    WholeOptions,
    make_chat,
    make_request,
)
from cllm.chat.reply import ChatChunk, ChatReply, ChunkBuilder
from cllm.chat.session import open_chat, open_chat_blocking
from cllm.config import EngineConfig
from cllm.deprecated import renamed
from cllm.errors import EngineNotReady, InvalidRequest, from_code
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream, BlockingOutputStream, OutputStream
from cllm.text.embeddings import to_vector
from cllm.tune.search import with_remembered
from cllm.types import FinishReason, ModelInfo, Pooling, Request, RequestOutput, Usage
from cllm.workers.engine_worker import ThreadExecutor
from cllm.workers.messages import TokenizerAnswer, TokenizeText, TokenizeTexts, TokenLists, Tokens

log = logging.getLogger(__name__)


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A finished completion of a raw prompt."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage


def _make_completion(outputs: Sequence[RequestOutput]) -> Completion:
    last = outputs[-1]
    _raise_error(last)
    assert last.finish_reason is not None and last.usage is not None
    return Completion(
        text="".join(output.text for output in outputs),
        tokens=tuple(token for output in outputs for token in output.tokens),
        finish_reason=last.finish_reason,
        usage=last.usage,
    )


def _raise_error(output: RequestOutput) -> None:
    if output.error is not None:
        raise from_code(output.error.code, output.error.message)


def _make_vectors(outputs: Sequence[RequestOutput]) -> list[list[float]]:
    _raise_error(outputs[-1])
    return [to_vector(data).tolist() for data in outputs[-1].embeddings]


def _texts(texts: str | Sequence[str]) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else tuple(texts)


class _Base:
    """What `LLM` and `AsyncLLM` share: the engine in a thread, and how a call becomes a request."""

    def __init__(
        self,
        model: str | Path = "",
        *,
        config: EngineConfig | None = None,
        make_runner: Callable[[EngineConfig], ModelRunner] | None = None,
        **settings: Any,
    ) -> None:
        """Serve `model` (default: the embedded SmolLM2-135M). `settings` are fields of `EngineConfig`.

        Raises SetupError when the model cannot be served; it is loaded on entry.
        """
        settings = renamed(settings)
        config = msgspec.structs.replace(config or EngineConfig(), model=str(model), **settings)
        if make_runner is None:
            # The library is probed in a child process: if it crashes, the caller's process lives on.
            ready = find_working(prepare(config), log.info)
            defaults = msgspec.structs.asdict(EngineConfig())
            chosen = {name for name, value in defaults.items() if getattr(config, name) != value}
            ready = with_remembered(config, ready, frozenset(chosen.union(settings)))
            executor = ThreadExecutor(lambda progress: LlamaRunner(ready, progress=progress), ready)
        else:
            executor = ThreadExecutor(lambda _: make_runner(config), config)
        self._engine = EngineClient(executor, queue_size=1_000_000)

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Raises EngineNotReady before it is opened."""
        if self._engine.info is None:
            raise EngineNotReady("open it first: `with LLM(...) as llm`")
        return self._engine.info

    @contextmanager
    def _cancel_after(self, *streams: OutputStream) -> Iterator[None]:
        """Cancel requests that still run when their reader leaves."""
        try:
            yield
        finally:
            for stream in streams:
                self._engine.cancel(stream.request_id)

    def _make_embed_request(self, answer: TokenizerAnswer) -> Request:
        assert isinstance(answer, TokenLists)
        if self.info.pooling is Pooling.RANK:
            raise InvalidRequest(
                "a reranker makes no embeddings, unless opened with pooling='mean', 'cls' or 'last'"
            )
        return Request(id=uuid.uuid4().hex, prompt=(), max_tokens=0, embed=answer.lists)


def _set_prompt(request: Request, answer: TokenizerAnswer) -> Request:
    assert isinstance(answer, Tokens)
    return msgspec.structs.replace(request, prompt=answer.tokens)


class LLM(_Base):
    """A model for synchronous Python. A context manager; safe to use from several threads."""

    def __enter__(self) -> Self:
        self._engine.start()
        self._engine.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the model; calls that still run raise an error. Idempotent."""
        self._engine.stop()

    def generate(
        self, prompts: str | Sequence[str], sampling: Sampling = None, **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """Complete raw prompts, all in one batch; the results have the order of the prompts.

        A prompt that is not finished `timeout` seconds after it was accepted raises DeadlineExceeded.
        """
        streams = [self._submit(prompt, sampling, options) for prompt in _texts(prompts)]
        with self._cancel_after(*streams):
            return [_make_completion(list(stream)) for stream in streams]

    @overload
    def chat(
        self, messages: Messages, sampling: Sampling = None, **options: Unpack[WholeOptions]
    ) -> ChatReply: ...

    @overload
    def chat(
        self, messages: Messages, sampling: Sampling = None, **options: Unpack[StreamOptions]
    ) -> Iterator[ChatChunk]: ...

    def chat(
        self, messages: Messages, sampling: Sampling = None, *, stream: bool = False, **options: Any
    ) -> ChatReply | Iterator[ChatChunk]:
        """Reply to a conversation (`[{"role": "user", "content": "…"}]`), with the model's chat template.

        The options are those of `/v1/chat/completions`: `tools`, `tool_choice`, `response_format`, `n`,
        `logprobs` and the others in `ChatOptions`. With `n` choices the reply is the first, `.choices` has
        all. With `stream=True` it comes as `ChatChunk`s, the last of which has the finished `reply`.
        """
        chunks = self._read_chat(*make_chat(messages, sampling, options))
        if stream:
            return chunks
        *_, last = chunks
        assert last.reply is not None
        return last.reply

    def _read_chat(self, conversation: Conversation, request: Request, n: int) -> Iterator[ChatChunk]:
        session = open_chat_blocking(self._engine, conversation, request, n)
        builder = ChunkBuilder(n)
        with self._cancel_after(*session.streams):
            for step in session.events_blocking():
                yield from builder.add(*step)
            yield builder.last()

    def stream(
        self, prompt: str | Messages, sampling: Sampling = None, **options: Unpack[GenerateOptions]
    ) -> Iterator[str]:
        """The raw text of a completion or a reply, piece by piece. Leaving the loop cancels the request."""
        if not isinstance(prompt, str):
            chunks = self.chat(prompt, sampling, stream=True, reasoning_format="none", **options)
            yield from (chunk.text for chunk in chunks if chunk.text)
            return
        stream = self._submit(prompt, sampling, options)
        with self._cancel_after(stream):
            for output in stream:
                _raise_error(output)
                if output.text:
                    yield output.text

    def embed(self, texts: str | Sequence[str]) -> list[list[float]]:
        """An embedding of norm 1 for each text, in their order."""
        if not texts:
            return []
        tokens = self._engine.tokenizer.submit(TokenizeTexts(_texts(texts))).result()
        stream = self._engine.submit(self._make_embed_request(tokens), BlockingOutputStream)
        with self._cancel_after(stream):
            return _make_vectors(list(stream))

    def _submit(self, prompt: str, sampling: Sampling, options: GenerateOptions) -> BlockingOutputStream:
        request = make_request(sampling, options)
        answer = self._engine.tokenizer.submit(TokenizeText(prompt)).result()
        return self._engine.submit(_set_prompt(request, answer), BlockingOutputStream)


class AsyncLLM(_Base):
    """A model for asyncio. An asynchronous context manager; use it on the event loop that entered it."""

    async def __aenter__(self) -> Self:
        self._engine.deliver = asyncio.get_running_loop().call_soon_threadsafe
        self._engine.start()
        await asyncio.wrap_future(self._engine.loaded)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the model; calls that still run raise an error. Idempotent."""
        await asyncio.get_running_loop().run_in_executor(None, self._engine.stop)

    async def generate(
        self, prompts: str | Sequence[str], sampling: Sampling = None, **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """See `LLM.generate`."""
        calls = (self._complete(prompt, sampling, options) for prompt in _texts(prompts))
        return list(await asyncio.gather(*calls))

    @overload
    def chat(
        self, messages: Messages, sampling: Sampling = None, **options: Unpack[WholeOptions]
    ) -> Coroutine[Any, Any, ChatReply]: ...

    @overload
    def chat(
        self, messages: Messages, sampling: Sampling = None, **options: Unpack[StreamOptions]
    ) -> AsyncGenerator[ChatChunk, None]: ...

    def chat(
        self, messages: Messages, sampling: Sampling = None, *, stream: bool = False, **options: Any
    ) -> Coroutine[Any, Any, ChatReply] | AsyncGenerator[ChatChunk, None]:
        """See `LLM.chat`. Await the reply; with `stream=True` iterate over the chunks, without `await`."""
        chunks = self._read_chat(*make_chat(messages, sampling, options))
        return chunks if stream else self._wait_for_reply(chunks)

    async def _wait_for_reply(self, chunks: AsyncIterator[ChatChunk]) -> ChatReply:
        last = [chunk async for chunk in chunks][-1]
        assert last.reply is not None
        return last.reply

    async def _read_chat(
        self, conversation: Conversation, request: Request, n: int
    ) -> AsyncGenerator[ChatChunk, None]:
        session = await open_chat(self._engine, conversation, request, n)
        builder = ChunkBuilder(n)
        with self._cancel_after(*session.streams):
            async for step in session.events():
                for chunk in builder.add(*step):
                    yield chunk
            yield builder.last()

    async def stream(
        self, prompt: str | Messages, sampling: Sampling = None, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[str]:
        """See `LLM.stream`."""
        if not isinstance(prompt, str):
            chat = self.chat(prompt, sampling, stream=True, reasoning_format="none", **options)
            async with aclosing(chat) as chunks:
                async for chunk in chunks:
                    if chunk.text:
                        yield chunk.text
            return
        stream = await self._submit(prompt, sampling, options)
        with self._cancel_after(stream):
            async for output in stream:
                _raise_error(output)
                if output.text:
                    yield output.text

    async def embed(self, texts: str | Sequence[str]) -> list[list[float]]:
        """See `LLM.embed`."""
        if not texts:
            return []
        tokens = await asyncio.wrap_future(self._engine.tokenizer.submit(TokenizeTexts(_texts(texts))))
        stream = self._engine.submit(self._make_embed_request(tokens), AsyncOutputStream)
        with self._cancel_after(stream):
            return _make_vectors([output async for output in stream])

    async def _complete(self, prompt: str, sampling: Sampling, options: GenerateOptions) -> Completion:
        stream = await self._submit(prompt, sampling, options)
        with self._cancel_after(stream):
            return _make_completion([output async for output in stream])

    async def _submit(self, prompt: str, sampling: Sampling, options: GenerateOptions) -> AsyncOutputStream:
        request = make_request(sampling, options)
        answer = await asyncio.wrap_future(self._engine.tokenizer.submit(TokenizeText(prompt)))
        return self._engine.submit(_set_prompt(request, answer), AsyncOutputStream)
