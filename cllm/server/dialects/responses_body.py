"""Requests and responses of OpenAI's `/v1/responses`: items, tools, output, usage."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import force_setattr

from cllm.chat import conversation as chats
from cllm.limits import MAX_MESSAGES, MAX_TOOLS
from cllm.server.body import Body, Metadata, Name, TokenLimit
from cllm.server.dialects.openai import bodies
from cllm.server.dialects.openai.chat import ChatTokenLogprob
from cllm.text.chat_format import Tool

log = logging.getLogger(__name__)
LOGPROBS = "message.output_text.logprobs"
CUSTOM_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_ONLY = "this server executes no tools, it only returns calls of the client's own tools"
_FIELDS = {  # of an item, by its kind; items of other kinds say nothing here
    "message": ("role", "content"),
    "reasoning": ("content", "summary"),
    "call": ("call_id", "name", "arguments", "input", "action"),
    "output": ("call_id", "output"),
}


class ResponseTool(bodies.FunctionBody, kw_only=True):
    """A function, or a custom tool: its argument is a text, the model sees a function with one `input`."""

    type: Literal["function", "custom"]
    format: dict[str, Any] | None = None

    def tool(self) -> Tool:
        if self.type == "function":
            return super().tool()
        grammar = (self.format or {}).get("definition")
        described = (self.description, grammar and f"The input follows this grammar:\n{grammar}")
        return Tool(self.name, "\n\n".join(filter(None, described)), CUSTOM_INPUT)

    def echo(self) -> dict[str, Any]:
        """The tool as a response repeats it."""
        custom, function = "type name description format", "name description parameters strict type"
        names = custom if self.type == "custom" else function
        return {name: getattr(self, name) for name in names.split()}


Parts = Annotated[list[bodies.ContentPart], Meta(max_length=MAX_MESSAGES)]


def join_text(content: str | list[bodies.ContentPart], builder: chats.MessageBuilder, role: str) -> str:
    if isinstance(content, str):
        return content
    return chats.join_texts(
        (part.text or part.refusal or "")
        if part.type in chats.TEXT_PARTS
        else builder.show_media(role, part.type, part.image_url)
        for part in content
    )


class ResponseItem(msgspec.Struct, Body, kw_only=True, omit_defaults=True):
    """A message, reasoning, a tool call of any type, or its output."""

    type: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Parts | None = None
    summary: Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: bodies.Arguments = None
    input: bodies.JsonValue = None
    action: bodies.JsonValue = None
    output: str | Parts | dict[str, Any] | None = None

    @classmethod
    def prepare(cls, value: dict[str, Any]) -> dict[str, Any]:
        kind = value.get("type") or "message"
        fields = {name: value[name] for name in _FIELDS.get(get_kind(kind), ()) if name in value}
        return {"type": kind, **fields}

    def __post_init__(self) -> None:
        if self.kind == "message":
            bodies.check_given(self, "role", "content")
        elif self.kind == "reasoning":
            if isinstance(self.content, str):
                raise ValueError("'content' of reasoning is a list of parts")
            if any(part.text is None for part in (*(self.content or ()), *(self.summary or ()))):
                raise ValueError("'text' is missing")
        if self.arguments is not None:
            self.arguments = chats.write_arguments(self.arguments)

    @property
    def kind(self) -> str:
        return get_kind(self.type)

    def add_to(self, builder: chats.MessageBuilder) -> None:
        """Add the item to the messages of a conversation. Raises InvalidRequest."""
        match self.kind:
            case "message":
                content = self.content or ""
                role = "system" if self.role == "developer" else str(self.role)
                builder.add_text(role, join_text(content, builder, role))
            case "reasoning":
                parts = self.content or self.summary or ()
                if text := "".join(part.text or "" for part in parts if isinstance(part, bodies.ContentPart)):
                    builder.add_reasoning(text)
            case "call":
                given = {"input": self.input} if self.action is None else self.action
                arguments = chats.write_arguments(given) if self.arguments is None else self.arguments
                name = self.name or str(self.type).removesuffix("_call")
                builder.add_tool_call(self.call_id, name, arguments)
            case _:
                output = self.output or ""
                if isinstance(output, dict):
                    output = chats.write_arguments(output)
                builder.add_tool_result(self.call_id, join_text(output, builder, "tool"))


def get_kind(kind: Any) -> str:
    """`message`, `reasoning`, `call`, `output`, or the type of an item that is skipped."""
    kind = str(kind or "message")
    if kind.endswith("_call_output"):
        return "output"
    return "call" if kind.endswith("_call") else kind


def take_items(value: Any) -> Any:
    """Items without those that are skipped: references, and calls that another server executed."""
    if not isinstance(value, list):
        return value
    taken = []
    for item in value:
        kind = get_kind(item.get("type")) if isinstance(item, dict) else "message"
        if kind in _FIELDS and (kind != "call" or item.get("call_id")):
            taken.append(item)
        else:
            log.debug("skipped an item of type %.64r: it says nothing to this model", item.get("type"))
    return taken


class NamedTool(msgspec.Struct, Body, kw_only=True):
    type: Literal["function", "custom"]
    name: bodies.FunctionName


class ResponseToolChoice(msgspec.Struct, Body, kw_only=True):
    """The tool that must be called, or those that may be."""

    type: Literal["function", "custom", "allowed_tools"]
    name: bodies.FunctionName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None

    @classmethod
    def prepare(cls, value: dict[str, Any]) -> dict[str, Any]:
        return bodies.take_tools(value, "function", "custom", default="function")

    def __post_init__(self) -> None:
        bodies.check_given(self, *(("mode", "tools") if self.type == "allowed_tools" else ("name",)))


class TextFormat(msgspec.Struct, Body, kw_only=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if (self.type == "json_schema") != (self.schema is not None):
            raise ValueError("schema is required with format json_schema, and with no other")


class TextBody(msgspec.Struct, Body, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningBody(msgspec.Struct, Body, kw_only=True):
    effort: bodies.Effort = None
    summary: Annotated[str, Meta(max_length=32)] | None = None


class ConversationName(msgspec.Struct, Body, kw_only=True):
    id: Name | None = None


Items = Annotated[list[ResponseItem], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ConversationBody(msgspec.Struct, Body, kw_only=True):
    """`POST /v1/conversations`."""

    items: Annotated[list[ResponseItem], Meta(max_length=MAX_MESSAGES)] = []
    metadata: Metadata = {}

    @classmethod
    def prepare(cls, value: dict[str, Any]) -> dict[str, Any]:
        return {**value, "items": take_items(value.get("items", []))}


class ConversationObject(msgspec.Struct):
    """A conversation as clients see it."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"


class ResponsesBody(bodies.OpenAIFields, frozen=True, kw_only=True):
    """`POST /v1/responses`."""

    form = "text.format"

    input: Annotated[str, Meta(min_length=1)] | Items
    instructions: str | Items | None = None
    tools: Annotated[tuple[ResponseTool, ...], Meta(max_length=MAX_TOOLS)] = ()
    tool_choice: bodies.ToolMode | ResponseToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextBody | None = None
    reasoning: ReasoningBody | None = None
    max_output_tokens: TokenLimit | None = None
    top_logprobs: bodies.TopLogprobs | None = None
    include: Annotated[tuple[Name, ...], Meta(max_length=32)] = ()
    store: bool = True
    metadata: Metadata = {}
    truncation: Literal["auto", "disabled"] = "disabled"
    chat_template_kwargs: bodies.TemplateOptions = None
    previous_response_id: Name | None = None
    conversation: Name | ConversationName | None = None
    prompt: dict[str, Any] | None = None
    background: bool = False

    @classmethod
    def prepare(cls, value: dict[str, Any]) -> dict[str, Any]:
        bodies.check_kind(value.get("tool_choice"), "function", "custom", "allowed_tools", why=_ONLY)
        value = bodies.take_tools(super().prepare(value), "function", "custom", default="function")
        return value | {name: take_items(value[name]) for name in ("input", "instructions") if name in value}

    def __post_init__(self) -> None:
        self.set_limit("max_output_tokens")
        if self.prompt:
            raise ValueError("prompt: not supported: send input items")
        if self.background and not self.store:
            raise ValueError("background: needs store true: a background response is read from the store")
        if self.conversation is not None and self.previous_response_id is not None:
            raise ValueError("conversation: give it or previous_response_id, not both")
        if isinstance(self.conversation, str):
            force_setattr(self, "conversation", ConversationName(id=self.conversation))
        if self.tool_choice == "any":
            force_setattr(self, "tool_choice", "required")
        self._choice.check([tool.name for tool in self.tools])

    @property
    def _choice(self) -> chats.ToolChoice:
        choice = self.tool_choice
        if isinstance(choice, str):
            return chats.ToolChoice.of(choice, parallel=self.parallel_tool_calls)
        if choice.type != "allowed_tools":
            return chats.ToolChoice.only(choice.name or "")
        names = tuple(tool.name for tool in choice.tools or ())
        return chats.ToolChoice(mode=choice.mode or "auto", names=names, parallel=self.parallel_tool_calls)

    @property
    def top(self) -> int | None:
        """Number of most likely tokens that are returned. None returns no log-probabilities."""
        return (self.top_logprobs or 0) if LOGPROBS in self.include or self.top_logprobs else None

    @property
    def text_format(self) -> TextFormat:
        return (self.text and self.text.format) or TextFormat(type="text")

    def form_schema(self) -> dict[str, Any] | None:
        wanted = self.text_format
        return None if wanted.type == "text" else wanted.schema or {"type": "object"}

    @property
    def items(self) -> list[ResponseItem]:
        """The input as items."""
        if isinstance(self.input, str):
            return [ResponseItem(type="message", role="user", content=self.input)]
        return self.input

    def to_conversation(
        self, history: Iterable[ResponseItem] = (), *, sees: bool = False
    ) -> chats.Conversation:
        """The conversation in the terms of `cllm.chat`, `history` before the input. Raises InvalidRequest."""
        builder = chats.MessageBuilder("input", sees=sees)
        if isinstance(self.instructions, str):
            builder.add_text("system", self.instructions)
        else:
            builder.add_all(self.instructions or ())
        builder.add_all((*history, *self.items))
        effort = (self.reasoning or ReasoningBody()).effort
        return chats.Conversation(
            messages=builder.build(),
            pictures=builder.pictures,
            options=chats.make_template_options(self.chat_template_kwargs, effort),
            think=effort != "none",
            **self._choice.apply([tool.tool() for tool in self.tools]),
        )


# Responses ---------------------------------------------------------------------------------------------


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """The text of an output message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The text of a reasoning item."""

    text: str = ""


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """An output item: text."""

    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class OutputReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """An output item: reasoning."""

    id: str
    status: str
    content: list[OutputReasoning]
    summary: list[Any] = []


class OutputFunctionCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """An output item: a tool call; `arguments` is JSON text."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str


class OutputCustomCall(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    """An output item: a call of a custom tool, with its one text."""

    id: str
    status: str
    call_id: str
    name: str
    input: str


OutputItem = OutputMessage | OutputReasoningItem | OutputFunctionCall | OutputCustomCall


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0
    cached_from: str = ""  # the tier of the KV cache: device, ram or disk


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Tokens of a call."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct):
    message: str
    code: str = "server_error"


class IncompleteDetails(msgspec.Struct):
    reason: str = "max_output_tokens"


class ResponseObject(msgspec.Struct, kw_only=True):
    """The response: the output, and the parameters of the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | list[dict[str, Any]] | None = None
    max_output_tokens: int | None = None
    temperature: float
    top_p: float
    user: str | None = None
    model: str
    parallel_tool_calls: bool
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    text: dict[str, Any]
    reasoning: dict[str, Any]
    metadata: dict[str, str]
    top_logprobs: int
    truncation: str = "disabled"
    store: bool = False
    background: bool = False
    previous_response_id: str | None = None
    conversation: dict[str, str] | UnsetType = UNSET
    service_tier: str = "default"
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
