"""OpenAI's `/v1/models`, with what llama-server and Ollama's clients look for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
from starlette.requests import Request as HttpRequest

from cllm.config import split_list
from cllm.errors import EngineNotReady
from cllm.frontend.served_model import ServedModel
from cllm.models.files import parse_file_type
from cllm.server.dialects.openai import openai
from cllm.server.submit import get_registry
from cllm.types import Limits, ModelInfo, Pooling

# In the chat templates of models that reason.
REASONING_MARKERS = ("<think>", "[THINK]", "<|channel|>", "reasoning_content", "enable_thinking")


class ModelMeta(msgspec.Struct, frozen=True):
    """The description of a model under llama-server's names."""

    n_vocab: int
    n_ctx: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int
    ftype: str


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model. `capabilities`: completion, chat, tools, reasoning, vision, audio, embeddings, rerank."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "cllm"
    root: str
    parent: str | msgspec.UnsetType = msgspec.UNSET  # of an adapter: its model
    max_model_len: int
    context_length: int
    capabilities: list[str]
    loaded: bool = True
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    meta: ModelMeta


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True):
    parent_model: str = ""
    format: str = "gguf"
    family: str
    families: tuple[str, ...]
    parameter_size: str = ""
    quantization_level: str


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The same model as llama-server lists it for Ollama's clients."""

    name: str
    model: str
    modified_at: str = ""
    size: str = ""
    digest: str = ""
    type: str = "model"
    description: str = ""
    tags: tuple[str, ...] = ("",)
    capabilities: tuple[str, ...] = ("completion",)
    parameters: str = ""
    details: ModelDetails


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]
    models: list[ModelEntry] = []


def make_details(info: ModelInfo, parameter_size: str = "") -> ModelDetails:
    return ModelDetails(
        family=info.architecture,
        families=(info.architecture,),
        parameter_size=parameter_size,
        quantization_level=parse_file_type(info.description).quant,
    )


def make_model(
    info: ModelInfo,
    limits: Limits | None,
    created: int,
    name: str = "",
    *,
    aliases: tuple[str, ...] = (),
    tags: tuple[str, ...] = (),
    loaded: bool = True,
) -> Model:
    """A model that is served, under the `name` it was asked for by. Without limits it was never loaded."""
    context = info.context_train
    if limits is not None:
        context = limits.request_tokens if info.generates else limits.embed.tokens
    return Model(
        id=name or info.name,
        created=created,
        root=info.name,
        max_model_len=context,
        context_length=context,
        capabilities=list(_list_capabilities(info)),
        loaded=loaded,
        aliases=(info.name, *aliases),
        tags=tags,
        meta=ModelMeta(
            info.vocabulary_size,
            context,
            info.context_train,
            info.embedding_length,
            info.parameters,
            info.size_bytes,
            parse_file_type(info.description).name,
        ),
    )


def _list_capabilities(info: ModelInfo) -> Iterator[str]:
    template = info.tool_template or info.chat_template
    if info.generates:
        yield "completion"
        if template is not None:
            yield from ("chat", "tools")
            if any(marker in template for marker in REASONING_MARKERS):
                yield "reasoning"
        yield from ["vision"] * info.sees + ["audio"] * info.hears
    yield "rerank" if info.pooling is Pooling.RANK else "embeddings"


@openai.get("/v1/models")
async def models(http: HttpRequest) -> ModelList:
    """List the models."""
    served = get_registry(http).served
    infos = [model.info for model in served if model.info is not None]
    entries = [ModelEntry(name=info.name, model=info.name, details=make_details(info)) for info in infos]
    return ModelList(data=[each for model in served for each in _describe_all(model)], models=entries)


def _describe_all(model: ServedModel) -> Iterator[Model]:
    """A model, and one for each of its adapters."""
    yield (base := describe_model(model))
    for name in model.adapters:
        yield msgspec.structs.replace(base, id=f"{base.id}:{name}", aliases=(), parent=base.id)


@openai.get("/v1/models/{name:path}")
async def model(name: str, http: HttpRequest) -> Model:
    """Describe the model that serves requests for this name."""
    found, adapter = get_registry(http).find_adapter(name)
    described = describe_model(found, name)
    return msgspec.structs.replace(described, parent=described.root) if adapter else described


def describe_model(model: ServedModel, name: str = "") -> Model:
    """A model, under the `name` it was asked for by. What is not known before a load is the header's."""
    if model.info is None:
        raise EngineNotReady("the model is still loading")
    names = {"aliases": model.config.aliases, "tags": tuple(split_list(model.config.engine.tags))}
    return make_model(model.info, model.limits, model.created, name, **names, loaded=model.loaded)
