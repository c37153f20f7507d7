"""Requests and responses of Ollama's routes, under its names."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import force_setattr

from cllm.chat import conversation as chats
from cllm.chat.reply import ToolCall
from cllm.frontend.engine_registry import LATEST
from cllm.frontend.served_model import ModelStatus
from cllm.limits import MAX_INPUTS, MAX_MESSAGES, MAX_TOOLS
from cllm.server.body import Body, Timeout
from cllm.server.dialect import encode_line
from cllm.server.dialects.openai import bodies
from cllm.server.dialects.openai.chat import ChatTokenLogprob
from cllm.server.dialects.openai.embeddings import InputText
from cllm.server.dialects.openai.models import ModelDetails, make_details, make_model
from cllm.server.examples import CREATED, make_example, read_examples
from cllm.server.generation import GenerationBody
from cllm.text.call_parser import parse_object
from cllm.text.prompt import Gap, RawText
from cllm.types import Limits, ModelInfo

VERSION = "0.20.0"  # of Ollama: VS Code asks for 0.6.4 or newer, others for the version of a route they use
NEVER = timedelta(days=365_00)  # until a model expires that stays loaded
FOREVER = -1.0
MAX_DURATION = 64  # characters
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(rf"([+-]?)((?:{_PART.pattern})+|0)")

OllamaName = Annotated[str, Meta(min_length=1, max_length=1024)]
_DURATION_TEXT = {"type": "string", "maxLength": MAX_DURATION}
KeepAlive = Annotated[
    Any, Meta(extra_json_schema={"anyOf": [{"type": "number", "minimum": -1}, _DURATION_TEXT]})
]
"""Seconds or None, as `OllamaBody.prepare` reads it."""
Format = Literal["", "json"] | dict[str, Any] | None
Think = bool | Literal["low", "medium", "high"] | None


def parse_seconds(value: Any) -> float:
    """Seconds of a number or of a duration in Go's form; all below 0 are `FOREVER`. Raises ValueError."""
    if isinstance(value, str) and len(value) <= MAX_DURATION and (found := _DURATION.fullmatch(value)):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(found[2]))
        value = -seconds if found[1] == "-" else seconds
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("keep_alive: must be seconds, or a duration as 5m, 1h30m or -1s")
    return FOREVER if value < 0 else value


def strip_tag(name: str) -> str:
    """A model's name without the tag that every name may have."""
    return name.removesuffix(LATEST)


class OllamaBody(msgspec.Struct, Body, kw_only=True):
    """Common fields of Ollama's routes about one model."""

    ALIASES = {"model": ("model", "name")}

    model: OllamaName

    @classmethod
    def prepare(cls, value: dict[str, Any]) -> dict[str, Any]:
        given = value.get("keep_alive")
        return value if given is None else {**value, "keep_alive": parse_seconds(given)}


class OllamaOptions(GenerationBody, frozen=True, kw_only=True):
    """The sampling fields in Ollama's names. What concerns loading (`num_ctx`, `num_gpu` …) is ignored."""

    form = "format"
    ALIASES = {
        "num_predict": ("num_predict", "max_tokens"),
        "repetition_penalty": ("repeat_penalty", "repetition_penalty"),
        "penalty_last_n": ("repeat_last_n", "penalty_last_n"),
    }

    num_predict: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = -1
    stop: bodies.Stops = ()
    format: Format = None

    def form_schema(self) -> dict[str, Any] | None:
        return {"type": "object"} if self.format == "json" else self.format or None

    @property
    def max_tokens(self) -> int | None:
        return self.num_predict if self.num_predict > 0 else None


_OPTION_NAMES = frozenset({*OllamaOptions.__struct_fields__, "max_tokens"} - {"format"})


class OllamaAnswerBody(OllamaBody, kw_only=True):
    """Common fields of `/api/chat` and `/api/generate`."""

    stream: bool = True
    format: Format = None
    options: OllamaOptions = msgspec.field(default_factory=OllamaOptions)
    think: Think = None
    keep_alive: KeepAlive = None
    logprobs: bool = False
    top_logprobs: bodies.TopLogprobs = 0

    @classmethod
    def prepare(cls, value: dict[str, Any]) -> dict[str, Any]:
        """The server's defaults are fields of the body: here they belong to the options."""
        value, options = super().prepare(value), value.get("options") or {}
        if not isinstance(options, dict):
            return value
        given = {name: value[name] for name in _OPTION_NAMES & value.keys() if value[name] is not None}
        return {**value, "options": given | options}

    def __post_init__(self) -> None:
        force_setattr(self.options, "format", self.format)
        force_setattr(self.options, "stream", self.stream)  # the body's default is another

    @property
    def top(self) -> int | None:
        """Number of most likely tokens to return. None disables log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    @property
    def raw_prompt(self) -> RawText | Gap | None:
        """The prompt where it is no conversation."""
        return None

    def conversation(self, *, sees: bool = False) -> chats.Conversation:
        """The conversation in the terms of `cllm.chat`. Raises InvalidRequest."""
        raise NotImplementedError

    def thinking(self) -> dict[str, Any]:
        """The fields of `Conversation` that say how much the model reasons."""
        if self.think is None:
            return {}
        effort = self.think if isinstance(self.think, str) else None
        options = chats.make_template_options({"enable_thinking": self.think is not False}, effort)
        return {"options": options, "think": self.think is not False}


class OllamaToolCall(msgspec.Struct, Body, kw_only=True):
    """A tool call of an earlier answer."""

    id: str | None = None
    function: bodies.CalledFunction


Images = list[str] | None


class OllamaMessage(msgspec.Struct, Body, kw_only=True):
    """One message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    images: Images = None
    thinking: bodies.JsonValue = None
    tool_calls: Annotated[list[OllamaToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.thinking, str):
            self.thinking = None

    def as_dict(self) -> dict[str, Any]:
        """The message in OpenAI's shape."""
        message: dict[str, Any] = bodies.drop_nulls(msgspec.to_builtins(self))
        if images := message.pop("images", ()):
            message["content"] = [
                {"type": "text", "text": self.content or ""},
                *({"type": "image", "image_url": image} for image in images),
            ]
        if (name := message.pop("tool_name", None)) is not None:
            message["name"] = name
        return message


class OllamaChatBody(OllamaAnswerBody, kw_only=True):
    """`POST /api/chat`."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] = []
    tools: Annotated[list[bodies.ToolBody], Meta(max_length=MAX_TOOLS)] | None = None

    @classmethod
    def prepare(cls, value: dict[str, Any]) -> dict[str, Any]:
        return bodies.take_tools(super().prepare(value), "function", default="function")

    def __post_init__(self) -> None:
        super().__post_init__()
        chats.ToolChoice().check([tool.function.name for tool in self.tools or ()])

    def conversation(self, *, sees: bool = False) -> chats.Conversation:
        builder = chats.MessageBuilder("messages", sees=sees)
        return chats.Conversation(
            messages=chats.normalize_messages((message.as_dict() for message in self.messages), builder),
            pictures=builder.pictures,
            **self.thinking(),
            **chats.ToolChoice().apply([tool.function.tool() for tool in self.tools or ()]),
        )


class OllamaGenerateBody(OllamaAnswerBody, kw_only=True):
    """`POST /api/generate`."""

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False
    images: Images = None
    template: str = ""
    context: list[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.images and (self.raw or self.suffix):
            raise ValueError("images: they go with neither raw nor suffix")
        if self.template:
            raise ValueError(
                "template: a request cannot change it; start the server with --chat-template, or use raw"
            )
        if self.context:
            raise ValueError("context: not supported; send the earlier messages to /api/chat")
        if self.suffix and (self.system or self.raw):
            raise ValueError("suffix: it goes with neither system nor raw")

    @property
    def raw_prompt(self) -> RawText | Gap | None:
        if self.suffix:
            return Gap(prefix=self.prompt, suffix=self.suffix)
        return RawText((self.prompt,)) if self.raw else None

    def conversation(self, *, sees: bool = False) -> chats.Conversation:
        builder = chats.MessageBuilder("images", sees=sees)
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = OllamaMessage(role="user", content=self.prompt, images=self.images).as_dict()
        messages = (*system, *chats.normalize_messages([asked], builder))
        return chats.Conversation(messages=messages, pictures=builder.pictures, **self.thinking())


class EmbedOptions(msgspec.Struct, Body, kw_only=True, frozen=True):
    """Of the options of a generation, what embeddings take, too."""

    timeout: Timeout = None


class OllamaEmbedBody(OllamaBody, kw_only=True):
    """`POST /api/embed`."""

    options: EmbedOptions = EmbedOptions()
    input: str | Annotated[tuple[InputText, ...], Meta(max_length=MAX_INPUTS)]
    truncate: bool = True
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    keep_alive: KeepAlive = None

    @property
    def texts(self) -> tuple[str, ...]:
        given = (self.input,) if isinstance(self.input, str) else self.input
        return tuple(text for text in given if text)


class OllamaEmbeddingsBody(OllamaBody, kw_only=True):
    """`POST /api/embeddings`, the older form of `/api/embed`."""

    options: EmbedOptions = EmbedOptions()
    prompt: str = ""
    keep_alive: KeepAlive = None


class ShowBody(OllamaBody, kw_only=True):
    """`POST /api/show`."""


class PullBody(OllamaBody, kw_only=True):
    """`POST /api/pull`."""

    stream: bool = True


class DeleteBody(OllamaBody, kw_only=True):
    """`DELETE /api/delete`."""


class CopyBody(msgspec.Struct, Body, kw_only=True):
    """`POST /api/copy`."""

    source: Annotated[str, Meta(min_length=1, max_length=1024)]
    destination: Annotated[str, Meta(min_length=1, max_length=256)]


# Responses ---------------------------------------------------------------------------------------------


class VersionResponse(msgspec.Struct, frozen=True):
    version: str


class OllamaFunctionResult(msgspec.Struct):
    name: str
    arguments: dict[str, Any]


class OllamaCallResult(msgspec.Struct):
    """A tool call of an answer; its arguments are an object, and come whole."""

    function: OllamaFunctionResult
    id: str = ""


def make_call(call: ToolCall) -> OllamaCallResult:
    """A call, with none of its arguments where the length limit cut them."""
    return OllamaCallResult(OllamaFunctionResult(call.name, parse_object(call.arguments) or {}), call.id)


class AnswerMessage(msgspec.Struct):
    """An answer, or a piece of one."""

    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCallResult] | UnsetType = UNSET


class AnswerPart(msgspec.Struct, kw_only=True):
    """Common fields of answers. The last one of a stream is `done`, with counts and times in nanoseconds."""

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


CHAT_EXAMPLE, *_CHAT_LINES = read_examples(ChatAnswer)
CHAT_LINES = b"".join(map(encode_line, _CHAT_LINES))
GENERATE_EXAMPLE, *_GENERATE_LINES = read_examples(GenerateAnswer)
GENERATE_LINES = b"".join(map(encode_line, _GENERATE_LINES))


class EmbedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/api/embed`. Each embedding has length 1."""

    model: str
    embeddings: Sequence[Any]  # lists of numbers
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


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


def format_time(seconds: float | None = None) -> str:
    """A time (default: now) as Go writes it."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")


def add_tag(name: str) -> str:
    """A name with the tag that Ollama's clients expect, unless it has one."""
    return name if ":" in name else name + LATEST


def _format_count(parameters: int) -> str:
    unit, sign = next(((10**n, s) for n, s in ((9, "B"), (6, "M")) if parameters >= 10**n), (1000, "K"))
    return f"{parameters / unit:.1f}{sign}" if unit == 10**9 else f"{parameters / unit:.2f}{sign}"


def make_entry(info: ModelInfo, created: int, name: str = "") -> dict[str, Any]:
    name = name or add_tag(info.name)
    digest = hashlib.sha256(f"{info.name} {info.size_bytes} {info.parameters}".encode()).hexdigest()
    return {
        "name": name,
        "model": name,
        "modified_at": format_time(created),
        "size": info.size_bytes,
        "digest": digest,
        "details": make_details(info, _format_count(info.parameters)),
    }


def make_running(info: ModelInfo, created: int, status: ModelStatus) -> RunningModel:
    """A loaded model, with the time when it is unloaded."""
    gpus = sum(size for device, size in status.memory_bytes.items() if device != "host")
    memory = sum(status.memory_bytes.values())  # in a cluster it is not known
    return RunningModel(
        **{**make_entry(info, created), "size": memory or info.size_bytes},
        expires_at=format_time(status.expires_at or (datetime.now(UTC) + NEVER).timestamp()),
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
        details=make_details(info, _format_count(info.parameters)),
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


SHOW_EXAMPLE = make_shown(make_example(ModelInfo), make_example(Limits), CREATED)
