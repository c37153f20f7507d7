"""llama-server's own routes, so that scripts written for it run unchanged."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm import __version__
from cllm.frontend.async_calls import loaded, run_tokenizer
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.server.errors import failure_body
from cllm.server.protocol import llama as api
from cllm.server.protocol.base import LargeJsonRoute, StructResponse, documented
from cllm.server.protocol.chat import ConversationBody
from cllm.server.protocol.generate import DecodeBody
from cllm.server.sse import COMMENT, GONE, EventStream, collect, encode
from cllm.server.submit import check_tokens, get_registry, make_request
from cllm.types import FinishReason, RequestOutput
from cllm.workers.messages import Detokenize, RenderChat, Text, TokenizeInfill, TokenizeText, Tokens

ROUTE = "/completion"
_COMPLETION = documented(
    api.COMPLETION_EXAMPLE,
    events=(encode(api.LlamaEvent(content="2", tokens=(34,))), encode(api.COMPLETION_EXAMPLE)),
    computes=True,
)
router = APIRouter(tags=["llama-server"], route_class=LargeJsonRoute)


class TimedStream(AsyncOutputStream):
    """Notes when it was made and when its first token came, however it is read."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.started = time.perf_counter()
        self.first: float | None = None

    def push(self, delta: RequestOutput) -> None:
        if self.first is None and delta.tokens:
            self.first = time.perf_counter()
        super().push(delta)


def make_completion(
    model: str, stream: TimedStream, outputs: Sequence[RequestOutput], *, logprobs: bool
) -> api.LlamaCompletion:
    """A finished answer, or its last event: how it ended and what it took."""
    last = outputs[-1]
    assert last.usage is not None
    usage, now = last.usage, time.perf_counter()
    first = stream.first or now
    seconds = now - first
    return api.LlamaCompletion(
        content="".join(output.text for output in outputs),
        tokens=tuple(token for output in outputs for token in output.tokens),
        completion_probabilities=api.make_probabilities(
            entry for output in outputs for entry in output.logprobs
        )
        if logprobs
        else UNSET,
        model=model,
        tokens_predicted=usage.completion_tokens,
        tokens_evaluated=usage.prompt_tokens,
        tokens_cached=usage.cached_tokens,
        stop_type="limit" if last.finish_reason is FinishReason.LENGTH else "word" if last.stop else "eos",
        stopping_word=last.stop or "",
        timings=api.LlamaTimings(
            cache_n=usage.cached_tokens,
            prompt_n=usage.prompt_tokens - usage.cached_tokens,
            prompt_ms=1000 * (first - stream.started),
            predicted_n=usage.completion_tokens,
            predicted_ms=1000 * seconds,
            predicted_per_second=usage.completion_tokens / seconds if seconds > 0 else 0.0,
            cached_from=usage.cached_from,
        ),
    )


async def events(model: str, stream: TimedStream) -> AsyncIterator[bytes]:
    """The events of a stream: pieces, then the last one with the summary; or an error, and the end."""
    yield COMMENT  # there is no event before the first token
    async for output in stream:
        if output.error is not None:
            yield encode(failure_body(ROUTE, output.error))
        elif output.finish_reason is not None:
            yield encode(make_completion(model, stream, [output], logprobs=bool(output.logprobs)))
        else:
            probabilities = api.make_probabilities(output.logprobs) if output.logprobs else UNSET
            yield encode(
                api.LlamaEvent(
                    content=output.text, tokens=output.tokens, completion_probabilities=probabilities
                )
            )


@router.post(ROUTE, **_COMPLETION)
@router.post("/completions", response_model=None, include_in_schema=False)
async def completion(body: api.LlamaCompletionBody, http: HttpRequest) -> Response:
    """Complete a prompt."""
    engine = get_registry(http).current
    engine.check_capacity()
    if isinstance(body.prompt, str):
        limit = loaded(engine)[1].request_tokens
        task = TokenizeText(body.prompt, limit, parse_special=True)
        prompt = (await run_tokenizer(engine, task, Tokens)).tokens
    else:
        prompt = check_tokens(engine, body.prompt, "prompt")
    return await answer(engine, body, http, prompt)


@router.post("/infill", **_COMPLETION)
async def infill(body: api.InfillBody, http: HttpRequest) -> Response:
    """Fill the gap in a text; needs a model with fill-in-the-middle tokens."""
    engine = get_registry(http).current
    engine.check_capacity()
    limit = loaded(engine)[1].request_tokens
    # The text is cut at its far ends so that the answer fits.
    reserved = min(body.n_predict, limit // 2) if body.n_predict > 0 else limit // 4
    task = TokenizeInfill(body.gap(), limit, limit - reserved)
    return await answer(engine, body, http, (await run_tokenizer(engine, task, Tokens)).tokens)


async def answer(
    engine: EngineClient, body: api.LlamaCompletionBody, http: HttpRequest, prompt: tuple[int, ...]
) -> Response:
    request = await make_request(
        engine,
        http,
        body,
        request_id=uuid.uuid4().hex,
        prompt=prompt,
        max_tokens=None if body.n_predict < 0 else max(1, body.n_predict),
        stop=tuple(body.stop),
        logprobs=body.n_probs,
    )
    model = loaded(engine)[0].name
    stream = engine.submit(request, TimedStream)
    if body.stream:
        return EventStream(engine, [stream], events(model, stream))
    collected = await collect(engine, [stream], http)
    if collected is None:
        return Response(status_code=GONE)
    return StructResponse(make_completion(model, stream, collected[0], logprobs=body.n_probs > 0))


@router.post("/tokenize", **documented(api.LlamaTokens((33, 27, 33, 45))))
async def tokenize(body: api.LlamaTokenizeBody, http: HttpRequest) -> Response:
    """Convert text to token ids."""
    task = TokenizeText(body.content, 0, add_special=body.add_special, parse_special=body.parse_special)
    return StructResponse(
        api.LlamaTokens((await run_tokenizer(get_registry(http).current, task, Tokens)).tokens)
    )


@router.post("/detokenize", **documented(api.LlamaContent("1+1=")))
async def detokenize(body: DecodeBody, http: HttpRequest) -> Response:
    """Convert token ids to text."""
    engine = get_registry(http).current
    task = Detokenize(check_tokens(engine, body.tokens, "tokens"))
    return StructResponse(api.LlamaContent((await run_tokenizer(engine, task, Text)).text))


@router.post("/apply-template", **documented(api.LlamaPrompt("<|im_start|>user\nWhat is AI?<|im_end|>\n")))
async def apply_template(body: ConversationBody, http: HttpRequest) -> Response:
    """Render a conversation with the model's chat template."""
    engine = get_registry(http).current
    conversation = body.conversation()
    task = RenderChat(conversation.for_template())
    return StructResponse(api.LlamaPrompt((await run_tokenizer(engine, task, Text)).text))


@router.get("/props", **documented(api.PROPS_EXAMPLE))
async def props(http: HttpRequest) -> Response:
    """Describe the model and the defaults."""
    info, limits = loaded(get_registry(http).current)
    answer = api.LlamaProps(
        default_generation_settings=api.LlamaSettings(limits.request_tokens),
        total_slots=limits.sequences,
        model_alias=info.name,
        chat_template=info.chat_template or "",
        chat_template_tool_use=info.tool_template or UNSET,
        build_info=f"cllm {__version__}",
    )
    return StructResponse(answer)


@router.get("/slots", **documented([api.LlamaSlot(0, 4096, is_processing=True)]))
async def slots(http: HttpRequest) -> Response:
    """List the slots, and whether each computes."""
    limits = loaded(get_registry(http).current)[1]
    running = sum(state.dispatched is not None for state in get_registry(http).requests)
    return StructResponse(
        [
            api.LlamaSlot(number, limits.request_tokens, is_processing=number < running)
            for number in range(limits.sequences)
        ]
    )
