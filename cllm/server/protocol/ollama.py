"""Requests of Ollama's routes, under its names."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)

from cllm.chat.conversation import (
    Conversation,
    ToolChoice,
    make_template_options,
    normalize_messages,
    refuse_media,
)
from cllm.errors import InvalidRequest
from cllm.frontend.engine_registry import LATEST
from cllm.server.protocol.base import Body, JsonObject, StopText, Text
from cllm.server.protocol.chat import (
    MAX_MESSAGES,
    MAX_TOOLS,
    MESSAGES,
    QUESTION,
    SCHEMA,
    Arguments,
    CalledName,
    Reasoning,
    Tools,
)
from cllm.server.protocol.embeddings import MAX_INPUTS, InputText
from cllm.server.protocol.sampling import ConstrainedBody, sampling_field

FOREVER = -1.0
MAX_DURATION = 64  # characters
MODEL = "SmolLM2-135M-Instruct"
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(rf"([+-]?)((?:{_PART.pattern})+|0)")


def _parse_seconds(value: Any) -> Any:
    """Seconds of a number or of a duration in Go's form; below 0: for ever."""
    if isinstance(value, str):
        found = _DURATION.fullmatch(value) if len(value) <= MAX_DURATION else None
        if found is None:
            raise ValueError("must be seconds, or a duration as 5m, 1h30m or -1s")
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(found[2]))
        value = -seconds if found[1] == "-" else seconds
    negative = isinstance(value, int | float) and value < 0
    return FOREVER if negative else value


Name = Annotated[Text, Field(min_length=1, max_length=1024)]
KeepAlive = Annotated[
    Annotated[float, BeforeValidator(_parse_seconds)] | None,
    WithJsonSchema(
        {"anyOf": [{"type": "number", "minimum": -1}, {"type": "string", "maxLength": MAX_DURATION}]}
    ),
    Field(
        description="How long the model stays loaded: seconds, or as `5m`; 0: unload it after the answer",
        examples=["5m", 300],
    ),
]
Format = Annotated[
    Literal["", "json"] | JsonObject | None,
    Field(description="`json`: any JSON object; or a JSON schema", examples=["json", SCHEMA]),
]
Think = Annotated[
    bool | Literal["low", "medium", "high"] | None,
    Field(description="Reasoning, on or off, or how much", examples=[False]),
]


def strip_tag(name: str) -> str:
    """A model's name without the tag that every name may have."""
    return name.removesuffix(LATEST)


class OllamaOptions(ConstrainedBody):
    """The sampling fields in Ollama's names. What concerns loading (`num_ctx`, `num_gpu` …) is ignored."""

    form: ClassVar[str] = "format"

    num_predict: int = Field(
        -1,
        ge=-(2**31),
        le=2**31 - 1,
        validation_alias=AliasChoices("num_predict", "max_tokens"),
        description="Maximum number of tokens to generate; below 1: as many as fit",
    )
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] = Field(
        default=[], description="Texts that end the answer and are not part of it", examples=[["\n\n"]]
    )
    repetition_penalty: float = sampling_field(
        "repetition_penalty", validation_alias=AliasChoices("repeat_penalty", "repetition_penalty")
    )
    penalty_last_n: int = sampling_field(
        "penalty_last_n", validation_alias=AliasChoices("repeat_last_n", "penalty_last_n")
    )
    _schema: dict[str, Any] | None = PrivateAttr(None)

    def form_schema(self) -> dict[str, Any] | None:
        return self._schema

    @property
    def max_tokens(self) -> int | None:
        return self.num_predict if self.num_predict > 0 else None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


_OPTION_NAMES = frozenset({*OllamaOptions.model_fields, "max_tokens"})


class OllamaBody(Body):
    """What all of Ollama's routes about one model share."""

    model: Name = Field(
        validation_alias=AliasChoices("model", "name"),
        description="Its name, also with `:latest` (also `name`)",
        examples=[MODEL],
    )


class AnswerBody(OllamaBody):
    """What `/api/chat` and `/api/generate` share."""

    stream: bool = Field(True, description="Send the answer in pieces, a line of JSON each")
    format: Format = None
    options: OllamaOptions = Field(
        default_factory=lambda: OllamaOptions.model_validate({}),
        description="Sampling, in Ollama's names and in cllm's",
        examples=[{"temperature": 0, "num_predict": 32}],
    )
    think: Think = None
    keep_alive: KeepAlive = None
    logprobs: bool = Field(False, description="Return log-probabilities of the sampled tokens")
    top_logprobs: int = Field(0, ge=0, le=20, description="And of this many most likely tokens")

    @model_validator(mode="before")
    @classmethod
    def _take_defaults(cls, value: Any) -> Any:
        """The server's defaults are fields of the body: here they belong to the options."""
        if not isinstance(value, dict) or not isinstance(value.get("options") or {}, dict):
            return value
        given = {name: value[name] for name in _OPTION_NAMES & value.keys() if value[name] is not None}
        return {**value, "options": given | (value.get("options") or {})}

    @model_validator(mode="after")
    def _take_format(self) -> AnswerBody:
        if self.format:
            self.options._schema = {"type": "object"} if self.format == "json" else self.format
        return self

    @property
    def top(self) -> int | None:
        """How many most likely tokens are returned; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    def thinking(self) -> dict[str, Any]:
        """The fields of `Conversation` that say how much the model reasons."""
        if self.think is None:
            return {}
        effort = self.think if isinstance(self.think, str) else None
        options = make_template_options({"enable_thinking": self.think is not False}, effort)
        return {"options": options, "think": self.think is not False}


class OllamaFunction(Body):
    name: CalledName
    arguments: Arguments = "{}"


class OllamaToolCall(Body):
    """A tool call of an earlier answer."""

    id: Text | None = Field(None, description="Its id, if it has one", examples=["call_1"])
    function: OllamaFunction = Field(description="The tool and its arguments", examples=[{"name": "now"}])


class OllamaMessage(Body):
    """One message."""

    role: Literal["system", "user", "assistant", "tool"] = Field(description="The author")
    content: Text | None = Field(None, description="The text", examples=[QUESTION])
    images: list[Text] | None = Field(
        None, description="Refused in the last question: the model accepts text only", examples=[None]
    )
    thinking: Reasoning = None
    tool_calls: Annotated[list[OllamaToolCall], Field(max_length=MAX_TOOLS)] | None = Field(
        None,
        description="Tool calls of an earlier answer",
        examples=[[{"function": {"name": "now", "arguments": {}}}]],
    )
    tool_name: Text | None = Field(None, description="The tool whose result this is", examples=["now"])
    tool_call_id: Text | None = Field(None, description="The call that this answers", examples=["call_1"])

    def openai(self) -> dict[str, Any]:
        """The message in OpenAI's shape."""
        message = self.model_dump(exclude_none=True, exclude={"images", "tool_name"})
        if self.images:
            message["content"] = [
                {"type": "text", "text": self.content or ""},
                *[{"type": "image"}] * len(self.images),
            ]
        if self.tool_name is not None:
            message["name"] = self.tool_name
        return message


class OllamaChatBody(AnswerBody):
    """`POST /api/chat`."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] = Field(
        default=[],
        description="The conversation; without any the model is only loaded, or unloaded",
        examples=[MESSAGES],
    )
    tools: Tools = None

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"model": MODEL, "messages": MESSAGES, "stream": False, "options": {"num_predict": 32}}
        }
    )

    def conversation(self) -> Conversation:
        """The conversation in the terms of `cllm.chat`. Raises InvalidRequest."""
        tools = [tool.function.tool() for tool in self.tools or ()]
        choice = ToolChoice()
        try:
            choice.check([tool.name for tool in tools])
        except ValueError as error:
            raise InvalidRequest(str(error), "tools") from None
        return Conversation(
            messages=normalize_messages(message.openai() for message in self.messages),
            **self.thinking(),
            **choice.apply(tools),
        )


class OllamaGenerateBody(AnswerBody):
    """`POST /api/generate`."""

    prompt: Text = Field(
        "", description="The question; without one the model is only loaded, or unloaded", examples=[QUESTION]
    )
    suffix: Text = Field("", description="The text after the gap that the answer fills", examples=[")"])
    system: Text = Field("", description="Instructions", examples=["Be brief."])
    raw: bool = Field(False, description="Complete the prompt as it is: no chat template")
    images: list[Text] | None = Field(
        None, description="Refused: the model accepts text only", examples=[None]
    )
    template: Text = Field("", description="Refused: the server's `--chat-template` sets it", examples=[""])
    context: list[int] | None = Field(
        None, description="Refused: `/api/chat` takes earlier messages", examples=[None]
    )

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"model": MODEL, "prompt": QUESTION, "stream": False, "options": {"num_predict": 32}}
        }
    )

    def check(self) -> None:
        """Raises InvalidRequest for what cannot be done here."""
        if self.images:
            raise InvalidRequest(refuse_media("image", "images"), "images")
        if self.template:
            raise InvalidRequest(
                "template: a request cannot change it; start the server with --chat-template, or use raw",
                "template",
            )
        if self.context:
            raise InvalidRequest("context: not supported; send the earlier messages to /api/chat", "context")
        if self.suffix and (self.system or self.raw):
            raise InvalidRequest("suffix: it goes with neither system nor raw", "suffix")

    def conversation(self) -> Conversation:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return Conversation(messages=(*system, {"role": "user", "content": self.prompt}), **self.thinking())


class OllamaEmbedBody(OllamaBody):
    """`POST /api/embed`."""

    input: Text | Annotated[list[InputText], Field(max_length=MAX_INPUTS)] = Field(
        description=f"A text or texts; at most {MAX_INPUTS}", examples=["The cat sat.", ["The cat sat."]]
    )
    truncate: bool = Field(True, description="Cut inputs that are too long; else they are refused")
    dimensions: int | None = Field(
        None, ge=1, description="Keep only the first dimensions, scaled to length 1 again", examples=[64]
    )
    keep_alive: KeepAlive = None

    model_config = ConfigDict(json_schema_extra={"example": {"model": MODEL, "input": ["The cat sat."]}})

    @property
    def texts(self) -> tuple[str, ...]:
        given = [self.input] if isinstance(self.input, str) else self.input
        return tuple(text for text in given if text)


class OllamaEmbeddingsBody(OllamaBody):
    """`POST /api/embeddings`, the older form of `/api/embed`."""

    prompt: Text = Field("", description="A text", examples=["The cat sat."])
    keep_alive: KeepAlive = None

    model_config = ConfigDict(json_schema_extra={"example": {"model": MODEL, "prompt": "The cat sat."}})


class ShowBody(OllamaBody):
    """`POST /api/show`."""

    model_config = ConfigDict(json_schema_extra={"example": {"model": MODEL}})


class PullBody(OllamaBody):
    """`POST /api/pull`."""

    stream: bool = Field(True, description="Send the progress, a line of JSON each")

    model_config = ConfigDict(json_schema_extra={"example": {"model": "hf.co/USER/REPO:Q4_K_M"}})


class DeleteBody(OllamaBody):
    """`DELETE /api/delete`."""

    model_config = ConfigDict(json_schema_extra={"example": {"model": "hf:USER/REPO:Q4_K_M"}})
