"""Bodies of OpenAI's routes that generate, and the fields that other chat APIs share with them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cllm.chat import conversation as chats
from cllm.limits import MAX_CHOICES, MAX_MESSAGES, MAX_PROMPTS, MAX_STOPS, MAX_TOOLS
from cllm.server.body import FUNCTION_NAME, Body, ModelName, Name, StopText, TokenLimit
from cllm.server.generation import GenerationBody, RepeatNames
from cllm.text.chat_format import Tool

log = logging.getLogger(__name__)
CONVERSATION = Meta(min_length=1, max_length=MAX_MESSAGES)

FunctionName = Annotated[str, Meta(pattern=FUNCTION_NAME)]
_KINDS = [{"type": "object"}, {"type": "string"}, {"type": "null"}]
Arguments = Annotated[Any, Meta(extra_json_schema={"anyOf": _KINDS})]
"""Read by `write_arguments`."""
JsonValue = Annotated[
    Any, Meta(extra_json_schema={"type": ["object", "array", "string", "number", "boolean", "null"]})
]
ToolMode = Literal["none", "auto", "required", "any"]
TemplateOptions = Annotated[dict[str, Any], Meta(max_length=32)] | None
ReasoningBudget = Annotated[int, Meta(ge=-1)] | None
Effort = Annotated[str, Meta(max_length=32)] | None
Stops = StopText | Annotated[tuple[StopText, ...], Meta(max_length=MAX_STOPS)]
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


def check_given(body: Body, *names: str) -> None:
    """Raise ValueError where a field is missing."""
    if missing := [name for name in names if getattr(body, name) is None]:
        raise ValueError(f"{missing[0]!r} is missing")


NO_MEDIA = "multimodal_data is not supported: this model accepts text only"


class OpenAIFields(GenerationBody, frozen=True, kw_only=True):
    """Fields that all of OpenAI's routes that generate share."""

    ALIASES = {"repetition_penalty": RepeatNames}

    model: ModelName = None
    user: Name | None = None
    stop: Stops | None = None


class SchemaFormat(msgspec.Struct, Body, kw_only=True):
    """A JSON schema with a name."""

    name: Name = "answer"
    schema: dict[str, Any]
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, Body, kw_only=True):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None
    schema: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.json_schema is not None and self.type != "json_schema":
            raise ValueError(f"json_schema goes with the type json_schema, not with {self.type}")
        if self.type == "json_schema" and self.json_schema is None and self.schema is None:
            raise ValueError("json_schema is missing: the type json_schema needs it")


class StreamOptionsBody(msgspec.Struct, Body, kw_only=True):
    """Events of a stream beside those of the answer."""

    include_usage: bool = False


class OpenAIBody(OpenAIFields, frozen=True, kw_only=True):
    """Fields that `/v1/completions` and `/v1/chat/completions` share."""

    form = "response_format"

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_options: StreamOptionsBody | None = None
    timings_per_token: bool = False
    return_progress: bool = False
    verbose: bool = False
    prompt_logprobs: TopLogprobs | None = None

    def form_schema(self) -> dict[str, Any] | None:
        if (wanted := self.response_format) is None or wanted.type == "text":
            return None
        return wanted.json_schema.schema if wanted.json_schema else wanted.schema or {"type": "object"}

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ContentPart(msgspec.Struct, Body, kw_only=True):
    """A part of a message. In the history, a note replaces what the model does not take."""

    type: Name
    image_url: JsonValue = None
    input_audio: JsonValue = None
    text: str | None = None
    refusal: str | None = None
    thinking: JsonValue = None

    def __post_init__(self) -> None:
        if self.type in chats.TEXT_PARTS and self.text is None and self.refusal is None:
            raise ValueError("'text' is missing")


class CalledFunction(msgspec.Struct, Body, kw_only=True):
    name: str  # as a client has it, whatever it is
    arguments: Arguments = "{}"

    def __post_init__(self) -> None:
        self.arguments = chats.write_arguments(self.arguments)


class ToolCallBody(msgspec.Struct, Body, kw_only=True):
    """A tool call of an earlier assistant message."""

    id: str | None = None
    type: Name | None = "function"
    function: CalledFunction


class MessageBody(msgspec.Struct, Body, kw_only=True):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_MESSAGES)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCallBody], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    refusal: str | None = None
    reasoning_content: JsonValue = None
    reasoning: JsonValue = None
    thinking: JsonValue = None

    def __post_init__(self) -> None:
        for name in ("reasoning_content", "reasoning", "thinking"):
            if not isinstance(getattr(self, name), str):
                setattr(self, name, None)


def drop_nulls(value: Any) -> Any:
    """A JSON value without the fields that are null, down to those of the objects in lists."""
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: drop_nulls(item) for name, item in value.items() if item is not None}
    return value


class FunctionBody(msgspec.Struct, Body, kw_only=True):
    """A function the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.parameters or {})


class ToolBody(msgspec.Struct, Body, kw_only=True):
    type: Literal["function"]
    function: FunctionBody


class ChosenFunction(msgspec.Struct, Body, kw_only=True):
    name: FunctionName


class AllowedFunctions(msgspec.Struct, Body, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolBody], Meta(min_length=1, max_length=MAX_TOOLS)]


class ChatToolChoice(msgspec.Struct, Body, kw_only=True):
    """The tool that must be called, or those that may be."""

    type: Literal["function", "allowed_tools"]
    function: ChosenFunction | None = None
    allowed_tools: AllowedFunctions | None = None

    def __post_init__(self) -> None:
        check_given(self, self.type)


class ThinkingMode(msgspec.Struct, Body, kw_only=True):
    """Reasoning, as the APIs of some models switch it."""

    type: Name
    budget_tokens: ReasoningBudget = None


class ReasoningOptions(msgspec.Struct, Body, kw_only=True):
    """Reasoning, as OpenRouter's clients ask for it."""

    effort: Effort = None
    enabled: bool | None = None
    max_tokens: ReasoningBudget = None


class TextPart(msgspec.Struct, Body, kw_only=True):
    type: Literal["text"] = "text"
    text: str


class Prediction(msgspec.Struct, Body, kw_only=True):
    """Most of the expected answer, such as a file that is edited."""

    type: Literal["content"] = "content"
    content: str | Annotated[list[TextPart], Meta(max_length=MAX_PROMPTS)]


class ChatBody(OpenAIBody, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    ALIASES = {"max_tokens": ("max_completion_tokens", "max_tokens", "n_predict")}

    messages: Annotated[list[MessageBody], CONVERSATION]
    tools: Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)] = []
    tool_choice: ToolMode | ChatToolChoice = "auto"
    parallel_tool_calls: bool = True
    functions: Annotated[list[FunctionBody], Meta(max_length=MAX_TOOLS)] = []
    function_call: Literal["none", "auto"] | ChosenFunction | None = None
    chat_template_kwargs: TemplateOptions = None
    reasoning_format: Literal["auto", "deepseek", "deepseek-legacy", "none"] = "auto"
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = None
    # How much the model reasons, in the words of several APIs; the first that is given decides.
    reasoning_effort: Effort = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingMode | None = None
    reasoning: ReasoningOptions | None = None
    thinking_budget: ReasoningBudget = None
    reasoning_budget: ReasoningBudget = None
    prediction: Prediction | None = None
    max_tokens: TokenLimit | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None

    @classmethod
    def prepare(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_kind(value.get("tool_choice"), "function", "allowed_tools")
        if value.get("add_generation_prompt") is True and value.get("continue_final_message"):
            raise ValueError("continue_final_message: it cannot be true beside add_generation_prompt")
        tools = value.get("tools")
        for index, tool in enumerate(tools if isinstance(tools, list) else ()):
            if isinstance(tool, dict) and tool.get("type") == "custom":
                raise ValueError(
                    "a tool of type 'custom' is not supported here: declare a function, or use "
                    f"/v1/responses - at `$.tools[{index}]`"
                )
        return take_tools(super().prepare(value), "function", default="function")

    def __post_init__(self) -> None:
        self.set_limit("max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: it needs logprobs to be true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: they cannot be streamed; leave out one of the two")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message: the last message is not the assistant's")
        self._choice.check([function.name for function in self._functions])

    @property
    def top(self) -> int | None:
        """Number of most likely tokens that are returned. None returns no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def older_form(self) -> bool:
        """The tools are `functions`, and the answer's calls a `function_call`."""
        return bool(self.functions) and not self.tools

    @property
    def _functions(self) -> list[FunctionBody]:
        return [tool.function for tool in self.tools] or self.functions

    @property
    def _choice(self) -> chats.ToolChoice:
        if self.older_form:
            wanted = self.function_call or "auto"
            if isinstance(wanted, ChosenFunction):
                return chats.ToolChoice.only(wanted.name)
            return chats.ToolChoice(mode=wanted, parallel=False)
        choice = self.tool_choice
        if isinstance(choice, str):
            return chats.ToolChoice.of(choice, parallel=self.parallel_tool_calls)
        if choice.type == "function":
            assert choice.function is not None
            return chats.ToolChoice.only(choice.function.name)
        assert choice.allowed_tools is not None
        names = tuple(tool.function.name for tool in choice.allowed_tools.tools)
        return chats.ToolChoice(
            mode=choice.allowed_tools.mode, names=names, parallel=self.parallel_tool_calls
        )

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort or (self.reasoning or ReasoningOptions()).effort

    @property
    def budget(self) -> int | None:
        """Maximum number of tokens of reasoning. None sets no limit."""
        mode = self.thinking.budget_tokens if isinstance(self.thinking, ThinkingMode) else None
        nested = (self.reasoning or ReasoningOptions()).max_tokens
        given = (self.thinking_budget, self.reasoning_budget, mode, nested)
        found = next((budget for budget in given if budget is not None), None)
        return None if found == -1 else found

    @property
    def thinks(self) -> bool | None:
        """Enable reasoning. None leaves it to the chat template."""
        mode = self.thinking.type if isinstance(self.thinking, ThinkingMode) else self.thinking
        given = (
            self.enable_thinking,
            {"enabled": True, "disabled": False}.get(mode) if isinstance(mode, str) else mode,
            (self.reasoning or ReasoningOptions()).enabled,
            False if self.budget == 0 else None,
            None if self.effort is None else self.effort != "none",
        )
        return next((wanted for wanted in given if wanted is not None), None)

    def conversation(self, *, sees: bool = False) -> chats.Conversation:
        """The conversation in the terms of `cllm.chat`, for a model that takes pictures if it `sees`."""
        builder = chats.MessageBuilder("messages", sees=sees)
        options = dict(self.chat_template_kwargs or {})
        if self.thinks is not None:
            options.setdefault("enable_thinking", self.thinks)
        content = self.prediction.content if self.prediction is not None else ""
        return chats.Conversation(
            messages=chats.normalize_messages(drop_nulls(msgspec.to_builtins(self.messages)), builder),
            pictures=builder.pictures,
            reasoning=self.reasoning_format != "none",
            continued=self.continue_final_message is not False,
            options=chats.make_template_options(options, self.effort),
            think=self.thinks is not False,
            reasoning_budget=self.budget,
            prediction=content if isinstance(content, str) else "".join(part.text for part in content),
            **self._choice.apply([function.tool() for function in self._functions]),
        )
