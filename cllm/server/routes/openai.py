"""OpenAI's routes: /v1/models, /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.frontend.engine_client import EngineClient
from cllm.frontend.engine_registry import EngineRegistry
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.server.errors import failure_body
from cllm.server.protocol import completions as render
from cllm.server.protocol.chat import DONE
from cllm.server.protocol.completions import CompletionBody
from cllm.server.sse import GONE, EventStream, collect, encode, merged
from cllm.server.submit import (
    check_model,
    checked_tokens,
    choices_of,
    constraint_of,
    loaded,
    model_name,
    prompt_tokens,
    request_of,
    run_tokenizer,
    submit_all,
    to_tokens,
)
from cllm.text.prompt import Gap
from cllm.types import Request, RequestOutput
from cllm.workers.tokenizer import Detokenize, Text, TokenizeInfill

ROUTE = "/v1/completions"
_json = msgspec.json.Encoder()
_TEXT = b',"text":'
_CLOSING = b',"logprobs":null,"finish_reason":null}]}\n\n'
Choices = Callable[[int, RequestOutput], dict[str, Any]]


class Job:
    """One call of `/v1/completions`: its requests (several choices of several prompts), and their answers."""

    def __init__(
        self,
        engine: EngineClient,
        body: CompletionBody,
        prompts: Sequence[tuple[int, ...]],
        request: Request,
    ) -> None:
        """`request` says everything but the prompt."""
        self.engine = engine
        self.body = body
        self.prompts = prompts
        self.request = request
        self.prompt_tokens = sum(map(len, prompts))
        model = model_name(engine, body.model)
        created = int(time.time())
        self.head = {"id": request.id, "object": "text_completion", "created": created, "model": model}

    def submit(self, choices: int) -> list[AsyncOutputStream]:
        """All requests at once, or none."""
        requests = (
            msgspec.structs.replace(self.request, id=f"{self.request.id}-{number}", prompt=prompt)
            for number, prompt in enumerate(self.prompts)
        )
        return submit_all(
            self.engine, (choice for request in requests for choice in choices_of(request, choices))
        )

    async def events(
        self, streams: Sequence[AsyncOutputStream], choice: Choices, first: bytes
    ) -> AsyncIterator[bytes]:
        """Chunks as the choices come, the usage if it was asked for, `[DONE]`; or an error, and the end."""
        head = self.head
        opening = b"data: " + _json.encode({**head, "choices": []})[:-2] + b'{"index":'
        if first:
            yield first
        ended: list[RequestOutput] = []
        async for index, delta in merged(streams):
            if delta.error is not None:
                yield encode(failure_body(ROUTE, delta.error))
                return
            if delta.text and delta.finish_reason is None and not delta.logprobs:
                yield b"%b%d%b%b%b" % (opening, index, _TEXT, _json.encode(delta.text), _CLOSING)
            elif delta.finish_reason is not None or delta.logprobs:
                yield encode({**head, "choices": [choice(index, delta)]})
            if delta.finish_reason is not None:
                ended.append(delta)
        if self.body.include_usage:
            yield encode(
                {
                    **head,
                    "choices": [],
                    "usage": render.usage([delta.usage for delta in ended], self.prompt_tokens),
                }
            )
        yield DONE


def _finish(delta: RequestOutput) -> str | None:
    return delta.finish_reason.value if delta.finish_reason is not None else None


def routes(registry: EngineRegistry) -> APIRouter:
    """The router. Each handler asks the registry once for the engine that serves its request."""
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The loaded model."""
        info, _ = loaded(registry.current)
        model = {"id": info.name, "object": "model", "created": 0, "owned_by": "cllm"}
        return {"object": "list", "data": [model]}

    @router.post(ROUTE, response_model=None)
    async def completions(body: CompletionBody, http: HttpRequest) -> Response | dict[str, Any]:
        """Complete prompts."""
        engine = registry.current
        check_model(body.model)
        best_of = body.best_of or body.n
        request = request_of(
            engine,
            http,
            body,
            request_id=f"cmpl-{uuid.uuid4().hex}",
            max_tokens=body.max_tokens,
            stop=body.stops,
            logprobs=body.logprobs or int(best_of > body.n or body.logprobs is not None),
            constraint=await constraint_of(engine, body),
        )
        job = Job(engine, body, await _prompts(engine, body), request)
        echoes = await _echoes(engine, body)
        streams = job.submit(best_of)
        shown = body.logprobs is not None
        offsets = [len(echoes[index // best_of]) for index in range(len(streams))]

        def chunk(index: int, delta: RequestOutput) -> dict[str, Any]:
            told = render.completion_logprobs(delta.logprobs, offsets[index]) if shown else None
            offsets[index] += sum(map(len, told["tokens"])) if told else 0
            return {
                "index": index,
                "text": delta.text,
                "logprobs": told,
                "finish_reason": _finish(delta),
            }

        if body.stream:
            opening = {"logprobs": None, "finish_reason": None}
            first = b"".join(
                encode(
                    {**job.head, "choices": [{**opening, "index": index, "text": echoes[index // best_of]}]}
                )
                for index in range(len(streams))
                if body.echo
            )
            return EventStream(engine, streams, job.events(streams, chunk, first))
        answers = await collect(engine, streams, http.receive)
        if answers is None:
            return Response(status_code=GONE)
        kept = _best(answers, best_of, body.n)
        return {
            **job.head,
            "choices": [
                {
                    "index": index,
                    "text": echoes[index // body.n] + render.joined_text(deltas),
                    "logprobs": render.completion_logprobs(
                        render.joined_logprobs(deltas), len(echoes[index // body.n])
                    )
                    if shown
                    else None,
                    "finish_reason": _finish(deltas[-1]),
                }
                for index, deltas in enumerate(kept)
            ],
            "usage": render.usage([deltas[-1].usage for deltas in answers], job.prompt_tokens),
        }

    return router


async def _prompts(engine: EngineClient, body: CompletionBody) -> list[tuple[int, ...]]:
    prompts: list[tuple[int, ...]] = []
    for given in body.prompts:
        prompt = given if isinstance(given, str) else checked_tokens(engine, given, "prompt")
        if body.suffix:
            task = TokenizeInfill(Gap(prefix=prompt, suffix=body.suffix), loaded(engine)[1].request_tokens)
            prompt = await to_tokens(engine, task)
        elif isinstance(prompt, str):
            prompt = await prompt_tokens(engine, prompt)
        prompts.append(prompt)
    return prompts


async def _echoes(engine: EngineClient, body: CompletionBody) -> list[str]:
    """The text of each prompt, where it is to be repeated."""
    if not body.echo:
        return [""] * len(body.prompts)
    echoes: list[str] = []
    for given in body.prompts:
        if isinstance(given, str):
            echoes.append(given)
        else:
            answer = await run_tokenizer(engine, Detokenize(tuple(given)))
            assert isinstance(answer, Text)
            echoes.append(answer.text)
    return echoes


def _best(answers: Sequence[list[RequestOutput]], best_of: int, n: int) -> list[list[RequestOutput]]:
    """Of each prompt's answers the n likeliest, likeliest first; all of them when that is all."""
    if best_of == n:
        return list(answers)
    kept: list[list[RequestOutput]] = []
    for begin in range(0, len(answers), best_of):
        ranked = sorted(answers[begin : begin + best_of], key=render.mean_logprob, reverse=True)
        kept += ranked[:n]
    return kept
