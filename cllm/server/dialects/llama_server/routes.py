"""llama-server's own routes, so that scripts written for it run unchanged."""

from __future__ import annotations

import asyncio
import time
import zlib
from typing import cast, get_args

import msgspec
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm import __version__
from cllm.chat.session import count_tokens
from cllm.errors import EngineNotReady, InvalidRequest, NotSupported
from cllm.frontend.async_calls import loaded, run_tokenizer
from cllm.messages import Pieces, RenderChat, SlotAction, SpellTokens, Text
from cllm.models.files import parse_file_type
from cllm.names import is_name
from cllm.server.dialect import StructResponse, encode
from cllm.server.dialects.cllm import admin
from cllm.server.dialects.llama_server import answers, bodies, llama_server
from cllm.server.dialects.llama_server.completion import complete, spell
from cllm.server.dialects.openai import openai
from cllm.server.dialects.openai.bodies import ChatBody
from cllm.server.dialects.openai.chat import chat
from cllm.server.dialects.openai.models import models
from cllm.server.submit import check_tokens, find_model, get_registry, use_engine
from cllm.server.submit import tokenize as tokenize_pieces
from cllm.text.prompt import RawText
from cllm.types import Health

_EVENTS = (encode(answers.LlamaEvent(content="2", tokens=(34,))), encode(answers.COMPLETION_EXAMPLE))


@llama_server.post("/completion", answers.COMPLETION_EXAMPLE, events=_EVENTS, computes=True, several=True)
@llama_server.post("/completions", shown=False)
async def completion(body: bodies.LlamaCompletionBody, http: HttpRequest) -> Response:
    """Complete prompts."""
    engine = await use_engine(http, body.model, stream=body.stream, timeout_s=body.timeout)
    inputs: list[RawText] = []
    texts: list[str | None] = []
    for pieces in body.prompts:
        check_tokens(engine, [piece for piece in pieces if isinstance(piece, int)], "prompt")
        inputs.append(RawText(tuple(pieces), parse_special=True))
        texts.append(pieces[0] if len(pieces) == 1 and isinstance(pieces[0], str) else None)
    return await complete(engine, body, http, inputs, texts)


@llama_server.post("/infill", answers.COMPLETION_EXAMPLE, events=_EVENTS, computes=True, several=True)
async def infill(body: bodies.InfillBody, http: HttpRequest) -> Response:
    """Fill the gap in a text; needs a model with fill-in-the-middle tokens."""
    engine = await use_engine(http, body.model, stream=body.stream, timeout_s=body.timeout)
    limit = loaded(engine)[1].request_tokens
    # The text is cut at its far ends so that the answer fits.
    reserved = min(body.n_predict, limit // 2) if body.n_predict > 0 else limit // 4
    return await complete(engine, body, http, [body.gap(limit - reserved)], [body.input_prefix + body.prompt])


@llama_server.post("/tokenize", answers.LlamaTokens((33, 27, 33, 45)))
async def tokenize(body: bodies.LlamaTokenizeBody, http: HttpRequest) -> Response:
    """Convert text to token ids."""
    engine = await use_engine(http, body.model)
    pieces = [body.content] if isinstance(body.content, str) else body.content
    check_tokens(engine, [piece for piece in pieces if isinstance(piece, int)], "content")
    special = {"add_special": body.add_special, "parse_special": body.parse_special}
    tokens = await tokenize_pieces(engine, pieces, **special)
    if not body.with_pieces:
        return StructResponse(answers.LlamaTokens(tokens))
    texts = (await run_tokenizer(engine, SpellTokens(tokens), Pieces)).pieces
    return StructResponse(
        answers.LlamaTokens([answers.make_piece(*pair) for pair in zip(tokens, texts, strict=True)])
    )


@llama_server.post("/detokenize", answers.LlamaContent("1+1="))
async def detokenize(body: bodies.LlamaDetokenizeBody, http: HttpRequest) -> Response:
    """Convert token ids to text."""
    engine = await use_engine(http, body.model)
    tokens = check_tokens(engine, body.tokens, "tokens")
    return StructResponse(answers.LlamaContent(await spell(engine, tokens)))


@llama_server.post("/apply-template", answers.LlamaPrompt("<|im_start|>user\nWhat is AI?<|im_end|>\n"))
async def apply_template(body: bodies.ApplyTemplateBody, http: HttpRequest) -> Response:
    """Render a conversation with the model's chat template."""
    engine = await use_engine(http, body.model)
    conversation = body.conversation()
    task = RenderChat(conversation.for_template())
    return StructResponse(answers.LlamaPrompt((await run_tokenizer(engine, task, Text)).text))


@llama_server.post("/chat/completions/input_tokens", answers.InputTokens(12))
@openai.post("/v1/chat/completions/input_tokens", shown=False)
async def count_chat(body: ChatBody, http: HttpRequest) -> Response:
    """Count the prompt tokens of a conversation."""
    engine = await use_engine(http, body.model)
    return StructResponse(answers.InputTokens(await count_tokens(engine, body.conversation())))


@llama_server.get("/props", answers.PROPS_EXAMPLE)
async def props(http: HttpRequest) -> Response:
    """Describe the model and the defaults."""
    model = find_model(http)
    if model.engine is None:
        raise EngineNotReady(f"{model.name} is not loaded yet")
    info, limits = loaded(model.engine)
    routes = http.app.state.open_routes
    params = answers.make_params(http.app.state.defaults)
    described = answers.LlamaProps(
        default_generation_settings=answers.LlamaSettings(params, limits.request_tokens),
        total_slots=limits.sequences,
        model_alias=info.name,
        model_ftype=parse_file_type(info.description).name,
        model_path=info.file,
        endpoint_slots="-/slots" not in routes,
        endpoint_props="/props" in routes,
        chat_template=info.chat_template or "",
        chat_template_tool_use=info.tool_template or UNSET,
        chat_template_caps=answers.make_caps(info.chat_template or ""),
        bos_token=info.begin_text,
        eos_token=info.end_text,
        build_info=f"cllm {__version__}",
        is_sleeping=model.health is Health.SLEEPING,
    )
    return StructResponse(described)


@llama_server.post("/props", shown=False)
async def change_props(http: HttpRequest) -> Response:
    """Change nothing, as llama-server does; for clients that try."""
    if "/props" not in http.app.state.open_routes:
        raise NotSupported("properties cannot be changed: start the server with --props")
    return StructResponse({"success": True})


@llama_server.get("/lora-adapters", shown=False)
async def lora_adapters() -> Response:
    """List no LoRA adapters: there are none."""
    return StructResponse([])


@llama_server.get("/slots", [answers.LlamaSlot(id=0, n_ctx=4096, is_processing=True)])
async def slots(http: HttpRequest) -> Response:
    """List the slots, and what each computes."""
    if "-/slots" in http.app.state.open_routes:
        raise NotSupported("slots are not shown: start the server without --no-slots")
    engine = await use_engine(http)
    limits = loaded(engine)[1]
    snapshot = await admin.inspect(engine)
    leases = {lease.seq_id: lease.request_id for lease in snapshot.leases}
    if http.query_params.get("fail_on_no_slot") and len(leases) >= limits.sequences:
        raise EngineNotReady("no slot is free")
    running = {state.request.id: state for state in get_registry(http).requests}
    shown = []
    for number in range(limits.sequences):
        slot = answers.LlamaSlot(id=number, n_ctx=limits.request_tokens, is_processing=number in leases)
        if (state := running.get(leases.get(number, ""))) is not None:
            left = state.request.max_tokens - state.generated
            slot = msgspec.structs.replace(
                slot,
                id_task=zlib.crc32(state.request.id.encode()),
                n_prompt_tokens=state.request.input_tokens,
                params=answers.make_settings(state.request, brief=True),
                next_token=[answers.NextToken(left > 0, False, left, state.generated)],
            )
        shown.append(slot)
    return StructResponse(shown)


@llama_server.post("/slots/{id_slot}", shown=False)
async def use_slot(id_slot: str, body: bodies.SlotBody, http: HttpRequest) -> Response:
    """Save the cached prefix of a slot to disk under a name, restore it to RAM, or forget it."""
    action = http.query_params.get("action")
    if action not in get_args(SlotAction):
        raise InvalidRequest("action: it must be save, restore or erase", "action")
    engine = await use_engine(http, body.model)
    slot = int(id_slot) if id_slot.isascii() and id_slot.isdigit() else -1
    if not 0 <= slot < loaded(engine)[1].sequences:
        raise InvalidRequest("id_slot: there is no such slot", "id_slot")
    if action != "erase" and not is_name(body.filename):
        message = "filename: up to 64 letters, digits, '.', '-' and '_', not a path"
        raise InvalidRequest(message, "filename")
    started = time.perf_counter()
    done = await asyncio.wrap_future(engine.use_slot(cast(SlotAction, action), slot, body.filename))
    if action == "erase":
        return StructResponse({"id_slot": slot, "n_erased": done.tokens})
    count, size = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
    timings = {f"{action}_ms": 1000 * (time.perf_counter() - started)}
    answer = {"id_slot": slot, "filename": body.filename, count: done.tokens, size: done.size}
    return StructResponse({**answer, "timings": timings})


# Routes of others, without their /v1; those of the Responses API are beside its own.
llama_server.get("/models", shown=False)(models)
llama_server.post("/chat/completions", shown=False)(chat)
openai.get("/v1/health", shown=False)(admin.health)
