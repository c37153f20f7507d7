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
from cllm.engine.engine import Engine
from cllm.engine.stream import AsyncStream
from cllm.server.errors import error_body
from cllm.server.llama_schema import LlamaCompletionBody, LlamaDetokenizeBody, LlamaTokenizeBody
from cllm.server.openai import render
from cllm.server.openai.chat_schema import ConversationBody
from cllm.server.sse import EventStream, collect, encode
from cllm.server.text import checked_tokens, constraint_of, do_text, loaded, sampling_of, to_tokens
from cllm.text.dialects import dialect_of
from cllm.text.work import Detokenize, RenderChat, Text, TokenizeText
from cllm.types import Delta, FinishReason, Request


class LlamaJob:
    """One `/completion`: its request and the clock for its timings."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.engine = engine
        self.request = request
        self.started = time.perf_counter()
        self.first: float | None = None

    def event(self, delta: Delta) -> dict[str, Any]:
        """A piece of the answer, as a stream tells it."""
        if self.first is None and delta.tokens:
            self.first = time.perf_counter()
        piece: dict[str, Any] = {"content": delta.text, "tokens": list(delta.tokens), "stop": False}
        if delta.logprobs:
            piece["completion_probabilities"] = probabilities(delta.logprobs)
        return piece

    def result(self, last: Delta) -> dict[str, Any]:
        """What the final event or the whole answer says about how it ended and what it took."""
        assert last.usage is not None
        now = time.perf_counter()
        prompt_s, predict_s = (self.first or now) - self.started, now - (self.first or now)
        usage = last.usage
        facts, _ = loaded(self.engine)
        kind = "limit" if last.finish_reason is FinishReason.LENGTH else "word" if last.stop else "eos"
        return {
            "stop": True,
            "model": facts.name,
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


async def to_request(engine: Engine, body: LlamaCompletionBody) -> Request:
    """A validated body as the engine's own request."""
    facts, limits = loaded(engine)
    if isinstance(body.prompt, str):
        task = TokenizeText(body.prompt, limits.request_tokens, parse_special=True)
        prompt = await to_tokens(engine, task)
    else:
        prompt = checked_tokens(engine, body.prompt, "prompt")
    most = limits.request_tokens
    return Request(
        id=uuid.uuid4().hex,
        prompt=prompt,
        max_tokens=most if body.n_predict < 0 else max(1, min(body.n_predict, most)),
        sampling=sampling_of(body, facts.vocabulary_size),
        stop=tuple(body.stop),
        logprobs=body.n_probs,
        constraint=await constraint_of(engine, body),
    )


async def events(job: LlamaJob, stream: AsyncStream) -> AsyncIterator[bytes]:
    async for delta in stream:
        if delta.error is not None:
            yield encode(error_body("/v1/", 500, delta.error.code, delta.error.message))
            return
        piece = job.event(delta)
        if delta.finish_reason is not None:
            piece |= job.result(delta)
        yield encode(piece)


def routes(engine: Engine) -> APIRouter:
    """The router over one engine."""
    router = APIRouter(tags=["llama-server"])

    @router.post("/completion", response_model=None)
    @router.post("/completions", response_model=None, include_in_schema=False)
    async def completion(body: LlamaCompletionBody, http: HttpRequest) -> Response | dict[str, Any]:
        """Complete a prompt."""
        job = LlamaJob(engine, await to_request(engine, body))
        stream = engine.submit(job.request, AsyncStream)
        if body.stream:
            return EventStream(engine, [stream], events(job, stream))
        collected = await collect(engine, [stream], http.receive)
        if collected is None:
            return Response(status_code=499)
        (deltas,) = collected
        answer = {
            "content": render.joined_text(deltas),
            "tokens": [token for delta in deltas for token in delta.tokens],
            **job.result(deltas[-1]),
        }
        if body.n_probs:
            answer["completion_probabilities"] = probabilities(render.joined_logprobs(deltas))
        return answer

    @router.post("/tokenize")
    async def tokenize(body: LlamaTokenizeBody) -> dict[str, Any]:
        """Text to token ids."""
        task = TokenizeText(body.content, 0, add_special=body.add_special, parse_special=body.parse_special)
        return {"tokens": list(await to_tokens(engine, task))}

    @router.post("/detokenize")
    async def detokenize(body: LlamaDetokenizeBody) -> dict[str, str]:
        """Token ids to text."""
        answer = await do_text(engine, Detokenize(checked_tokens(engine, body.tokens, "tokens")))
        assert isinstance(answer, Text)
        return {"content": answer.text}

    @router.post("/apply-template")
    async def apply_template(body: ConversationBody) -> dict[str, str]:
        """What the chat template makes of a conversation."""
        chat = body.conversation().for_template(dialect_of(loaded(engine)[0].chat_template))
        answer = await do_text(engine, RenderChat(chat))
        assert isinstance(answer, Text)
        return {"prompt": answer.text}

    @router.get("/props")
    async def props() -> dict[str, Any]:
        """The model and the defaults."""
        facts, limits = loaded(engine)
        return {
            "default_generation_settings": {"n_ctx": limits.request_tokens},
            "total_slots": limits.sequences,
            "model_alias": facts.name,
            "chat_template": facts.chat_template or "",
            "build_info": f"cllm {__version__}",
        }

    @router.get("/slots")
    async def slots() -> list[dict[str, Any]]:
        """Every sequence id and whether it computes."""
        _, limits = loaded(engine)
        running = sum(ticket.dispatched is not None for ticket in engine.tickets)
        return [
            {"id": number, "n_ctx": limits.request_tokens, "is_processing": number < running}
            for number in range(limits.sequences)
        ]

    return router
