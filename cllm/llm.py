"""The Python API: a model in this process, for scripts (`LLM`) and for asyncio (`AsyncLLM`).

    with LLM("model.gguf") as llm:
        print(llm.generate(["Once upon a time"], max_tokens=32)[0].text)
        print(llm.chat([{"role": "user", "content": "What is AI?"}]).text)

Requests of one call, and of several threads or tasks, are batched automatically. A model that is still open
when the interpreter exits is closed then; a forked child cannot use it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Self, TypeVar, Unpack, overload

import msgspec

from cllm.chat.conversation import Conversation
from cllm.chat.options import (
    GenerateOptions,
    Messages,
    Sampling,
    StreamOptions,
    WholeOptions,
    make_chat,
    make_request,
    new_request,
)
from cllm.chat.reply import ChatChunk, ChatReply, ChunkBuilder
from cllm.chat.session import open_chat, open_chat_blocking
from cllm.errors import InvalidRequest, from_code
from cllm.frontend.async_calls import get_choice_ids
from cllm.frontend.output_stream import AsyncOutputStream, BlockingOutputStream
from cllm.local_model import LocalModel, uninterrupted
from cllm.text.embeddings import to_vector
from cllm.types import FinishReason, ModelInfo, Pooling, Request, RequestOutput, TokenLogprob, Usage
from cllm.workers.messages import TokenizerAnswer, TokenizeText, TokenizeTexts, TokenLists, Tokens
from cllm.workers.tokenizer_queue import THREADS

Item = TypeVar("Item")


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A finished completion of a raw prompt."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's tokens, where they were asked for


def _make_completion(outputs: Sequence[RequestOutput]) -> Completion:
    last = outputs[-1]
    _raise_error(last)
    assert last.finish_reason is not None and last.usage is not None
    return Completion(
        text="".join(output.text for output in outputs),
        tokens=tuple(token for output in outputs for token in output.tokens),
        finish_reason=last.finish_reason,
        usage=last.usage,
        prompt_logprobs=tuple(entry for output in outputs for entry in output.prompt_logprobs),
    )


def _raise_error(output: RequestOutput) -> None:
    if output.error is not None:
        raise from_code(output.error.code, output.error.message)


def _make_vectors(outputs: Sequence[RequestOutput]) -> list[list[float]]:
    _raise_error(outputs[-1])
    return [to_vector(data).tolist() for data in outputs[-1].embeddings]


def _texts(texts: str | Sequence[str], field: str) -> tuple[str, ...]:
    found = (texts,) if isinstance(texts, str) else tuple(texts)
    if not all(isinstance(text, str) for text in found):
        raise InvalidRequest(f"{field}: expected a text or a sequence of texts", field)
    return found


def _make_embed_request(info: ModelInfo, answer: TokenizerAnswer) -> Request:
    assert isinstance(answer, TokenLists)
    if info.pooling is Pooling.RANK:
        raise InvalidRequest(
            "a reranker makes no embeddings, unless opened with pooling='mean', 'cls' or 'last'"
        )
    return Request(id=uuid.uuid4().hex, prompt=(), max_tokens=0, embed=answer.lists)


def _set_prompt(request: Request, answer: TokenizerAnswer) -> Request:
    assert isinstance(answer, Tokens)
    return msgspec.structs.replace(request, prompt=answer.tokens)


class TextStream(Iterator[str]):
    """The text of an answer, piece by piece. `usage` is known when it has ended."""

    def __init__(self, steps: Iterator[tuple[str, Usage | None]]) -> None:
        self._steps = steps
        self.usage: Usage | None = None

    def __next__(self) -> str:
        for text, usage in self._steps:
            self.usage = usage
            if text:
                return text
        raise StopIteration


class LLM(LocalModel):
    """A model for synchronous Python. A context manager; safe to use from several threads."""

    def __enter__(self) -> Self:
        """Load the model, once. Raises what keeps it from loading; ShuttingDown if it is closed meanwhile."""
        self._start()
        try:
            self._engine.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the model, also while it loads; calls that still run raise an error. Idempotent."""
        self._stop()

    def generate(
        self, prompts: str | Sequence[str], sampling: Sampling = None, **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """Complete raw prompts, all in one batch; the results have the order of the prompts.

        A prompt that is not finished `timeout` seconds after it was accepted raises DeadlineExceeded. When
        one raises, the others are cancelled. Without a seed in `sampling` each prompt draws its own. The
        other options are in `GenerateOptions`.
        """
        template = make_request(sampling, options, self._check_open(), "generate")
        texts = _texts(prompts, "prompts")
        requests = [new_request(template) for _ in texts]
        with self._cancel_after(*(request.id for request in requests)):
            streams = [self._submit(request, text) for request, text in zip(requests, texts, strict=True)]
            return [_make_completion(list(self._read(stream))) for stream in streams]

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
        chunks = self._read_chat(*make_chat(messages, sampling, options, self._check_open()))
        if stream:
            return chunks
        *_, last = chunks
        assert last.reply is not None
        return last.reply

    def _read_chat(self, conversation: Conversation, request: Request, n: int) -> Iterator[ChatChunk]:
        self._check_open()
        builder = ChunkBuilder(n)
        with self._cancel_after(*get_choice_ids(request.id, n)):
            session = uninterrupted(open_chat_blocking, self._engine, conversation, request, n)
            for step in self._read(session.events_blocking()):
                yield from builder.add(*step)
            yield builder.last()

    def stream(
        self, prompt: str | Messages, sampling: Sampling = None, **options: Unpack[GenerateOptions]
    ) -> TextStream:
        """The raw text of a completion or a reply, piece by piece. Leaving the loop cancels the request."""
        if not isinstance(prompt, str):
            chunks = self.chat(prompt, sampling, stream=True, reasoning_format="none", **options)
            return TextStream((chunk.text, chunk.reply.usage if chunk.reply else None) for chunk in chunks)
        return TextStream(
            self._read_text(make_request(sampling, options, self._check_open(), "stream"), prompt)
        )

    def _read_text(self, template: Request, prompt: str) -> Iterator[tuple[str, Usage | None]]:
        self._check_open()
        request = new_request(template)
        with self._cancel_after(request.id):
            for output in self._read(self._submit(request, prompt)):
                _raise_error(output)
                yield output.text, output.usage

    def embed(self, texts: str | Sequence[str]) -> list[list[float]]:
        """An embedding of norm 1 for each text, in their order."""
        self._check_open()
        if not texts:
            return []
        tokens = self._engine.tokenizer.submit(TokenizeTexts(_texts(texts, "texts"))).result()
        request = _make_embed_request(self.info, tokens)
        with self._cancel_after(request.id):
            stream = uninterrupted(self._engine.submit, request, BlockingOutputStream)
            return _make_vectors(list(self._read(stream)))

    def _submit(self, request: Request, prompt: str) -> BlockingOutputStream:
        answer = self._engine.tokenizer.submit(TokenizeText(prompt)).result()
        request = _set_prompt(request, answer)
        stream: BlockingOutputStream = uninterrupted(self._engine.submit, request, BlockingOutputStream)
        return stream

    def _read(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items of a stream. In a forked child nothing would ever follow: that is an error there."""
        for item in items:
            yield item
            self._check_process()


class AsyncLLM(LocalModel):
    """A model for asyncio. An asynchronous context manager; use it on the event loop that entered it."""

    _entry = "async with AsyncLLM(...) as llm"
    _tokenizer_threads = THREADS  # the event loop stays free

    async def __aenter__(self) -> Self:
        """See `LLM.__enter__`."""
        self._start(asyncio.get_running_loop().call_soon_threadsafe)
        try:
            await asyncio.wrap_future(self._engine.loaded)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """See `LLM.close`."""
        self._closed = True
        await asyncio.to_thread(self._stop)

    async def generate(
        self, prompts: str | Sequence[str], sampling: Sampling = None, **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """See `LLM.generate`."""
        template = make_request(sampling, options, self._check_open(), "generate")
        calls = [asyncio.ensure_future(self._complete(template, text)) for text in _texts(prompts, "prompts")]
        try:
            return list(await asyncio.gather(*calls))
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

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
        chunks = self._read_chat(*make_chat(messages, sampling, options, self._check_open()))
        return chunks if stream else self._wait_for_reply(chunks)

    async def _wait_for_reply(self, chunks: AsyncIterator[ChatChunk]) -> ChatReply:
        last = [chunk async for chunk in chunks][-1]
        assert last.reply is not None
        return last.reply

    async def _read_chat(
        self, conversation: Conversation, request: Request, n: int
    ) -> AsyncGenerator[ChatChunk, None]:
        self._check_open()
        builder = ChunkBuilder(n)
        with self._cancel_after(*get_choice_ids(request.id, n)):
            session = await open_chat(self._engine, conversation, request, n)
            async for step in session.events():
                for chunk in builder.add(*step):
                    yield chunk
            yield builder.last()

    def stream(
        self, prompt: str | Messages, sampling: Sampling = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[str, None]:
        """See `LLM.stream`."""
        if isinstance(prompt, str):
            return self._read_text(make_request(sampling, options, self._check_open(), "stream"), prompt)
        return _texts_of(self.chat(prompt, sampling, stream=True, reasoning_format="none", **options))

    async def _read_text(self, template: Request, prompt: str) -> AsyncGenerator[str, None]:
        self._check_open()
        request = new_request(template)
        with self._cancel_after(request.id):
            async for output in await self._submit(request, prompt):
                _raise_error(output)
                if output.text:
                    yield output.text

    async def embed(self, texts: str | Sequence[str]) -> list[list[float]]:
        """See `LLM.embed`."""
        self._check_open()
        if not texts:
            return []
        task = TokenizeTexts(_texts(texts, "texts"))
        request = _make_embed_request(
            self.info, await asyncio.wrap_future(self._engine.tokenizer.submit(task))
        )
        with self._cancel_after(request.id):
            return _make_vectors([output async for output in self._engine.submit(request, AsyncOutputStream)])

    async def _complete(self, template: Request, prompt: str) -> Completion:
        request = new_request(template)
        with self._cancel_after(request.id):
            return _make_completion([output async for output in await self._submit(request, prompt)])

    async def _submit(self, request: Request, prompt: str) -> AsyncOutputStream:
        answer = await asyncio.wrap_future(self._engine.tokenizer.submit(TokenizeText(prompt)))
        return self._engine.submit(_set_prompt(request, answer), AsyncOutputStream)


async def _texts_of(chat: AsyncGenerator[ChatChunk, None]) -> AsyncGenerator[str, None]:
    async with aclosing(chat) as chunks:
        async for chunk in chunks:
            if chunk.text:
                yield chunk.text
