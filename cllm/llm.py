"""The Python API: a model in this process, for scripts (`LLM`) and for asyncio (`AsyncLLM`).

    with LLM("model.gguf") as llm:
        print(llm.generate(["Once upon a time"], max_tokens=32)[0].text)
        print(llm.chat([{"role": "user", "content": "What is AI?"}]).text)

Requests of one call, and of several threads or tasks, are batched automatically.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal, Self, Unpack, overload

import msgspec

from cllm.backend.base import ModelRunner
from cllm.backend.llama.memory import prepare
from cllm.backend.llama.probe import find_working
from cllm.backend.llama.runner import LlamaRunner
from cllm.chat.conversation import Conversation
from cllm.chat.options import (
    ChatOptions,
    GenerateOptions,
    parse_conversation,
    parse_logprobs,
    parse_response_format,
)
from cllm.chat.reply import ChatChunk, ChatReply, ChunkBuilder
from cllm.chat.session import open_chat, open_chat_blocking
from cllm.config import EngineConfig
from cllm.errors import EngineNotReady, InvalidRequest, from_code
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream, BlockingOutputStream
from cllm.text.embeddings import to_vector
from cllm.tune.search import with_remembered
from cllm.types import (
    SEED_SPACE,
    FinishReason,
    ModelInfo,
    Pooling,
    Request,
    RequestOutput,
    SamplingParams,
    Usage,
)
from cllm.workers.engine_worker import ThreadExecutor
from cllm.workers.messages import TokenizerAnswer, TokenizeText, TokenizeTexts, TokenLists, Tokens

log = logging.getLogger(__name__)
Messages = Sequence[Mapping[str, Any]]
Sampling = SamplingParams | None
DEFAULT_MAX_TOKENS = 256
MAX_CHOICES = 64


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


def _get_chosen_settings(config: EngineConfig, settings: Mapping[str, Any]) -> frozenset[str]:
    """The fields that the caller chose: those set by name, and those that differ from the defaults."""
    defaults = EngineConfig()
    differing = {
        name for name in config.__struct_fields__ if getattr(config, name) != getattr(defaults, name)
    }
    return frozenset(differing | set(settings))


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
        config = msgspec.structs.replace(config or EngineConfig(), model=str(model), **settings)
        if make_runner is None:
            # The library is probed in a child process: if it crashes, the caller's process lives on.
            ready = find_working(prepare(config), log.info)
            ready = with_remembered(config, ready, _get_chosen_settings(config, settings))
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

    def _make_request(
        self, sampling: Sampling, options: GenerateOptions | ChatOptions, **more: Any
    ) -> Request:
        """A request without its prompt. Raises InvalidRequest."""
        max_tokens, timeout = options.get("max_tokens", DEFAULT_MAX_TOKENS), options.get("timeout")
        stop = tuple(options.get("stop", ()))
        if max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {max_tokens}: it must be at least 1", field="max_tokens")
        if not all(stop):
            raise InvalidRequest("stop: a stop string may not be empty", field="stop")
        if timeout is not None and not timeout > 0:
            raise InvalidRequest(f"timeout is {timeout}: it must be above 0 seconds", field="timeout")
        return Request(
            id=uuid.uuid4().hex,
            prompt=(),
            max_tokens=max_tokens,
            sampling=sampling or SamplingParams(seed=secrets.randbelow(SEED_SPACE)),
            stop=stop,
            timeout_s=timeout,
            **more,
        )

    def _make_chat(
        self, messages: Messages, sampling: Sampling, options: ChatOptions
    ) -> tuple[Conversation, Request, int]:
        """The arguments of `open_chat`. Raises InvalidRequest."""
        if unknown := options.keys() - ChatOptions.__annotations__.keys():
            raise TypeError(f"chat() got an unexpected keyword argument {min(unknown)!r}")
        n = options.get("n", 1)
        if not 1 <= n <= MAX_CHOICES:
            raise InvalidRequest(f"n is {n}: it must be 1 to {MAX_CHOICES}", field="n")
        request = self._make_request(
            sampling, options, logprobs=parse_logprobs(options), constraint=parse_response_format(options)
        )
        return parse_conversation(messages, options), request, n

    def _make_embed_request(self, answer: TokenizerAnswer) -> Request:
        assert isinstance(answer, TokenLists)
        if self.info.pooling is Pooling.RANK:
            raise InvalidRequest(
                "this model is a reranker and makes no embeddings, unless it is opened with "
                "pooling='mean', 'cls' or 'last'"
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
        try:
            return [_make_completion(list(stream)) for stream in streams]
        finally:
            for stream in streams:
                self._engine.cancel(stream.request_id)

    @overload
    def chat(
        self,
        messages: Messages,
        sampling: Sampling = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> ChatReply: ...

    @overload
    def chat(
        self,
        messages: Messages,
        sampling: Sampling = None,
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> Iterator[ChatChunk]: ...

    def chat(
        self,
        messages: Messages,
        sampling: Sampling = None,
        *,
        stream: bool = False,
        **options: Unpack[ChatOptions],
    ) -> ChatReply | Iterator[ChatChunk]:
        """Reply to a conversation (`[{"role": "user", "content": "…"}]`), with the model's chat template.

        The options are those of `/v1/chat/completions`: `tools`, `tool_choice`, `response_format`, `n`,
        `logprobs` and the others in `ChatOptions`. With `n` choices the reply is the first, `.choices` has
        all. With `stream=True` it comes as `ChatChunk`s, the last of which has the finished `reply`.
        """
        chunks = self._read_chat(*self._make_chat(messages, sampling, options))
        if stream:
            return chunks
        *_, last = chunks
        assert last.reply is not None
        return last.reply

    def _read_chat(self, conversation: Conversation, request: Request, n: int) -> Iterator[ChatChunk]:
        session = open_chat_blocking(self._engine, conversation, request, n)
        builder = ChunkBuilder(n)
        try:
            for step in session.events_blocking():
                yield from builder.add(*step)
            yield builder.last()
        finally:
            session.cancel()

    def stream(
        self, prompt: str | Messages, sampling: Sampling = None, **options: Unpack[GenerateOptions]
    ) -> Iterator[str]:
        """The raw text of a completion or a reply, piece by piece. Leaving the loop cancels the request."""
        if not isinstance(prompt, str):
            chunks = self.chat(prompt, sampling, stream=True, reasoning_format="none", **options)
            yield from (chunk.text for chunk in chunks if chunk.text)
            return
        stream = self._submit(prompt, sampling, options)
        try:
            for output in stream:
                _raise_error(output)
                if output.text:
                    yield output.text
        finally:
            self._engine.cancel(stream.request_id)

    def embed(self, texts: str | Sequence[str]) -> list[list[float]]:
        """An embedding of norm 1 for each text, in their order."""
        if not texts:
            return []
        request = self._make_embed_request(
            self._engine.tokenizer.submit(TokenizeTexts(_texts(texts))).result()
        )
        stream = self._engine.submit(request, BlockingOutputStream)
        try:
            return _make_vectors(list(stream))
        finally:
            self._engine.cancel(stream.request_id)

    def _submit(self, prompt: str, sampling: Sampling, options: GenerateOptions) -> BlockingOutputStream:
        request = self._make_request(sampling, options)
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
        self,
        messages: Messages,
        sampling: Sampling = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> Coroutine[Any, Any, ChatReply]: ...

    @overload
    def chat(
        self,
        messages: Messages,
        sampling: Sampling = None,
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[ChatChunk, None]: ...

    def chat(
        self,
        messages: Messages,
        sampling: Sampling = None,
        *,
        stream: bool = False,
        **options: Unpack[ChatOptions],
    ) -> Coroutine[Any, Any, ChatReply] | AsyncGenerator[ChatChunk, None]:
        """See `LLM.chat`. Await the reply; with `stream=True` iterate over the chunks, without `await`."""
        chunks = self._read_chat(*self._make_chat(messages, sampling, options))
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
        try:
            async for step in session.events():
                for chunk in builder.add(*step):
                    yield chunk
            yield builder.last()
        finally:
            session.cancel()

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
        try:
            async for output in stream:
                _raise_error(output)
                if output.text:
                    yield output.text
        finally:
            self._engine.cancel(stream.request_id)

    async def embed(self, texts: str | Sequence[str]) -> list[list[float]]:
        """See `LLM.embed`."""
        if not texts:
            return []
        tokens = await asyncio.wrap_future(self._engine.tokenizer.submit(TokenizeTexts(_texts(texts))))
        stream = self._engine.submit(self._make_embed_request(tokens), AsyncOutputStream)
        try:
            return _make_vectors([output async for output in stream])
        finally:
            self._engine.cancel(stream.request_id)

    async def _complete(self, prompt: str, sampling: Sampling, options: GenerateOptions) -> Completion:
        stream = await self._submit(prompt, sampling, options)
        try:
            return _make_completion([output async for output in stream])
        finally:
            self._engine.cancel(stream.request_id)

    async def _submit(self, prompt: str, sampling: Sampling, options: GenerateOptions) -> AsyncOutputStream:
        request = self._make_request(sampling, options)
        answer = await asyncio.wrap_future(self._engine.tokenizer.submit(TokenizeText(prompt)))
        return self._engine.submit(_set_prompt(request, answer), AsyncOutputStream)
