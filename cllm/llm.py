"""The Python API: a model for scripts (`LLM`) and for asyncio (`AsyncLLM`).

    llm = LLM("model.gguf")
    print(llm.generate(["Once upon a time"], max_tokens=32)[0].text)
    print(llm.chat("What is AI?", temperature=0).text)

Requests of one call, and of several threads or tasks, are batched automatically. The model runs in worker
processes, as a server's does: a crashed one is replaced, and answers go on where they were. A model is opened
by its first use, or by `with`, and closed at exit, by `with` or by `close()`; a forked child cannot use it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import secrets
import uuid
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import msgspec

from cllm.backend.llama.probe import find_ready
from cllm.chat.conversation import read_files
from cllm.chat.reply import ChatChunk, ChatReply, make_chunks
from cllm.chat.session import open_chat
from cllm.config import EngineConfig, make_config
from cllm.errors import EngineNotReady, InvalidRequest, ShuttingDown
from cllm.fields import check_names, parse_fields, to_plain
from cllm.frontend.async_calls import get_loop, map_bounded, run_tokenizer, wait_for_call
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.frontend.served_model import load_adapters
from cllm.messages import TokenizeTexts, TokenLists
from cllm.models.resolve import resolve_config
from cllm.server.dialects.openai.bodies import ChatBody, OpenAIBody
from cllm.server.dialects.openai.completions import CompletionBody
from cllm.server.dialects.openai.embeddings import to_vector
from cllm.server.submit import check_tokens, make_request
from cllm.types import (
    SEED_SPACE,
    FinishReason,
    Limits,
    ModelInfo,
    Pooling,
    Prompt,
    Request,
    RequestOutput,
    SamplingOptions,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from cllm.workers.executor import ProcessExecutor
from cllm.workers.supervisor import WORKER_MODULE

log = logging.getLogger(__name__)
MAX_QUEUE = 1_000_000
DEFAULT_MAX_TOKENS = 256
MAPPED_PER_SLOT = 4  # prompts of `map` on their way: one long answer leaves no slot idle
TEXTS_AT_ONCE = 16  # in one task of the tokenizer, which has a time limit
Item = TypeVar("Item")
Piece = RequestOutput | ChatChunk  # of a text; the last one with how it ended
Pieces = AsyncGenerator[Piece, None]
Result = TypeVar("Result")
Messages = Sequence[Mapping[str, Any]]
Options = Mapping[str, Any]
Sampling = SamplingParams | None
Stream = AsyncGenerator[Item, None]


class GenerateOptions(SamplingOptions, total=False):
    """How tokens are sampled, and how many."""

    max_tokens: int  # 256 unless given
    stop: str | Sequence[str] | None  # a stop string or several; they are not part of the answer
    timeout: float | None  # seconds; then DeadlineExceeded
    min_tokens: int  # generated before the answer may end
    stop_token_ids: Sequence[int]  # tokens that end the answer, as end tokens do
    prompt_logprobs: int | None  # score the prompt's tokens, with this many likely ones
    adapter: str  # name of a LoRA adapter that computes the answer


class ChatOptions(GenerateOptions, total=False):
    """The options of a chat, named and shaped as in `/v1/chat/completions`."""

    n: int  # choices; the prompt is computed once
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]  # "auto", "none", "required" or {"type": "function", …}
    parallel_tool_calls: bool
    response_format: Mapping[str, Any]  # {"type": "json_object"} or {"type": "json_schema", …}
    logprobs: bool
    top_logprobs: int  # most likely tokens reported with each token; needs logprobs
    chat_template_kwargs: Mapping[str, Any]  # variables of the chat template
    reasoning_effort: str | None
    reasoning_budget: int | None  # tokens of reasoning; 0: none, -1: no limit
    prediction: str | None  # what most of the answer will repeat: then it is generated faster
    reasoning_format: Literal["auto", "none"]  # none: reasoning stays in the text


class WholeOptions(ChatOptions, total=False):
    stream: Literal[False]


class StreamedOptions(ChatOptions):
    stream: Literal[True]


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
        raise output.error.error()


def _merge_sampling(sampling: Sampling, options: dict[str, Any]) -> SamplingParams:
    """Take the fields of sampling out of the options; they win over `sampling`.

    Raises InvalidRequest, TypeError.
    """
    if sampling is not None and not isinstance(sampling, SamplingParams):
        wrong = f"sampling must be SamplingParams, not {type(sampling).__name__}"
        raise TypeError(f"{wrong}: write temperature=0, seed=1, … as keyword arguments, or SamplingParams(…)")
    fields = msgspec.structs.asdict(sampling or SamplingParams())
    fields |= {name: options.pop(name) for name in fields.keys() & options.keys()}
    return parse_fields(fields, SamplingParams)


def _make_request(
    engine: EngineClient, body: OpenAIBody, sampling: SamplingParams, adapter: str = "", logprobs: int = 0
) -> Request:
    """A request without prompt. Raises InvalidRequest."""
    check_tokens(engine, [token for token, _ in sampling.logit_bias], "logit_bias")
    seed = secrets.randbelow(SEED_SPACE) if sampling.seed is None else sampling.seed % SEED_SPACE
    assert isinstance(body, ChatBody | CompletionBody)
    if body.max_tokens is None or body.max_tokens < 1:  # over HTTP that is no limit, or a prompt to score
        raise InvalidRequest("max_tokens: expected `int` >= 1", "max_tokens")
    return make_request(
        engine,
        None,
        body,
        uuid.uuid4().hex,
        body.max_tokens,
        body.stop,
        sampling=msgspec.structs.replace(sampling, seed=seed),
        logprobs=logprobs or None,
        prompt_logprobs=body.prompt_logprobs,
        adapter=adapter,
    )


def _texts(texts: str | Sequence[str], field: str) -> tuple[str, ...]:
    found = tuple(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else (texts,)
    if not all(isinstance(text, str) for text in found):
        hint = "; `chat` takes messages" if isinstance(found[0], Mapping) else ""
        raise InvalidRequest(f"{field}: expected a text or a sequence of texts{hint}", field)
    return found


def _messages(messages: str | Messages) -> list[dict[str, Any]]:
    """Messages as an API takes them; a text is what the user says."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, Sequence) and all(isinstance(each, Mapping) for each in messages):
        return [read_files(dict(each)) for each in messages if isinstance(each, Mapping)]
    raise InvalidRequest('messages: expected a text, or a list of messages: [{"role": …}]', "messages")


class AsyncLLM:
    """A model for asyncio. An asynchronous context manager; use it on the event loop of its first use."""

    def __init__(
        self,
        model: str | Path = "",
        *,
        config: EngineConfig | None = None,
        worker: str = "",
        adapters: Mapping[str, str | Path] | None = None,
        **settings: Any,
    ) -> None:
        """Serve `model` (default: the embedded SmolLM2-135M). `settings` are fields of `EngineConfig`.

        `adapters` are files of LoRA adapters by name, each with `:SCALE` or a scale of 1.
        `worker` names another module for the worker processes: `cllm.testing` answers by script.
        Raises SetupError when the model cannot be served. Its first use loads it, or `open` and `with` do.
        """
        check_names("LLM", settings, EngineConfig.__struct_fields__)
        asked = msgspec.structs.asdict(config or EngineConfig()) | settings
        if os.fspath(model):
            asked["model"] = model
        asked["adapter"] = (*asked["adapter"], *(f"{name}={file}" for name, file in (adapters or {}).items()))
        paths = {name: str(value) for name, value in asked.items() if isinstance(value, Path)}
        ready = make_config(EngineConfig, asked | paths)
        if not worker:
            ready = find_ready(resolve_config(ready), log.info)
        level = str(log.getEffectiveLevel())  # warnings, unless the program wants more
        executor = ProcessExecutor(ready, log_level=level, module=worker or WORKER_MODULE)
        self._engine = EngineClient(executor, queue_size=MAX_QUEUE)
        self._config = ready
        self._engine.shutdown_message = "the model was closed"
        self._engine.unread_limit = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that opened it
        self._process: int | None = None  # the same
        self._loading: asyncio.Task[None] | None = None
        self._ready = self._closed = False

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Raises EngineNotReady before it is opened."""
        return self._check_open()

    @property
    def limits(self) -> Limits:
        """The limits of the loaded model. Raises EngineNotReady before it is opened."""
        self._check_open()
        assert self._engine.limits is not None
        return self._engine.limits

    async def open(self) -> Self:
        """Load the model, or wait until another call has loaded it. An open model stays as it is.

        Raises what keeps it from loading; ShuttingDown if it is closed, also meanwhile.
        """
        loop = asyncio.get_running_loop()
        if not self._ready and self._loop in (None, loop) and not self._closed:
            try:  # a call that is cancelled leaves the loading to the next one
                if self._loading is None:
                    self._loop, self._process = loop, os.getpid()
                    # Calls in threads that Python does not wait for stay where they are: they show no error.
                    atexit.register(self._stop, wake=False)
                    self._engine.start(loop)
                    self._loading = loop.create_task(self._load())
                    self._loading.add_done_callback(lambda done: done.cancelled() or done.exception())
                await asyncio.shield(self._loading)
            except Exception:
                await self.close()
                raise
        self._check_open()
        if self._loop is not loop:
            raise EngineNotReady("this model was opened on another event loop: make one for each")
        return self

    async def _load(self) -> None:
        await asyncio.wrap_future(self._engine.loaded)
        await load_adapters(self._engine, self._config)
        self._ready = True

    async def __aenter__(self) -> Self:
        try:
            return await self.open()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the model, also while it loads; calls that still run raise an error. Idempotent."""
        self._closed = True
        await asyncio.to_thread(self._stop)

    def _stop(self, *, wake: bool = True) -> None:
        """End the workers, and wait for that."""
        self._closed |= wake
        if self._process in (None, os.getpid()):  # the workers of a forked child's parent are not its own
            self._engine.stop(wake=wake)
            atexit.unregister(self._stop)

    def _check_open(self) -> ModelInfo:
        """The loaded model. Raises an error that says why it cannot be used here and now."""
        if self._closed:
            raise ShuttingDown("this model is closed: open another one")
        if self._process is None:
            raise EngineNotReady("open it first: `await llm.open()`, `async with AsyncLLM(...)`, or any call")
        if self._process != os.getpid():
            raise EngineNotReady("this model was opened in another process: open one of its own here")
        if self._engine.info is None:
            raise EngineNotReady("the model is still loading")
        return self._engine.info

    @contextlib.contextmanager
    def _cancel_after(self, *request_ids: str) -> Iterator[None]:
        """Cancel those of these requests that run when their reader leaves."""
        try:
            yield
        finally:
            if self._process == os.getpid():
                for request_id in request_ids:
                    self._engine.cancel(request_id)

    async def generate(
        self, prompts: str | Sequence[str], sampling: Sampling = None, **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """See `LLM.generate`."""
        await self.open()
        texts = _texts(prompts, "prompts")
        requests = [self._make_request(sampling, options, "generate") for _ in texts]
        left = iter(requests)
        with self._cancel_after(*(request.id for request in requests)):
            streams = [self._submit(next(left), tokens) async for tokens in self._tokenize(texts)]
            return [_make_completion([output async for output in stream]) for stream in streams]

    @overload
    def chat(
        self, messages: str | Messages, sampling: Sampling = None, **options: Unpack[WholeOptions]
    ) -> Coroutine[Any, Any, ChatReply]: ...

    @overload
    def chat(
        self, messages: str | Messages, sampling: Sampling = None, **options: Unpack[StreamedOptions]
    ) -> AsyncGenerator[ChatChunk, None]: ...

    def chat(
        self, messages: str | Messages, sampling: Sampling = None, *, stream: bool = False, **options: Any
    ) -> Coroutine[Any, Any, ChatReply] | AsyncGenerator[ChatChunk, None]:
        """See `LLM.chat`. Await the reply; with `stream=True` iterate over the chunks, without `await`."""
        chunks = self._when_open(lambda: self._chat(messages, sampling, {**options, "stream": stream}))
        return chunks if stream else self._wait_for_reply(chunks)

    def _chat(self, messages: str | Messages, sampling: Sampling, options: Options) -> Stream[ChatChunk]:
        self._check_open()
        check_names("chat", options, StreamedOptions.__annotations__)
        given = {"max_tokens": DEFAULT_MAX_TOKENS, **to_plain(options), "messages": _messages(messages)}
        sampling = _merge_sampling(sampling, given)
        if isinstance(text := options.get("prediction"), str):
            given["prediction"] = {"content": text}
        adapter = given.pop("adapter", "")
        body = ChatBody.parse(given)
        logprobs = max(1, body.top) if body.top is not None else 0
        return self._read_chat(body, _make_request(self._engine, body, sampling, adapter, logprobs))

    def _when_open(self, make: Callable[[], Stream[Item]]) -> Stream[Item]:
        """Make a stream: at once where the model is open, so that wrong arguments raise; else when it is."""
        return self._open_and_read(make) if not self._ready else make()

    async def _open_and_read(self, make: Callable[[], Stream[Item]]) -> Stream[Item]:
        await self.open()
        async with contextlib.aclosing(make()) as items:
            async for item in items:
                yield item

    def _make_request(self, sampling: Sampling, options: GenerateOptions, call: str) -> Request:
        self._check_open()
        check_names(call, options, GenerateOptions.__annotations__)
        given = {"max_tokens": DEFAULT_MAX_TOKENS, **to_plain(options), "prompt": ""}
        sampling = _merge_sampling(sampling, given)
        given["stream"] = call == "stream"
        adapter = given.pop("adapter", "")
        return _make_request(self._engine, CompletionBody.parse(given), sampling, adapter)

    async def _wait_for_reply(self, chunks: AsyncIterator[ChatChunk]) -> ChatReply:
        last = [chunk async for chunk in chunks][-1]
        assert last.reply is not None
        return last.reply

    async def _read_chat(self, body: ChatBody, request: Request) -> AsyncGenerator[ChatChunk, None]:
        self._check_open()
        session = await open_chat(self._engine, body.conversation(sees=self._engine.sees), request, body.n)
        with self._cancel_after(*(stream.request_id for stream in session.streams)):
            async for choice, changes, output in session.steps():
                _raise_error(output)
                for chunk in make_chunks(choice, changes):
                    yield chunk
            first, *others = session.replies
            yield ChatChunk(reply=first.reply([other.reply() for other in others]))

    def stream(
        self, prompt: str | Messages, sampling: Sampling = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[str, None]:
        """See `LLM.stream`."""
        return _get_texts(self._stream(prompt, sampling, options))

    def _stream(self, prompt: str | Messages, sampling: Sampling, options: GenerateOptions) -> Pieces:
        if isinstance(prompt, str):
            return self._when_open(
                lambda: self._read_text(self._make_request(sampling, options, "stream"), prompt)
            )
        return self.chat(prompt, sampling, stream=True, reasoning_format="none", **options)

    async def _read_text(self, request: Request, prompt: str) -> Pieces:
        self._check_open()
        with self._cancel_after(request.id):
            (stream,) = [self._submit(request, tokens) async for tokens in self._tokenize((prompt,))]
            async for output in stream:
                _raise_error(output)
                yield output

    async def embed(self, texts: str | Sequence[str]) -> list[list[float]]:
        """See `LLM.embed`."""
        await self.open()
        if not texts:
            return []
        if self.info.pooling is Pooling.RANK:
            raise InvalidRequest(
                "a reranker makes no embeddings, unless opened with pooling='mean', 'cls' or 'last'"
            )
        lists = [tokens async for tokens in self._tokenize(_texts(texts, "texts"))]
        request = Request(id=uuid.uuid4().hex, max_tokens=0, embed=tuple(lists))
        with self._cancel_after(request.id):
            outputs = [output async for output in self._submit(request)]
        _raise_error(outputs[-1])
        return [to_vector(data).tolist() for data in outputs[-1].embeddings]

    async def _tokenize(self, texts: Sequence[str]) -> AsyncIterator[tuple[int, ...]]:
        for begin in range(0, len(texts), TEXTS_AT_ONCE):
            task = TokenizeTexts(tuple(texts[begin : begin + TEXTS_AT_ONCE]))
            for tokens in (await run_tokenizer(self._engine, task, TokenLists)).lists:
                yield tokens

    def _submit(self, request: Request, prompt: tuple[int, ...] = ()) -> AsyncOutputStream:
        return self._engine.submit(msgspec.structs.replace(request, prompt=Prompt(prompt)), AsyncOutputStream)


async def _get_texts(pieces: Pieces) -> AsyncGenerator[str, None]:
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            if piece.text:
                yield piece.text


class TextStream(Iterator[str]):
    """The text of an answer, piece by piece. `usage` and `finish_reason` are known when it has ended."""

    def __init__(self, steps: Iterator[Piece]) -> None:
        self._steps = steps
        self.usage: Usage | None = None
        self.finish_reason: FinishReason | None = None

    def __next__(self) -> str:
        for piece in self._steps:
            end = piece.reply if isinstance(piece, ChatChunk) else piece
            if end is not None:
                self.usage, self.finish_reason = end.usage, end.finish_reason
            if piece.text:
                return piece.text
        raise StopIteration


class LLM:
    """A model for synchronous Python, opened by its first use. A context manager; threads may share it.

    An `AsyncLLM` on an event loop in another thread; so it also works in a notebook, where one runs already.
    """

    def __init__(self, model: str | Path = "", **settings: Any) -> None:
        """See `AsyncLLM`."""
        self._model = AsyncLLM(model, **settings)

    @property
    def info(self) -> ModelInfo:
        """The loaded model."""
        return self.open()._model.info

    @property
    def limits(self) -> Limits:
        """The limits of the loaded model."""
        return self.open()._model.limits

    def open(self) -> Self:
        """Load the model, where no call has done so. Raises what keeps it from loading; ShuttingDown."""
        if not self._model._ready:
            wait_for_call(get_loop(os.getpid()), self._model.open)
        self._model._check_open()
        return self

    def __enter__(self) -> Self:
        try:
            return self.open()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the model, also while it loads; calls that still run raise an error. Idempotent."""
        self._model._stop()

    def generate(
        self, prompts: str | Sequence[str], sampling: Sampling = None, **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """Complete raw prompts, all in one batch; the results have the order of the prompts.

        A prompt that is not finished `timeout` seconds after it was accepted raises DeadlineExceeded. When
        one raises, the others are cancelled. Fields of `SamplingParams` are also options, as
        `temperature=0`; without a seed each prompt draws its own. The other options are in
        `GenerateOptions`.
        """
        return self._run(self._model.generate, prompts, sampling, **options)

    @overload
    def chat(
        self, messages: str | Messages, sampling: Sampling = None, **options: Unpack[WholeOptions]
    ) -> ChatReply: ...

    @overload
    def chat(
        self, messages: str | Messages, sampling: Sampling = None, **options: Unpack[StreamedOptions]
    ) -> Iterator[ChatChunk]: ...

    def chat(
        self, messages: str | Messages, sampling: Sampling = None, *, stream: bool = False, **options: Any
    ) -> ChatReply | Iterator[ChatChunk]:
        """Reply to a text, or to a conversation (`[{"role": "user", "content": "…"}]`), by the chat template.

        The options are those of `/v1/chat/completions`: `tools`, `tool_choice`, `response_format`, `n`,
        `logprobs` and the others in `ChatOptions`. With `n` choices the reply is the first, `.choices` has
        all. With `stream=True` it comes as `ChatChunk`s, the last of which has the finished `reply`.
        """
        if stream:
            return self._iterate(self.open()._model.chat(messages, sampling, stream=True, **options))
        reply: ChatReply = self._run(self._model.chat, messages, sampling, **options)
        return reply

    def map(
        self, prompts: Iterable[str | Messages], sampling: Sampling = None, **options: Any
    ) -> Iterator[Completion | ChatReply]:
        """Answer prompts in their order: texts as `generate` does, messages as `chat`.

        Prompts are taken as answers are read, so that only a few of either are held at a time.
        """
        model, loop = self.open()._model, self.open()._model._loop
        assert loop is not None

        async def answer(prompt: str | Messages) -> Completion | ChatReply:
            if isinstance(prompt, str):
                return (await model.generate(prompt, sampling, **options))[0]
            reply: ChatReply = await model.chat(prompt, sampling, **options)
            return reply

        def submit(prompt: str | Messages) -> Future[Completion | ChatReply]:
            return asyncio.run_coroutine_threadsafe(answer(prompt), loop)

        return map_bounded(submit, prompts, MAPPED_PER_SLOT * self.limits.max_running)

    def stream(
        self, prompt: str | Messages, sampling: Sampling = None, **options: Unpack[GenerateOptions]
    ) -> TextStream:
        """The raw text of a completion or a reply, piece by piece. Leaving the loop cancels the request."""
        return TextStream(self._iterate(self.open()._model._stream(prompt, sampling, options)))

    def embed(self, texts: str | Sequence[str]) -> list[list[float]]:
        """An embedding of norm 1 for each text, in their order."""
        return self._run(self._model.embed, texts)

    def _run(self, call: Callable[..., Awaitable[Result]], /, *arguments: Any, **options: Any) -> Result:
        self.open()
        assert self._model._loop is not None
        return wait_for_call(self._model._loop, call, *arguments, **options)

    def _iterate(self, items: AsyncGenerator[Item, None]) -> Iterator[Item]:
        # Its event loop closes a generator that is dropped, in whichever thread that happens.
        while (item := self._run(anext, items, None)) is not None:
            yield item
