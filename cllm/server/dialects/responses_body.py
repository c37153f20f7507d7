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
from cllm.server.body import Body, Metadata, Name, TokenLimit, about
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

    type: Annotated[Literal["function", "custom"], about("The kind of tool")]
    format: Annotated[
        dict[str, Any] | None, about("A grammar in it is shown to the model, not enforced", {"type": "text"})
    ] = None

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

    type: Annotated[
        str | None, about("`message`, `reasoning`, `…_call`, `…_call_output`; others are skipped", "message")
    ] = None
    role: Annotated[
        Literal["system", "developer", "user", "assistant"] | None, about("The author of a message", "user")
    ] = None
    content: Annotated[
        str | Parts | None,
        about("Text, or parts of text; control tokens in it stay plain text", bodies.QUESTION, [bodies.PART]),
    ] = None
    summary: Annotated[
        Parts | None,
        about("Of reasoning, used where there is no `content`", [{"type": "summary_text", "text": "…"}]),
    ] = None
    call_id: Annotated[str | None, about("The id of a call, from the response", "call_1")] = None
    name: Annotated[str | None, about("The tool that was called", "get_weather")] = None
    arguments: bodies.Arguments = None
    input: Annotated[bodies.JsonValue, about("The argument of a custom tool", "ls")] = None
    action: Annotated[bodies.JsonValue, about("What another tool did", {"command": ["ls"]})] = None
    output: Annotated[
        str | Parts | dict[str, Any] | None,
        about("The result of a call: text, or parts of text", "12 degrees, rain"),
    ] = None

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
    type: Annotated[Literal["function", "custom"], about("The kind of tool")]
    name: bodies.FunctionName


class ResponseToolChoice(msgspec.Struct, Body, kw_only=True):
    """The tool that must be called, or those that may be."""

    type: Annotated[
        Literal["function", "custom", "allowed_tools"],
        about("`allowed_tools`: only these may be called; else: this one must be called"),
    ]
    name: Annotated[bodies.FunctionName | None, about("One of the tools", "now")] = None
    mode: Annotated[
        Literal["auto", "required"] | None, about("Whether one of the allowed tools must be called", "auto")
    ] = None
    tools: Annotated[
        Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)] | None,
        about("Some of the tools", [{"type": "function", "name": "now"}]),
    ] = None

    @classmethod
    def prepare(cls, value: dict[str, Any]) -> dict[str, Any]:
        return bodies.take_tools(value, "function", "custom", default="function")

    def __post_init__(self) -> None:
        bodies.check_given(self, *(("mode", "tools") if self.type == "allowed_tools" else ("name",)))


class TextFormat(msgspec.Struct, Body, kw_only=True, omit_defaults=True):
    type: Annotated[Literal["text", "json_object", "json_schema"], about("The format of the answer")]
    name: Annotated[Name | None, about("Of the schema; ignored", "answer")] = None
    description: Annotated[str | None, about("Ignored", "An age")] = None
    schema: Annotated[dict[str, Any] | None, about("The schema that the answer matches", bodies.SCHEMA)] = (
        None
    )
    strict: Annotated[bool | None, about("Ignored: the schema always applies", True)] = None

    def __post_init__(self) -> None:
        if (self.type == "json_schema") != (self.schema is not None):
            raise ValueError("schema is required with format json_schema, and with no other")


class TextBody(msgspec.Struct, Body, kw_only=True):
    format: Annotated[
        TextFormat | None, about("Text, any JSON object, or a schema", {"type": "json_object"})
    ] = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, about("Ignored", "low")] = None


class ReasoningBody(msgspec.Struct, Body, kw_only=True):
    effort: bodies.Effort = None
    summary: Annotated[
        Annotated[str, Meta(max_length=32)] | None,
        about("Ignored: reasoning is returned in full, not summarised", "auto"),
    ] = None


class ConversationName(msgspec.Struct, Body, kw_only=True):
    id: Annotated[Name | None, about("A stored conversation; none: a new one", "conv_1")] = None


Items = Annotated[list[ResponseItem], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ResponsesBody(bodies.OpenAIFields, frozen=True, kw_only=True):
    """`POST /v1/responses`."""

    form = "text.format"
    EXAMPLE = {"input": bodies.QUESTION, "max_output_tokens": 64}

    input: Annotated[
        Annotated[str, Meta(min_length=1)] | Items,
        about(
            "A question, or items: messages, calls and their outputs, reasoning",
            bodies.QUESTION,
            bodies.MESSAGES,
        ),
    ]
    instructions: Annotated[
        str | Items | None, about("A system message before the input, or items", "Be brief.")
    ] = None
    tools: Annotated[
        tuple[ResponseTool, ...],
        about("Functions the model may call", [{"type": "function", "name": "now"}], max_length=MAX_TOOLS),
    ] = ()
    tool_choice: Annotated[bodies.ToolMode | ResponseToolChoice, about(bodies.TOOL_CHOICE)] = "auto"
    parallel_tool_calls: Annotated[bool, about("Allow several calls in one answer")] = True
    text: Annotated[
        TextBody | None, about("The format of the answer", {"format": {"type": "json_object"}})
    ] = None
    reasoning: Annotated[ReasoningBody | None, about("How much to reason", {"effort": "low"})] = None
    max_output_tokens: Annotated[
        TokenLimit | None, about("Maximum tokens, reasoning included; null or -1: as many as fit", 64)
    ] = None
    top_logprobs: Annotated[
        bodies.TopLogprobs | None, about("Log-probabilities of this many most likely tokens", 2)
    ] = None
    include: Annotated[
        tuple[Name, ...], about(f"`{LOGPROBS}` is honoured, others ignored", [LOGPROBS], max_length=32)
    ] = ()
    store: Annotated[
        bool, about("Keep the response for `previous_response_id`, while there is room for it")
    ] = True
    metadata: Metadata = {}
    truncation: Annotated[
        Literal["auto", "disabled"], about("Nothing is truncated: input that does not fit is refused")
    ] = "disabled"
    chat_template_kwargs: bodies.TemplateOptions = None
    previous_response_id: Annotated[
        Name | None, about("A stored response, whose conversation is continued", None)
    ] = None
    conversation: Annotated[
        Name | ConversationName | None,
        about("A stored conversation, which is continued; {}: a new one", {"id": "conv_1"}),
    ] = None
    prompt: Annotated[dict[str, Any] | None, about("Refused: no prompts are stored", None)] = None
    background: Annotated[
        bool, about("Answer at once, with the response as it is; `GET /v1/responses/{id}` shows the rest")
    ] = False

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
        wanted = LOGPROBS in self.include or self.top_logprobs
        return (self.top_logprobs or 0) if wanted else None

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
