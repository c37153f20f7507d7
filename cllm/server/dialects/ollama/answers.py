"""Responses of Ollama's routes, under its names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from cllm.chat.reply import ToolCall
from cllm.frontend.engine_registry import LATEST
from cllm.frontend.served_model import ModelStatus
from cllm.models.files import parse_file_type
from cllm.server.dialects.cllm.generate import MODEL_EXAMPLE
from cllm.server.dialects.ollama.bodies import MODEL
from cllm.server.dialects.openai.chat import ChatTokenLogprob
from cllm.server.dialects.openai.fields import REASONING
from cllm.server.dialects.openai.models import ModelDetails, make_model
from cllm.text.argument_values import parse_object
from cllm.types import Limits, ModelInfo

VERSION = "0.20.0"  # of Ollama: VS Code asks for 0.6.4 or newer, others for the version of a route they use
CREATED = "2026-01-01T00:00:00Z"
NEVER = timedelta(days=365_00)  # until a model expires that stays loaded


class VersionResponse(msgspec.Struct, frozen=True):
    version: str


class OllamaFunctionResult(msgspec.Struct):
    name: str
    arguments: dict[str, Any]


class OllamaCallResult(msgspec.Struct):
    """A tool call of an answer; its arguments are an object, and come whole."""

    function: OllamaFunctionResult
    id: str = ""

    @classmethod
    def from_call(cls, call: ToolCall) -> OllamaCallResult:
        """None of the arguments, where the length limit cut them."""
        return cls(OllamaFunctionResult(call.name, parse_object(call.arguments) or {}), call.id)


class AnswerMessage(msgspec.Struct):
    """An answer, or a piece of one."""

    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCallResult] | UnsetType = UNSET


class AnswerPart(msgspec.Struct, kw_only=True):
    """What all answers have. The last one of a stream is `done` and has counts, and times in nanoseconds."""

    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET


class ChatAnswer(AnswerPart, kw_only=True):
    """The response of `/api/chat`, or a line of its stream."""

    message: AnswerMessage


class GenerateAnswer(AnswerPart, kw_only=True):
    """The response of `/api/generate`, or a line of its stream."""

    response: str
    thinking: str | UnsetType = UNSET


_HEAD: dict[str, Any] = {"model": MODEL, "created_at": CREATED}
_END: dict[str, Any] = {
    "done": True,
    "done_reason": "stop",
    "total_duration": 40_000_000,
    "load_duration": 100_000,
    "prompt_eval_count": 4,
    "prompt_eval_duration": 21_000_000,
    "eval_count": 3,
    "eval_duration": 18_000_000,
}
CHAT_EXAMPLE = ChatAnswer(**_HEAD, message=AnswerMessage(content="AI is …"), **_END)
CHAT_LINES = (
    ChatAnswer(**_HEAD, message=AnswerMessage(content="AI")),
    ChatAnswer(**_HEAD, message=AnswerMessage(), **_END),
)
GENERATE_EXAMPLE = GenerateAnswer(**_HEAD, response="AI is …", **_END)
GENERATE_LINES = (
    GenerateAnswer(**_HEAD, response="AI", thinking=REASONING),
    GenerateAnswer(**_HEAD, response="", **_END),
)


class EmbedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/api/embed`. Each embedding has length 1."""

    model: str
    embeddings: Sequence[Any]  # lists of numbers
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


EMBED_EXAMPLE = EmbedAnswer(
    model=MODEL, embeddings=[[0.118, -0.042, 0.307]], total_duration=14_000_000, prompt_eval_count=5
)


class OldEmbedAnswer(msgspec.Struct, frozen=True):
    """The response of `/api/embeddings`; not scaled."""

    embedding: list[float]


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model. The digest stands for its name and size, not for its bytes."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class RunningModel(ListedModel, frozen=True, kw_only=True):
    """A model that is loaded."""

    expires_at: str
    size_vram: int = 0
    context_length: int


class ModelsAnswer(msgspec.Struct, frozen=True):
    """The response of `/api/tags`."""

    models: list[ListedModel]


class RunningAnswer(msgspec.Struct, frozen=True):
    """The response of `/api/ps`."""

    models: list[RunningModel]


class ShowAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/api/show`. The context length is what a request may have here."""

    modelfile: str
    parameters: str = ""
    template: str
    license: str = ""
    modified_at: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]


class ProgressLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of `/api/pull`; the last one says `success`."""

    status: str
    digest: str = ""
    total: int = 0
    completed: int = 0


def format_time(seconds: float | None = None) -> str:
    """A time (default: now) as Go writes it."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")


def add_tag(name: str) -> str:
    """A name with the tag that Ollama's clients expect, unless it has one."""
    return name if ":" in name else name + LATEST


def _make_details(info: ModelInfo) -> ModelDetails:
    return ModelDetails(
        family=info.architecture,
        families=(info.architecture,),
        parameter_size=_format_count(info.parameters),
        quantization_level=parse_file_type(info.description).quant,
    )


def _format_count(parameters: int) -> str:
    unit, sign = next(((10**n, s) for n, s in ((9, "B"), (6, "M")) if parameters >= 10**n), (1000, "K"))
    return f"{parameters / unit:.1f}{sign}" if unit == 10**9 else f"{parameters / unit:.2f}{sign}"


def _make_entry(info: ModelInfo, created: int) -> dict[str, Any]:
    name = add_tag(info.name)
    digest = hashlib.sha256(f"{info.name} {info.size_bytes} {info.parameters}".encode()).hexdigest()
    return {
        "name": name,
        "model": name,
        "modified_at": format_time(created),
        "size": info.size_bytes,
        "digest": digest,
        "details": _make_details(info),
    }


def make_listed(info: ModelInfo, created: int) -> ListedModel:
    return ListedModel(**_make_entry(info, created))


def make_running(info: ModelInfo, created: int, status: ModelStatus) -> RunningModel:
    """A loaded model, with the time when it is unloaded."""
    expires = status.expires_at or (datetime.now(UTC) + NEVER).timestamp()
    gpus = sum(size for device, size in status.memory_bytes.items() if device != "host")
    return RunningModel(
        **_make_entry(info, created),
        expires_at=format_time(expires),
        size_vram=gpus,
        context_length=status.context,
    )


def make_shown(info: ModelInfo, limits: Limits | None, created: int) -> ShowAnswer:
    model = make_model(info, limits, created)
    named = {"chat": "", "reasoning": "thinking", "embeddings": "embedding"}
    family = info.architecture
    return ShowAnswer(
        modelfile=f"FROM {info.name}\n",
        template=info.chat_template or "",
        modified_at=format_time(created),
        details=_make_details(info),
        model_info={
            "general.architecture": family,
            "general.basename": info.name,
            "general.parameter_count": info.parameters,
            f"{family}.context_length": model.context_length,
            f"{family}.embedding_length": info.embedding_length,
            f"{family}.block_count": info.layers,
            f"{family}.vocab_size": info.vocabulary_size,
        },
        capabilities=[named.get(each, each) for each in model.capabilities if named.get(each, each)],
    )


_INFO = {name: getattr(MODEL_EXAMPLE, name) for name in ModelInfo.__struct_fields__}
SHOW_EXAMPLE = make_shown(ModelInfo(**_INFO), MODEL_EXAMPLE.limits, 1767225600)
LISTED_EXAMPLE = make_listed(ModelInfo(**_INFO), 1767225600)
RUNNING_EXAMPLE = RunningModel(
    **_make_entry(ModelInfo(**_INFO), 1767225600), expires_at=CREATED, context_length=4096
)
PULL_LINES = (
    ProgressLine("pulling manifest"),
    ProgressLine("pulling", "sha256:8f0c2d7e", 96862464, 1048576),
    ProgressLine("success"),
)
