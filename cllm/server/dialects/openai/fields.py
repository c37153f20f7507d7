"""Fields that the bodies of several chat APIs share: their types, descriptions and examples."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cllm.server.body import FUNCTION_NAME, Body, ModelName, Name, StopText, about
from cllm.server.generation import GenerationBody, RepeatNames

log = logging.getLogger(__name__)
MAX_CHOICES = 64
MAX_PROMPTS = 256
MAX_MESSAGES = 4096
MAX_TOOLS = 4096
QUESTION = "What is AI?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
REASONING = "The user wants to know what AI is."
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL_CHOICE = "Whether a tool may or must be called, or which; forced calls always match their schema"
CONVERSATION = about(
    "The conversation; an assistant message at its end is continued",
    MESSAGES,
    min_length=1,
    max_length=MAX_MESSAGES,
)

FunctionName = Annotated[
    str, about("Letters, digits, `_`, `-` and `.`, at most 256", "get_weather", pattern=FUNCTION_NAME)
]
# In the history: as a client has it, whatever it is.
CalledName = Annotated[str, about("The tool that was called", "get_weather")]
CallId = Annotated[str | None, about("The id from the response", "call_1")]
Arguments = Annotated[
    Any,
    about(
        "Its arguments, as JSON text or as an object",
        "{}",
        extra_json_schema={"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]},
    ),
]
"""Read by `write_arguments`."""
JsonValue = Annotated[
    Any, Meta(extra_json_schema={"type": ["object", "array", "string", "number", "boolean", "null"]})
]
ToolMode = Literal["none", "auto", "required", "any"]
TemplateOptions = Annotated[
    Annotated[dict[str, Any], Meta(max_length=32)] | None,
    about("Variables for the chat template", {"enable_thinking": False}),
]
ToolDescription = Annotated[
    str | None, about("What the tool does and when to call it, for the model", "The weather in a city, now")
]
ReasoningBudget = Annotated[
    Annotated[int, Meta(ge=-1)] | None, about("Tokens of reasoning; 0: none, -1: no limit", 1024)
]
Effort = Annotated[
    Annotated[str, Meta(max_length=32)] | None,
    about("A variable for the chat template; `none` switches reasoning off", "low"),
]
Stops = StopText | Annotated[tuple[StopText, ...], Meta(max_length=16)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]


def take_tools(value: Mapping[str, Any], *known: str, default: str) -> dict[str, Any]:
    """The body without tools of a type that cannot be called here; a missing type is the `default`."""
    tools = value.get("tools")
    if not isinstance(tools, list):
        return dict(value)
    taken = []
    for tool in tools:
        kind = (tool.get("type") if isinstance(tool, dict) else None) or default
        if kind in known:
            taken.append({**tool, "type": kind} if isinstance(tool, dict) else tool)
        else:
            log.debug("skipped a tool of type %.64r: it cannot be called here", kind)
    return {**value, "tools": taken}


def check_kind(value: Any, *known: str, why: str = "") -> None:
    """Refuse a `tool_choice` whose `type` is not `known`. Raises ValueError."""
    kind = value.get("type") if isinstance(value, dict) else known[0]
    needed = f"it must be {', '.join(known)}"
    if kind is None:
        raise ValueError(f"tool_choice: 'type' is missing; {needed}")
    if kind not in known:
        raise ValueError(f"tool_choice: type {str(kind)[:64]!r} is not supported: {why or needed}")


def list_stops(stop: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else stop or ()


class OpenAIFields(GenerationBody, frozen=True, kw_only=True):
    """Fields that all of OpenAI's routes that generate share."""

    ALIASES = {"repetition_penalty": RepeatNames}

    model: ModelName = None
    user: Annotated[Name | None, about("Ignored", "ann")] = None
    stop: Annotated[Stops | None, about("Texts that end the answer and are not part of it", ["\n\n"])] = None

    @property
    def stops(self) -> tuple[str, ...]:
        return list_stops(self.stop)


class SchemaFormat(msgspec.Struct, Body, kw_only=True):
    """A JSON schema with a name."""

    name: Annotated[Name, about("Ignored")] = "answer"
    schema: Annotated[dict[str, Any], about("The JSON schema that the answer validates against", SCHEMA)]
    strict: Annotated[bool | None, about("Ignored: the answer always validates", True)] = None


class ResponseFormat(msgspec.Struct, Body, kw_only=True):
    """The form of the answer."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"],
        about("`text`, `json_object` (any JSON object), or `json_schema` (validates against it)"),
    ]
    json_schema: Annotated[
        SchemaFormat | None,
        about("The schema; required by the type `json_schema`", {"name": "answer", "schema": SCHEMA}),
    ] = None
    schema: Annotated[dict[str, Any] | None, about("The schema of a `json_object`", SCHEMA)] = None

    def check(self) -> None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is required by the type json_schema, and allowed there only")


class StreamOptionsBody(msgspec.Struct, Body, kw_only=True):
    """Events of a stream beside those of the answer."""

    include_usage: Annotated[bool, about("Send a last chunk with the usage")] = False


class OpenAIBody(OpenAIFields, frozen=True, kw_only=True):
    """Fields that `/v1/completions` and `/v1/chat/completions` share."""

    form = "response_format"

    n: Annotated[
        int, about("How many answers to generate; the prompt is computed once", ge=1, le=MAX_CHOICES)
    ] = 1
    response_format: Annotated[
        ResponseFormat | None, about("Text, any JSON object, or a schema", {"type": "json_object"})
    ] = None
    stream: Annotated[bool, about("Send server-sent events, with `data: [DONE]` at the end")] = False
    stream_options: Annotated[
        StreamOptionsBody | None, about("What a stream sends beside the answer", {"include_usage": True})
    ] = None
    timings_per_token: Annotated[bool, about("Give llama-server's `timings` in every event")] = False
    return_progress: Annotated[bool, about("Send events while the prompt is computed")] = False
    verbose: Annotated[bool, about("Give `__verbose`, what llama-server's `/completion` would say")] = False
    prompt_logprobs: Annotated[
        TopLogprobs | None, about("Score the prompt's tokens, and this many likely ones", 1)
    ] = None

    def form_schema(self) -> dict[str, Any] | None:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        return wanted.json_schema.schema if wanted.json_schema else wanted.schema or {"type": "object"}

    @property
    def scored(self) -> int:
        """Number of alternatives to each token of the prompt; 0 scores none."""
        return 0 if self.prompt_logprobs is None else max(1, self.prompt_logprobs)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage
