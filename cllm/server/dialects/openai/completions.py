"""OpenAI's `/v1/completions`: its body, its answers, its route."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import force_setattr
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.frontend.async_calls import loaded, merged, run_tokenizer, submit_all
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.limits import MAX_CHOICES, MAX_PROMPTS
from cllm.messages import Detokenize, Text
from cllm.server.body import TokenId, TokenLimit
from cllm.server.dialect import COMMENT, DONE, TEXT, Dialect, encode
from cllm.server.dialects.openai import openai
from cllm.server.dialects.openai.bodies import OpenAIBody, TopLogprobs
from cllm.server.examples import read_examples
from cllm.server.sse import EventStream, collect, render
from cllm.server.submit import check_tokens, make_request, prepare, use_engine
from cllm.server.timings import TimedResponse, get_timings
from cllm.text.prompt import Gap, RawText
from cllm.types import FinishReason, Prompt, RequestOutput, TokenLogprob, Usage

_replace = msgspec.structs.replace
_json = msgspec.json.Encoder()
_TEXT = b',"text":'
_CLOSING = b',"logprobs":null,"finish_reason":null}]}\n\n'


class CompletionBody(OpenAIBody, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    NULLS = frozenset({"max_tokens"})

    prompt: (
        str
        | Annotated[list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)]
    )
    suffix: str | None = None
    max_tokens: TokenLimit | None = 16
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: TopLogprobs | None = None
    echo: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens == -1:
            force_setattr(self, "max_tokens", None)
        if isinstance(self.prompt, list) and len({type(each) for each in self.prompt}) > 1:
            raise ValueError("prompt: must be a text, texts, token ids, or lists of token ids, not a mixture")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of: must be at least n ({self.n})")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise ValueError("best_of: above n it cannot be streamed; the best are known only at the end")
        if (self.best_of or self.n) * len(self.prompts) > MAX_PROMPTS:
            raise ValueError(f"prompt: n (or best_of) times prompts must be at most {MAX_PROMPTS}")

    @property
    def scores_echo(self) -> bool:
        """The tokens of the prompt are among those with log-probabilities."""
        return self.echo and self.logprobs is not None and not self.suffix

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list: of texts, or of lists of token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int  # whose KV the prefix cache held
    cached_from: str = ""  # its tier: device, ram or disk


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    accepted_prediction_tokens: int  # draft tokens that came true
    rejected_prediction_tokens: int


class CompletionUsage(msgspec.Struct, frozen=True):
    """The tokens of a call, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # of a prediction


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities as parallel lists, one entry a token; the first of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    """A token of the prompt, or one that could have stood in its place, as vLLM has it."""

    logprob: float
    rank: int | None  # 1: the most likely; null: not among those asked for
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # one entry a token, by token id


class CompletionChoice(msgspec.Struct, frozen=True):
    """One answer, or a piece of it; a finished one has a reason."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionResponse(TimedResponse, frozen=True, kw_only=True):
    """The response of `/v1/completions`, whole or one chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage | UnsetType = UNSET


def make_usage(usages: Iterable[Usage | None], prompt_tokens: int) -> CompletionUsage:
    """The usage of all choices together; a prompt counts once, however many answers it got."""
    ended = [usage for usage in usages if usage is not None]
    generated = sum(usage.completion_tokens for usage in ended)
    least = min(ended, key=attrgetter("cached_tokens"), default=None)
    details = PromptTokensDetails(least.cached_tokens, least.cached_from) if least else PromptTokensDetails(0)
    usage = CompletionUsage(prompt_tokens, generated, prompt_tokens + generated, details)
    if not any(usage.predicted_tokens for usage in ended):
        return usage
    accepted = sum(usage.accepted_tokens for usage in ended)
    rejected = sum(usage.drafted_tokens for usage in ended) - accepted
    return _replace(usage, completion_tokens_details=CompletionTokensDetails(accepted, rejected))


def make_choice(
    body: CompletionBody, index: int, outputs: Sequence[RequestOutput], echo: str, offset: int
) -> CompletionChoice:
    """A choice from its outputs. `offset` is where its tokens begin in the text, after what came before."""
    prompt = [entry for output in outputs for entry in output.prompt_logprobs]
    entries = [entry for output in outputs for entry in output.logprobs]
    logprobs = None
    if body.logprobs is not None:
        if prompt and body.scores_echo:
            entries, offset = prompt + entries, offset - len(echo)
        logprobs = make_logprobs(entries, offset, max(1, body.logprobs))
    scores: PromptLogprobs | UnsetType = UNSET
    if prompt and body.prompt_logprobs is not None:
        scores = [make_prompt_logprobs(entry, body.prompt_logprobs) for entry in prompt]
    text = echo + "".join(output.text for output in outputs)
    return CompletionChoice(index, text, logprobs, outputs[-1].finish_reason, scores)


def decode_piece(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def make_logprobs(entries: Sequence[TokenLogprob], offset: int, count: int) -> CompletionLogprobs:
    """`count` alternatives for each token."""
    tokens = [decode_piece(entry.pieces[0]) for entry in entries]
    top = [_make_top(entry, count) if entry.top else None for entry in entries]
    values = [entry.logprob if entry.top else None for entry in entries]
    ends = accumulate(map(len, tokens), initial=offset)
    return CompletionLogprobs(tokens, values, top, list(ends)[:-1])


def _make_top(entry: TokenLogprob, count: int) -> dict[str, float]:
    """The likeliest tokens by their text; where several have the same (a part of a character), the first."""
    found: dict[str, float] = {}
    for piece, (_, logprob) in zip(entry.pieces[1 : 1 + count], entry.top[:count], strict=True):
        found.setdefault(decode_piece(piece), logprob)
    return found


def make_prompt_logprobs(entry: TokenLogprob, count: int) -> dict[str, PromptLogprob] | None:
    """The token and the `count` likeliest in its place, by token id; None for the first of a prompt."""
    if not entry.top:
        return None
    ranked = zip(entry.top, range(1, 1 + len(entry.top)), map(decode_piece, entry.pieces[1:]), strict=True)
    found = {token: PromptLogprob(value, rank, text) for (token, value), rank, text in ranked}
    own = found.get(entry.token, PromptLogprob(entry.logprob, None, decode_piece(entry.pieces[0])))
    likeliest = dict(list(found.items())[:count])
    return {str(token): each for token, each in ({entry.token: own} | likeliest).items()}


@openai.post("/v1/completions", events=encode(*read_examples(CompletionResponse)) + DONE, computes=TEXT)
async def completions(body: CompletionBody, http: HttpRequest) -> CompletionResponse | Response:
    """Complete prompts."""
    engine = await use_engine(http, body.model, stream=body.stream, timeout_s=body.timeout)
    best_of = body.best_of or body.n
    own = 1 if body.logprobs is None and best_of > body.n else body.logprobs
    scores = (body.prompt_logprobs, body.logprobs if body.scores_echo else None)
    scored = max((each for each in scores if each is not None), default=None)
    request_id, limit = f"cmpl-{uuid.uuid4().hex}", body.max_tokens
    request = make_request(
        engine, http, body, request_id, limit, body.stop, logprobs=own, prompt_logprobs=scored
    )
    given = [one if isinstance(one, str) else check_tokens(engine, one, "prompt") for one in body.prompts]
    inputs = [
        Gap(prefix=one, suffix=body.suffix)
        if body.suffix
        else RawText((one,) if isinstance(one, str) else one)
        for one in given
    ]
    request, prompts = await prepare(engine, request, inputs)
    echoes = await _detokenize(engine, body.prompts) if body.echo else [""] * len(prompts)
    streams = submit_all(engine, request, prompts, best_of, AsyncOutputStream)
    name = body.model or loaded(engine)[0].name
    head = CompletionResponse(id=request.id, created=int(time.time()), model=name, choices=[])
    if body.stream:
        events = _events(http.scope["state"]["dialect"], body, head, prompts, echoes, streams)
        return EventStream(engine, streams, events)
    collected = await collect(engine, streams, http)
    usage = make_usage([outputs[-1].usage for outputs in collected], sum(map(len, prompts)))
    if best_of > body.n:
        collected = _best(collected, best_of, body.n)

    def make() -> list[CompletionChoice]:
        return [
            make_choice(body, index, outputs, echo := echoes[index // body.n], len(echo))
            for index, outputs in enumerate(collected)
        ]

    choices = await render(collected, make)
    timings = get_timings(streams[0], len(prompts[0]), collected[0][-1].usage)
    return _replace(head, choices=choices, usage=usage, timings=timings)


async def _events(
    dialect: Dialect,
    body: CompletionBody,
    head: CompletionResponse,
    prompts: Sequence[Prompt],
    echoes: Sequence[str],
    streams: Sequence[AsyncOutputStream],
) -> AsyncIterator[bytes]:
    """Chunks as the choices come, the usage if it was asked for, `[DONE]`; or an error, and the end."""
    opening = b"data: " + _json.encode(head)[:-2] + b'{"index":'
    echoes = [echo for echo in echoes for _ in range(body.n)]
    offsets = list(map(len, echoes))
    yield COMMENT  # there is no event before the first token
    if body.echo and not body.scores_echo:
        for index, echo in enumerate(echoes):
            yield encode(_replace(head, choices=[CompletionChoice(index, echo)]))
    usages: list[Usage | None] = []
    async for index, output in merged(streams):
        if output.error is not None:
            yield dialect.frame_error(output.error.error())
            return
        scored = bool(output.prompt_logprobs)
        if output.finish_reason is None and not output.logprobs and not scored:
            if output.text:  # nearly all chunks: put together as bytes
                yield b"%b%d%b%b%b" % (opening, index, _TEXT, _json.encode(output.text), _CLOSING)
            continue
        echo = echoes[index] if scored and body.scores_echo else ""
        choice = await render([[output]], partial(make_choice, body, index, [output], echo, offsets[index]))
        if choice.logprobs is not None:
            offsets[index] += sum(map(len, choice.logprobs.tokens)) - len(echo)
        if output.finish_reason is not None:
            usages.append(output.usage)
        chunk = _replace(head, choices=[choice])
        if len(usages) == len(streams) and not body.include_usage:
            timings = get_timings(streams[index], len(prompts[index // body.n]), output.usage)
            chunk = _replace(chunk, timings=timings)
        yield encode(chunk)
    if body.include_usage:
        timings = get_timings(streams[0], len(prompts[0]), usages[0])
        yield encode(_replace(head, usage=make_usage(usages, sum(map(len, prompts))), timings=timings))
    yield DONE


async def _detokenize(engine: EngineClient, given: Sequence[str | list[int]]) -> list[str]:
    """The text of each prompt, to be repeated."""
    return [
        one if isinstance(one, str) else (await run_tokenizer(engine, Detokenize(tuple(one)), Text)).text
        for one in given
    ]


def _best(collected: Sequence[list[RequestOutput]], best_of: int, n: int) -> list[list[RequestOutput]]:
    """The n likeliest answers to each prompt, likeliest first."""

    def mean_logprob(outputs: Sequence[RequestOutput]) -> float:
        logprobs = [entry.logprob for output in outputs for entry in output.logprobs]
        return sum(logprobs) / len(logprobs) if logprobs else float("-inf")

    kept: list[list[RequestOutput]] = []
    for begin in range(0, len(collected), best_of):
        kept += sorted(collected[begin : begin + best_of], key=mean_logprob, reverse=True)[:n]
    return kept
