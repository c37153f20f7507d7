"""llama-server's own routes, so that scripts written for it run unchanged."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm import __version__
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.engine_registry import EngineRegistry
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.server.errors import failure_body
from cllm.server.protocol import completions as render
from cllm.server.protocol.chat import ConversationBody
from cllm.server.protocol.llama import InfillBody, LlamaCompletionBody, LlamaDetokenizeBody, LlamaTokenizeBody
from cllm.server.sse import GONE, EventStream, collect, encode
from cllm.server.submit import checked_tokens, constraint_of, loaded, request_of, run_tokenizer, to_tokens
from cllm.text.tool_formats import get_tool_format
from cllm.types import FinishReason, Request, RequestOutput
from cllm.workers.tokenizer import Detokenize, RenderChat, Text, TokenizeInfill, TokenizeText

ROUTE = "/completion"


class TimedStream(AsyncOutputStream):
    """Remembers when its first token came, however it is read."""

    first: float | None = None

    def push(self, delta: RequestOutput) -> None:
        if self.first is None and delta.tokens:
            self.first = time.perf_counter()
        super().push(delta)


class LlamaJob:
    """One `/completion`, submitted: its stream and the clock for its timings."""

    def __init__(self, engine: EngineClient, request: Request) -> None:
        self.engine = engine
        self.started = time.perf_counter()
        self.stream = engine.submit(request, TimedStream)

    def event(self, delta: RequestOutput) -> dict[str, Any]:
        """A piece of the answer, as a stream tells it."""
        piece: dict[str, Any] = {"content": delta.text, "tokens": list(delta.tokens), "stop": False}
        if delta.logprobs:
            piece["completion_probabilities"] = probabilities(delta.logprobs)
        return piece

    def result(self, last: RequestOutput) -> dict[str, Any]:
        """What the final event or the whole answer says about how it ended and what it took."""
        assert last.usage is not None
        now = time.perf_counter()
        first = self.stream.first or now
        prompt_s, predict_s = first - self.started, now - first
        usage = last.usage
        info, _ = loaded(self.engine)
        kind = "limit" if last.finish_reason is FinishReason.LENGTH else "word" if last.stop else "eos"
        return {
            "stop": True,
            "model": info.name,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "truncated": False,
            "stop_type": kind,
            "stopping_word": last.stop or "",
            "timings": {
                "cache_n": usage.cached_tokens,
                "prompt_n": usage.prompt_tokens - usage.cached_tokens,
                "prompt_ms": prompt_s * 1000,
                "predicted_n": usage.completion_tokens,
                "predicted_ms": predict_s * 1000,
                "predicted_per_second": usage.completion_tokens / predict_s if predict_s > 0 else 0.0,
            },
        }


def probabilities(entries: Sequence[Any]) -> list[dict[str, Any]]:
    """llama-server's shape of log-probabilities."""
    return [
        {
            "id": entry.token,
            "token": render.text_of(entry.pieces[0]),
            "bytes": list(entry.pieces[0]),
            "logprob": entry.logprob,
            "top_logprobs": [
                {"id": token, "token": render.text_of(piece), "bytes": list(piece), "logprob": logprob}
                for (token, logprob), piece in zip(entry.top, entry.pieces[1:], strict=True)
            ],
        }
        for entry in entries
    ]


async def prompt_of(engine: EngineClient, body: LlamaCompletionBody) -> tuple[int, ...]:
    """The tokens of a prompt, which may spell control tokens."""
    engine.check_room()
    if not isinstance(body.prompt, str):
        return checked_tokens(engine, body.prompt, "prompt")
    most = loaded(engine)[1].request_tokens
    return await to_tokens(engine, TokenizeText(body.prompt, most, parse_special=True))


async def infill_of(engine: EngineClient, body: InfillBody) -> tuple[int, ...]:
    """The tokens of a text with a gap; cut at its far ends so that the answer has room."""
    engine.check_room()
    most = loaded(engine)[1].request_tokens
    answer = min(body.n_predict, most // 2) if body.n_predict > 0 else most // 4
    return await to_tokens(engine, TokenizeInfill(body.gap(), most, most - answer))


async def events(job: LlamaJob) -> AsyncIterator[bytes]:
    async for delta in job.stream:
        if delta.error is not None:
            yield encode(failure_body(ROUTE, delta.error))
            return
        piece = job.event(delta)
        if delta.finish_reason is not None:
            piece |= job.result(delta)
        yield encode(piece)


def routes(registry: EngineRegistry) -> APIRouter:
    """The router. Each handler asks the registry once for the engine that serves its request."""
    router = APIRouter(tags=["llama-server"])

    @router.post(ROUTE, response_model=None)
    @router.post("/completions", response_model=None, include_in_schema=False)
    async def completion(body: LlamaCompletionBody, http: HttpRequest) -> Response | dict[str, Any]:
        """Complete a prompt."""
        engine = registry.current
        return await answer(engine, body, http, await prompt_of(engine, body))

    @router.post("/infill", response_model=None)
    async def infill(body: InfillBody, http: HttpRequest) -> Response | dict[str, Any]:
        """Fill the gap in a text, with models that were taught it."""
        engine = registry.current
        return await answer(engine, body, http, await infill_of(engine, body))

    async def answer(
        engine: EngineClient, body: LlamaCompletionBody, http: HttpRequest, prompt: tuple[int, ...]
    ) -> Response | dict[str, Any]:
        request = request_of(
            engine,
            http,
            body,
            request_id=uuid.uuid4().hex,
            prompt=prompt,
            max_tokens=None if body.n_predict < 0 else max(1, body.n_predict),
            stop=tuple(body.stop),
            logprobs=body.n_probs,
            constraint=await constraint_of(engine, body),
        )
        job = LlamaJob(engine, request)
        if body.stream:
            return EventStream(engine, [job.stream], events(job))
        collected = await collect(engine, [job.stream], http.receive)
        if collected is None:
            return Response(status_code=GONE)
        (deltas,) = collected
        whole = {
            "content": render.joined_text(deltas),
            "tokens": [token for delta in deltas for token in delta.tokens],
            **job.result(deltas[-1]),
        }
        if body.n_probs:
            whole["completion_probabilities"] = probabilities(render.joined_logprobs(deltas))
        return whole

    @router.post("/tokenize")
    async def tokenize(body: LlamaTokenizeBody) -> dict[str, Any]:
        """Text to token ids."""
        task = TokenizeText(body.content, 0, add_special=body.add_special, parse_special=body.parse_special)
        return {"tokens": list(await to_tokens(registry.current, task))}

    @router.post("/detokenize")
    async def detokenize(body: LlamaDetokenizeBody) -> dict[str, str]:
        """Token ids to text."""
        engine = registry.current
        text = await run_tokenizer(engine, Detokenize(checked_tokens(engine, body.tokens, "tokens")))
        assert isinstance(text, Text)
        return {"content": text.text}

    @router.post("/apply-template")
    async def apply_template(body: ConversationBody) -> dict[str, str]:
        """What the chat template makes of a conversation."""
        engine = registry.current
        conversation = body.conversation()
        template = loaded(engine)[0].template_for(tools=bool(conversation.tools))
        rendered = await run_tokenizer(
            engine, RenderChat(conversation.for_template(get_tool_format(template)))
        )
        assert isinstance(rendered, Text)
        return {"prompt": rendered.text}

    @router.get("/props")
    async def props() -> dict[str, Any]:
        """The model and the defaults."""
        info, limits = loaded(registry.current)
        return {
            "default_generation_settings": {"n_ctx": limits.request_tokens},
            "total_slots": limits.sequences,
            "model_alias": info.name,
            "chat_template": info.chat_template or "",
            **({"chat_template_tool_use": info.tool_template} if info.tool_template else {}),
            "build_info": f"cllm {__version__}",
        }

    @router.get("/slots")
    async def slots() -> list[dict[str, Any]]:
        """Every sequence id and whether it computes."""
        _, limits = loaded(registry.current)
        running = sum(state.dispatched is not None for state in registry.requests)
        return [
            {"id": number, "n_ctx": limits.request_tokens, "is_processing": number < running}
            for number in range(limits.sequences)
        ]

    return router
