"""Options of `LLM` and `AsyncLLM`, checked; those of a chat are the fields of `/v1/chat/completions`."""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, cast

import msgspec

from cllm.chat.conversation import Conversation, ToolChoice, make_template_options, normalize_message
from cllm.errors import InvalidRequest
from cllm.text.tool_formats import Tool
from cllm.types import SEED_SPACE, ConstraintKind, ConstraintSpec, Request, SamplingParams

Kind = TypeVar("Kind")
Messages = Sequence[Mapping[str, Any]]
Sampling = SamplingParams | None
DEFAULT_MAX_TOKENS = 256
MAX_CHOICES = 64
MAX_TOP_LOGPROBS = 20


class GenerateOptions(TypedDict, total=False):
    """How much is generated."""

    max_tokens: int  # 256 unless given
    stop: Sequence[str]  # stop strings; they are not part of the answer
    timeout: float | None  # seconds; then DeadlineExceeded


class ChatOptions(GenerateOptions, total=False):
    """The options of a chat, named and shaped as in `/v1/chat/completions`."""

    n: int  # choices; the prompt is computed once
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]  # "auto", "none", "required" or {"type": "function", …}
    parallel_tool_calls: bool
    response_format: Mapping[str, Any]  # {"type": "json_object"} or {"type": "json_schema", …}
    logprobs: bool
    top_logprobs: int  # most likely tokens reported with each token; needs logprobs
    chat_template_kwargs: Mapping[str, Any]  # variables of the chat template
    reasoning_effort: str | None
    reasoning_format: Literal["auto", "none"]  # none: reasoning stays in the text


class WholeOptions(ChatOptions, total=False):
    stream: Literal[False]


class StreamOptions(ChatOptions):
    stream: Literal[True]


class _Part(msgspec.Struct):
    text: str
    type: Literal["text"] = "text"


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _Call(msgspec.Struct):
    id: str
    function: _CalledFunction


class _Message(msgspec.Struct):
    """The fields of a message that must have a type; others pass to the template as they are."""

    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _Function
    type: Literal["function"] = "function"


class _Schema(msgspec.Struct):
    schema: dict[str, Any]


class _ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None


def _convert(value: object, kind: type[Kind], field: str) -> Kind:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{field}: {error}", field) from None


def make_request(sampling: Sampling, options: GenerateOptions | ChatOptions, **more: Any) -> Request:
    """A request without its prompt. Raises InvalidRequest."""
    max_tokens, timeout = options.get("max_tokens", DEFAULT_MAX_TOKENS), options.get("timeout")
    stop = tuple(options.get("stop", ()))
    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {max_tokens}: it must be at least 1", "max_tokens")
    if not all(stop):
        raise InvalidRequest("stop: a stop string may not be empty", "stop")
    if timeout is not None and not timeout > 0:
        raise InvalidRequest(f"timeout is {timeout}: it must be above 0 seconds", "timeout")
    return Request(
        id=uuid.uuid4().hex,
        prompt=(),
        max_tokens=max_tokens,
        sampling=sampling or SamplingParams(seed=secrets.randbelow(SEED_SPACE)),
        stop=stop,
        timeout_s=timeout,
        **more,
    )


def make_chat(
    messages: Messages, sampling: Sampling, given: dict[str, Any]
) -> tuple[Conversation, Request, int]:
    """The arguments of `open_chat`, from the `ChatOptions` that are given. Raises InvalidRequest."""
    if unknown := given.keys() - ChatOptions.__annotations__.keys():
        raise TypeError(f"chat() got an unexpected keyword argument {min(unknown)!r}")
    options = cast(ChatOptions, given)
    n, logprobs, top = options.get("n", 1), options.get("logprobs"), options.get("top_logprobs")
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest(f"n is {n}: it must be 1 to {MAX_CHOICES}", "n")
    if top is not None and not logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=True", "top_logprobs")
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"top_logprobs is {top}: it must be 0 to {MAX_TOP_LOGPROBS}", "top_logprobs")
    more = {"logprobs": max(1, top or 0) if logprobs else 0, "constraint": _parse_response_format(options)}
    return _parse_conversation(messages, options), make_request(sampling, options, **more), n


def _parse_conversation(messages: Messages, options: ChatOptions) -> Conversation:
    if not messages:
        raise InvalidRequest("messages: there are none", "messages")
    _convert(list(messages), list[_Message], "messages")
    functions = [tool.function for tool in _convert(options.get("tools") or [], list[_Tool], "tools")]
    choice = _parse_choice(options)
    try:
        choice.check([function.name for function in functions])
    except ValueError as error:
        raise InvalidRequest(str(error), str(error).partition(":")[0]) from None
    tools = [Tool(each.name, each.description or "", each.parameters or {}) for each in functions]
    given = dict(options.get("chat_template_kwargs") or {})
    return Conversation(
        messages=tuple(normalize_message(dict(message)) for message in messages),
        options=make_template_options(given, options.get("reasoning_effort")),
        reasoning=options.get("reasoning_format") != "none",
        **choice.apply(tools),
    )


def _parse_choice(options: ChatOptions) -> ToolChoice:
    wanted: Any = options.get("tool_choice", "auto")
    if wanted in ("none", "auto", "required"):
        return ToolChoice(mode=wanted, parallel=options.get("parallel_tool_calls", True))
    name = _convert(wanted, _Tool, "tool_choice").function.name
    return ToolChoice(mode="required", names=(name,), parallel=False)


def _parse_response_format(options: ChatOptions) -> ConstraintSpec | None:
    if (given := options.get("response_format")) is None:
        return None
    wanted = _convert(given, _ResponseFormat, "response_format")
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        message = "response_format: json_schema is required with type json_schema, and with no other"
        raise InvalidRequest(message, "response_format")
    if wanted.type == "text":
        return None
    schema = {"type": "object"} if wanted.json_schema is None else wanted.json_schema.schema
    return ConstraintSpec(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
