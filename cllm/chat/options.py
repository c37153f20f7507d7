"""Options of `LLM` and `AsyncLLM`, checked; those of a chat are the fields of `/v1/chat/completions`."""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict, TypeVar, cast

import msgspec
from msgspec import Meta

from cllm.chat.conversation import Conversation, ToolChoice, make_template_options, normalize_messages
from cllm.errors import InvalidRequest
from cllm.fields import describe_unknown, parse_fields
from cllm.text.chat_format import Tool
from cllm.types import (
    SEED_SPACE,
    ConstraintKind,
    ConstraintSpec,
    ModelInfo,
    Request,
    SamplingParams,
)

Kind = TypeVar("Kind")
Messages = Sequence[Mapping[str, Any]]
Sampling = SamplingParams | None
DEFAULT_MAX_TOKENS = 256
MAX_CHOICES = 64
MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKENS = 1024


class GenerateOptions(TypedDict, total=False):
    """How much is generated."""

    max_tokens: int  # 256 unless given
    stop: str | Sequence[str] | None  # a stop string or several; they are not part of the answer
    timeout: float | None  # seconds; then DeadlineExceeded
    min_tokens: int  # generated before the answer may end
    stop_token_ids: Sequence[int]  # tokens that end the answer, as end tokens do
    prompt_logprobs: int | None  # score the prompt's tokens, with so many likely ones in their places


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
    reasoning_budget: int | None  # tokens of reasoning; 0: none, -1: no limit
    prediction: str | None  # what most of the answer will repeat: then it is generated faster
    reasoning_format: Literal["auto", "none"]  # none: reasoning stays in the text


class WholeOptions(ChatOptions, total=False):
    stream: Literal[False]


class StreamOptions(ChatOptions):
    stream: Literal[True]


class _Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options that have a range: that of the HTTP routes."""

    max_tokens: Annotated[int, Meta(ge=1)] = DEFAULT_MAX_TOKENS
    stop: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=16)] = ()
    timeout: Annotated[float, Meta(gt=0)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_STOP_TOKENS)] = ()
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    reasoning_budget: Annotated[int, Meta(ge=-1)] | None = None
    prediction: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    reasoning_format: Literal["auto", "none"] = "auto"


class _Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    function: _CalledFunction
    id: str | None = None


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


def check_names(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for a keyword argument that means nothing."""
    if unknown := sorted(set(given) - set(known)):
        raise TypeError(f"{call}() got an unexpected keyword argument {describe_unknown(unknown[0], known)}")


def make_request(sampling: Sampling, given: Mapping[str, Any], info: ModelInfo, call: str) -> Request:
    """A request without prompt, from the `GenerateOptions` of a call. Raises InvalidRequest, TypeError."""
    check_names(call, given, GenerateOptions.__annotations__)
    return _make_request(sampling, _parse_options(given), info)


def new_request(template: Request) -> Request:
    """A request like this one, with an id of its own and, where the user gave none, a seed of its own."""
    sampling = template.sampling
    if sampling.seed is None:
        sampling = msgspec.structs.replace(sampling, seed=secrets.randbelow(SEED_SPACE))
    return msgspec.structs.replace(template, id=uuid.uuid4().hex, sampling=sampling)


def make_chat(
    messages: Messages, sampling: Sampling, given: Mapping[str, Any], info: ModelInfo
) -> tuple[Conversation, Request, int]:
    """The arguments of `open_chat`, from the `ChatOptions` of a call. Raises InvalidRequest, TypeError."""
    check_names("chat", given, ChatOptions.__annotations__)
    options = _parse_options(given)
    top = options.top_logprobs
    if top is not None and not options.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=True", "top_logprobs")
    request = _make_request(
        sampling,
        options,
        info,
        logprobs=max(1, top or 0) if options.logprobs else 0,
        constraint=_parse_response_format(cast(ChatOptions, given)),
    )
    conversation = _parse_conversation(messages, cast(ChatOptions, given))
    budget = options.reasoning_budget
    conversation = msgspec.structs.replace(
        conversation,
        think=conversation.think and budget != 0,
        reasoning_budget=None if budget == -1 else budget,
        prediction=options.prediction or "",
    )
    return conversation, new_request(request), options.n


def _parse_options(given: Mapping[str, Any]) -> _Options:
    stop = given.get("stop")
    stops = () if stop is None else (stop,) if isinstance(stop, str) else stop
    options = parse_fields({**given, "stop": stops}, _Options)
    if any("\0" in text for text in options.stop):
        raise InvalidRequest("stop: must not contain NUL", "stop")
    return options


def _make_request(sampling: Sampling, options: _Options, info: ModelInfo, **more: Any) -> Request:
    if sampling is None:
        sampling = SamplingParams()
    elif not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling must be SamplingParams, not {type(sampling).__name__}")
    sampling = parse_fields(msgspec.structs.asdict(sampling), SamplingParams)
    biased, stops = [token for token, _ in sampling.logit_bias], options.stop_token_ids
    for field, tokens in (("logit_bias", biased), ("stop_token_ids", stops)):
        for token in tokens:
            if not 0 <= token < info.vocabulary_size:
                message = f"{field}: {token} is not a token id (0 to {info.vocabulary_size - 1})"
                raise InvalidRequest(message, field)
    if sampling.seed is not None:
        sampling = msgspec.structs.replace(sampling, seed=sampling.seed % SEED_SPACE)
    return Request(
        id="",
        prompt=(),
        max_tokens=options.max_tokens,
        sampling=sampling,
        stop=options.stop,
        timeout_s=options.timeout,
        min_tokens=options.min_tokens,
        stop_token_ids=stops,
        prompt_logprobs=0 if options.prompt_logprobs is None else max(1, options.prompt_logprobs),
        **more,
    )


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
        messages=normalize_messages(map(dict, messages)),
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
