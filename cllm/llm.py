"""The Python API: a model in this process, for scripts (`LLM`) and for asyncio (`AsyncLLM`).

    with LLM("model.gguf") as llm:
        print(llm.generate(["Once upon a time"], max_tokens=32)[0].text)

Requests given together are computed together: there is nothing to batch by hand.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import msgspec

from cllm.backend.base import ModelRunner
from cllm.backend.llama.memory import prepare
from cllm.backend.llama.probe import find_working
from cllm.backend.llama.runner import LlamaRunner
from cllm.config import EngineConfig
from cllm.errors import EngineNotReady, InvalidRequest, from_code
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream, BlockingOutputStream
from cllm.text.embeddings import to_vector
from cllm.tune.session import with_remembered
from cllm.types import FinishReason, ModelInfo, Pooling, Request, RequestOutput, SamplingParams, Usage
from cllm.workers.engine_worker import ThreadExecutor
from cllm.workers.messages import (
    Chat,
    TokenizeChat,
    TokenizerAnswer,
    TokenizerTask,
    TokenizeText,
    TokenizeTexts,
    TokenLists,
    Tokens,
)

log = logging.getLogger(__name__)
Message = Mapping[str, Any]
DEFAULT_MAX_TOKENS = 256


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A finished answer."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage


class _Asked(msgspec.Struct, frozen=True):
    """What a call says besides its prompt. Raises InvalidRequest for what cannot be."""

    sampling: SamplingParams | None
    max_tokens: int
    stop: Sequence[str]
    timeout: float | None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            told = f"max_tokens is {self.max_tokens}: it must be at least 1"
            raise InvalidRequest(told, field="max_tokens")
        if not all(self.stop):
            raise InvalidRequest("stop: a stop string may not be empty", field="stop")
        if self.timeout is not None and not self.timeout > 0:
            told = f"timeout is {self.timeout}: it must be above 0 seconds"
            raise InvalidRequest(told, field="timeout")


def _completion(deltas: Sequence[RequestOutput]) -> Completion:
    last = deltas[-1]
    _raise_error(last)
    assert last.finish_reason is not None and last.usage is not None
    return Completion(
        text="".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        finish_reason=last.finish_reason,
        usage=last.usage,
    )


def _given(config: EngineConfig, settings: Mapping[str, Any]) -> frozenset[str]:
    """What the caller decided: fields set by name, and those of a configuration that are not the default."""
    defaults = EngineConfig()
    differing = {
        name for name in config.__struct_fields__ if getattr(config, name) != getattr(defaults, name)
    }
    return frozenset(differing | set(settings))


def _raise_error(delta: RequestOutput) -> None:
    if delta.error is not None:
        raise from_code(delta.error.code, delta.error.message)


def _vectors(deltas: Sequence[RequestOutput]) -> list[list[float]]:
    _raise_error(deltas[-1])
    return [to_vector(data).tolist() for data in deltas[-1].embeddings]


def _texts(texts: str | Sequence[str]) -> TokenizeTexts:
    return TokenizeTexts((texts,) if isinstance(texts, str) else tuple(texts))


class _Base:
    """What both flavours share: the engine in a thread, and how a call becomes a request."""

    def __init__(
        self,
        model: str | Path = "",
        *,
        config: EngineConfig | None = None,
        make_runner: Callable[[EngineConfig], ModelRunner] | None = None,
        **settings: Any,
    ) -> None:
        """Serve `model` (default: the embedded SmolLM2-135M). `settings` are fields of `EngineConfig`.

        Raises SetupError when the model cannot be served; loading itself happens on entry.
        """
        config = msgspec.structs.replace(config or EngineConfig(), model=str(model), **settings)
        if make_runner is None:
            # A library that dies here must not take the caller's process along.
            ready = find_working(prepare(config), log.info)
            ready = with_remembered(config, ready, _given(config, settings))
            host = ThreadExecutor(lambda progress: LlamaRunner(ready, progress=progress), ready)
        else:
            host = ThreadExecutor(lambda _: make_runner(config), config)
        self._engine = EngineClient(host, queue_size=1_000_000)

    @property
    def info(self) -> ModelInfo:
        """What is known of the model. Raises EngineNotReady before it is opened."""
        if self._engine.info is None:
            raise EngineNotReady("open it first: `with LLM(...) as llm`")
        return self._engine.info

    def _request(self, answer: TokenizerAnswer, asked: _Asked) -> Request:
        assert isinstance(answer, Tokens)
        return Request(
            id=uuid.uuid4().hex,
            prompt=answer.tokens,
            max_tokens=asked.max_tokens,
            sampling=asked.sampling or SamplingParams(seed=secrets.randbelow(2**32 - 1)),
            stop=tuple(asked.stop),
            timeout_s=asked.timeout,
        )

    def _embed_request(self, answer: TokenizerAnswer) -> Request:
        assert isinstance(answer, TokenLists)
        if self.info.pooling is Pooling.RANK:
            raise InvalidRequest(
                "this model is a reranker and makes no vectors, unless it is opened with pooling='mean', "
                "'cls' or 'last'"
            )
        return Request(id=uuid.uuid4().hex, prompt=(), max_tokens=0, embed=answer.lists)

    def _text(self, task: TokenizerTask) -> Future[TokenizerAnswer]:
        return self._engine.tokenizer.submit(task)


class LLM(_Base):
    """A model for ordinary Python. A context manager; safe to use from several threads."""

    def __enter__(self) -> Self:
        self._engine.start()
        self._engine.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it; calls that still run get an error. Idempotent."""
        self._engine.stop()

    def generate(
        self,
        prompts: str | Sequence[str],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        timeout: float | None = None,
    ) -> list[Completion]:
        """Complete raw prompts, all together; the answers come in the order of the prompts.

        What is not done `timeout` seconds after it was accepted raises DeadlineExceeded, here as elsewhere.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        asked = _Asked(sampling, max_tokens, stop, timeout)
        return self._complete([TokenizeText(prompt) for prompt in prompts], asked)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        timeout: float | None = None,
    ) -> Completion:
        """Answer a conversation (`[{"role": "user", "content": "…"}]`) with the model's own template."""
        return self._complete([_chat(messages)], _Asked(sampling, max_tokens, stop, timeout))[0]

    def stream(
        self,
        prompt: str | Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        timeout: float | None = None,
    ) -> Iterator[str]:
        """The answer to a prompt or a conversation, piece by piece. Leaving the loop cancels it."""
        stream = self._submit(_task(prompt), _Asked(sampling, max_tokens, stop, timeout))
        try:
            for delta in stream:
                _raise_error(delta)
                if delta.text:
                    yield delta.text
        finally:
            self._engine.cancel(stream.request_id)

    def embed(self, texts: str | Sequence[str]) -> list[list[float]]:
        """A vector of length 1 for each text, in their order."""
        if not texts:
            return []
        request = self._embed_request(self._text(_texts(texts)).result())
        stream = self._engine.submit(request, BlockingOutputStream)
        try:
            return _vectors(list(stream))
        finally:
            self._engine.cancel(stream.request_id)

    def _complete(self, tasks: Sequence[TokenizerTask], asked: _Asked) -> list[Completion]:
        streams = [self._submit(task, asked) for task in tasks]
        try:
            return [_completion(list(stream)) for stream in streams]
        finally:
            for stream in streams:
                self._engine.cancel(stream.request_id)

    def _submit(self, task: TokenizerTask, asked: _Asked) -> BlockingOutputStream:
        return self._engine.submit(self._request(self._text(task).result(), asked), BlockingOutputStream)


class AsyncLLM(_Base):
    """A model for asyncio. An asynchronous context manager; use it on the loop that entered it."""

    async def __aenter__(self) -> Self:
        self._engine.deliver = asyncio.get_running_loop().call_soon_threadsafe
        self._engine.start()
        await asyncio.wrap_future(self._engine.loaded)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End it; calls that still run get an error. Idempotent."""
        await asyncio.get_running_loop().run_in_executor(None, self._engine.stop)

    async def generate(
        self,
        prompts: str | Sequence[str],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        timeout: float | None = None,
    ) -> list[Completion]:
        """See `LLM.generate`."""
        if isinstance(prompts, str):
            prompts = [prompts]
        asked = _Asked(sampling, max_tokens, stop, timeout)
        calls = (self._complete(TokenizeText(prompt), asked) for prompt in prompts)
        return list(await asyncio.gather(*calls))

    async def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        timeout: float | None = None,
    ) -> Completion:
        """See `LLM.chat`."""
        return await self._complete(_chat(messages), _Asked(sampling, max_tokens, stop, timeout))

    async def stream(
        self,
        prompt: str | Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        timeout: float | None = None,
    ) -> AsyncIterator[str]:
        """See `LLM.stream`."""
        stream = await self._submit(_task(prompt), _Asked(sampling, max_tokens, stop, timeout))
        try:
            async for delta in stream:
                _raise_error(delta)
                if delta.text:
                    yield delta.text
        finally:
            self._engine.cancel(stream.request_id)

    async def embed(self, texts: str | Sequence[str]) -> list[list[float]]:
        """See `LLM.embed`."""
        if not texts:
            return []
        request = self._embed_request(await asyncio.wrap_future(self._text(_texts(texts))))
        stream = self._engine.submit(request, AsyncOutputStream)
        try:
            return _vectors([delta async for delta in stream])
        finally:
            self._engine.cancel(stream.request_id)

    async def _complete(self, task: TokenizerTask, asked: _Asked) -> Completion:
        stream = await self._submit(task, asked)
        try:
            return _completion([delta async for delta in stream])
        finally:
            self._engine.cancel(stream.request_id)

    async def _submit(self, task: TokenizerTask, asked: _Asked) -> AsyncOutputStream:
        answer = await asyncio.wrap_future(self._text(task))
        return self._engine.submit(self._request(answer, asked), AsyncOutputStream)


def _chat(messages: Sequence[Message]) -> TokenizeChat:
    return TokenizeChat(Chat(tuple(dict(message) for message in messages)))


def _task(prompt: str | Sequence[Message]) -> TokenizerTask:
    return TokenizeText(prompt) if isinstance(prompt, str) else _chat(prompt)
