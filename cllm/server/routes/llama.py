"""llama-server's own routes, so that scripts written for it run unchanged."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm import __version__
from cllm.chat.session import count_tokens
from cllm.errors import EngineNotReady, InvalidRequest, NotSupported
from cllm.frontend.async_calls import loaded, run_tokenizer
from cllm.frontend.engine_client import EngineClient
from cllm.models.files import parse_file_type
from cllm.names import is_name
from cllm.server.protocol import llama as bodies
from cllm.server.protocol import llama_responses as api
from cllm.server.protocol.base import LargeJsonRoute, StructResponse, documented
from cllm.server.protocol.chat import ConversationBody
from cllm.server.protocol.responses import InputTokens
from cllm.server.routes import admin, chat, openai, responses
from cllm.server.routes.llama_completion import ROUTE, answer
from cllm.server.sse import encode
from cllm.server.submit import check_tokens, find_model, get_registry, tokenize_pieces, use_engine
from cllm.types import Health
from cllm.workers.messages import Pieces, RenderChat, SlotAction, SpellTokens, Text, TokenizeInfill, Tokens

_COMPLETION = documented(
    api.COMPLETION_EXAMPLE,
    events=(encode(api.LlamaEvent(content="2", tokens=(34,))), encode(api.COMPLETION_EXAMPLE)),
    computes=True,
    several=True,
)
_HIDDEN: dict[str, Any] = {"response_model": None, "include_in_schema": False}
router = APIRouter(tags=["llama-server"], route_class=LargeJsonRoute)


async def get_text(engine: EngineClient, pieces: Sequence[str | int], tokens: tuple[int, ...]) -> str:
    """A prompt as text."""
    if len(pieces) == 1 and isinstance(pieces[0], str):
        return pieces[0]
    return await spell(engine, tokens)


async def spell(engine: EngineClient, tokens: tuple[int, ...]) -> str:
    """Tokens as text, control tokens too."""
    return b"".join((await run_tokenizer(engine, SpellTokens(tokens), Pieces)).pieces).decode(
        "utf-8", "replace"
    )


@router.post(ROUTE, **_COMPLETION)
@router.post("/completions", **_HIDDEN)
async def completion(body: bodies.LlamaCompletionBody, http: HttpRequest) -> Response:
    """Complete prompts."""
    engine = await use_engine(http, body.model, stream=body.stream, timeout_s=body.timeout)
    engine.check_capacity()
    limit = loaded(engine)[1].request_tokens
    prompts = []
    for pieces in body.prompts:
        tokens = await tokenize_pieces(engine, pieces, "prompt", limit, parse_special=True)
        prompts.append((tokens, await get_text(engine, pieces, tokens)))
    return await answer(engine, body, http, prompts)


@router.post("/infill", **_COMPLETION)
async def infill(body: bodies.InfillBody, http: HttpRequest) -> Response:
    """Fill the gap in a text; needs a model with fill-in-the-middle tokens."""
    engine = await use_engine(http, body.model, stream=body.stream, timeout_s=body.timeout)
    engine.check_capacity()
    limit = loaded(engine)[1].request_tokens
    # The text is cut at its far ends so that the answer fits.
    reserved = min(body.n_predict, limit // 2) if body.n_predict > 0 else limit // 4
    task = TokenizeInfill(body.gap(), limit, limit - reserved)
    tokens = (await run_tokenizer(engine, task, Tokens)).tokens
    return await answer(engine, body, http, [(tokens, body.input_prefix + body.prompt)])


@router.post("/tokenize", **documented(api.LlamaTokens((33, 27, 33, 45))))
async def tokenize(body: bodies.LlamaTokenizeBody, http: HttpRequest) -> Response:
    """Convert text to token ids."""
    engine = await use_engine(http, body.model)
    pieces = [body.content] if isinstance(body.content, str) else body.content
    special = {"add_special": body.add_special, "parse_special": body.parse_special}
    tokens = await tokenize_pieces(engine, pieces, "content", **special)
    if not body.with_pieces:
        return StructResponse(api.LlamaTokens(tokens))
    texts = (await run_tokenizer(engine, SpellTokens(tokens), Pieces)).pieces
    return StructResponse(
        api.LlamaTokens([api.make_piece(*pair) for pair in zip(tokens, texts, strict=True)])
    )


@router.post("/detokenize", **documented(api.LlamaContent("1+1=")))
async def detokenize(body: bodies.LlamaDetokenizeBody, http: HttpRequest) -> Response:
    """Convert token ids to text."""
    engine = await use_engine(http, body.model)
    tokens = check_tokens(engine, body.tokens, "tokens")
    return StructResponse(api.LlamaContent(await spell(engine, tokens)))


@router.post("/apply-template", **documented(api.LlamaPrompt("<|im_start|>user\nWhat is AI?<|im_end|>\n")))
async def apply_template(body: bodies.ApplyTemplateBody, http: HttpRequest) -> Response:
    """Render a conversation with the model's chat template."""
    engine = await use_engine(http, body.model)
    conversation = body.conversation()
    task = RenderChat(conversation.for_template())
    return StructResponse(api.LlamaPrompt((await run_tokenizer(engine, task, Text)).text))


@router.post("/chat/completions/input_tokens", **documented(InputTokens(12)))
@router.post("/v1/chat/completions/input_tokens", **_HIDDEN)
async def count_chat(body: ConversationBody, http: HttpRequest) -> Response:
    """Count the prompt tokens of a conversation."""
    engine = await use_engine(http, body.model)
    return StructResponse(InputTokens(await count_tokens(engine, body.conversation(), constrained=False)))


@router.get("/props", **documented(api.PROPS_EXAMPLE))
async def props(http: HttpRequest) -> Response:
    """Describe the model and the defaults."""
    model = find_model(http)
    if model.engine is None:
        raise EngineNotReady(f"{model.name} is not loaded yet")
    info, limits = loaded(model.engine)
    routes = http.app.state.open_routes
    params = api.make_params(http.app.state.defaults)
    described = api.LlamaProps(
        default_generation_settings=api.LlamaSettings(params, limits.request_tokens),
        total_slots=limits.sequences,
        model_alias=info.name,
        model_ftype=parse_file_type(info.description).name,
        model_path=info.file,
        endpoint_slots="-/slots" not in routes,
        endpoint_props="/props" in routes,
        chat_template=info.chat_template or "",
        chat_template_tool_use=info.tool_template or UNSET,
        chat_template_caps=api.make_caps(info.chat_template or ""),
        bos_token=info.begin_text,
        eos_token=info.end_text,
        build_info=f"cllm {__version__}",
        is_sleeping=model.health is Health.SLEEPING,
    )
    return StructResponse(described)


@router.post("/props", **_HIDDEN)
async def change_props(http: HttpRequest) -> Response:
    """Change nothing, as llama-server does; for clients that try."""
    if "/props" not in http.app.state.open_routes:
        raise NotSupported("properties cannot be changed: start the server with --props")
    return StructResponse({"success": True})


@router.get("/lora-adapters", **_HIDDEN)
async def lora_adapters() -> Response:
    """List no LoRA adapters: there are none."""
    return StructResponse([])


@router.get("/slots", **documented([api.LlamaSlot(id=0, n_ctx=4096, is_processing=True)]))
async def slots(http: HttpRequest, fail_on_no_slot: str = "") -> Response:
    """List the slots, and what each computes."""
    if "-/slots" in http.app.state.open_routes:
        raise NotSupported("slots are not shown: start the server without --no-slots")
    engine = await use_engine(http)
    limits = loaded(engine)[1]
    snapshot = await admin.inspect(engine)
    leases = {lease.seq_id: lease.request_id for lease in snapshot.leases}
    if fail_on_no_slot and len(leases) >= limits.sequences:
        raise EngineNotReady("no slot is free")
    running = {state.request.id: state for state in get_registry(http).requests}
    shown = []
    for number in range(limits.sequences):
        slot = api.LlamaSlot(id=number, n_ctx=limits.request_tokens, is_processing=number in leases)
        if (state := running.get(leases.get(number, ""))) is not None:
            left = state.request.max_tokens - state.generated
            slot = msgspec.structs.replace(
                slot,
                id_task=zlib.crc32(state.request.id.encode()),
                n_prompt_tokens=state.request.input_tokens,
                params=api.make_settings(state.request, brief=True),
                next_token=[api.NextToken(left > 0, False, left, state.generated)],
            )
        shown.append(slot)
    return StructResponse(shown)


@router.post("/slots/{id_slot}", **_HIDDEN)
async def use_slot(id_slot: int, action: SlotAction, body: bodies.SlotBody, http: HttpRequest) -> Response:
    """Save the cached prefix of a slot to disk under a name, restore it to RAM, or forget it."""
    engine = await use_engine(http, body.model)
    if not 0 <= id_slot < loaded(engine)[1].sequences:
        raise InvalidRequest("id_slot: there is no such slot", "id_slot")
    if action != "erase" and not is_name(body.filename):
        message = "filename: up to 64 letters, digits, '.', '-' and '_', not a path"
        raise InvalidRequest(message, "filename")
    started = time.perf_counter()
    done = await asyncio.wrap_future(engine.use_slot(action, id_slot, body.filename))
    if action == "erase":
        return StructResponse({"id_slot": id_slot, "n_erased": done.tokens})
    count, size = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
    timings = {f"{action}_ms": 1000 * (time.perf_counter() - started)}
    described = {"id_slot": id_slot, "filename": body.filename, count: done.tokens, size: done.size}
    return StructResponse({**described, "timings": timings})


# Routes of others, without their /v1.
router.get("/models", **_HIDDEN)(openai.models)
router.post("/chat/completions", **_HIDDEN)(chat.chat)
router.post("/responses", **_HIDDEN)(responses.responses)
router.post("/responses/input_tokens", **_HIDDEN)(responses.input_tokens)
router.get("/v1/health", **_HIDDEN)(admin.health)
