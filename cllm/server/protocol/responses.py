"""Request and response of `/v1/responses`, and the events of its stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import ConfigDict, Field, field_validator, model_validator

from cllm.chat.conversation import (
    Conversation,
    MessageBuilder,
    ToolChoice,
    count_answered,
    make_template_options,
)
from cllm.errors import InvalidRequest
from cllm.server.blocks import StreamEvent
from cllm.server.protocol import chat
from cllm.server.protocol.base import Body, JsonObject, Text, TokenLimit, kinds
from cllm.server.protocol.chat import MAX_TOOLS, ChatTokenLogprob, FunctionName
from cllm.server.protocol.completions import Effort, Name, OpenAIFields
from cllm.server.protocol.items import CALLABLE, Item, Items, MessageItem, ResponseTools

LOGPROBS = "message.output_text.logprobs"
_ONLY = {"": "this server executes no tools, it only returns calls of the client's own tools"}


class NamedFunction(Body):
    type: Literal["function", "custom"] = Field(description="This one must be called")
    name: FunctionName = Field(description="One of the tools")


class AllowedTools(Body):
    type: Literal["allowed_tools"] = Field(description="Only these may be called")
    mode: Literal["auto", "required"] = Field(description="Whether one must be called")
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS), CALLABLE] = Field(
        description="Some of the tools", examples=[[{"type": "function", "name": "get_weather"}]]
    )


Chosen = Annotated[
    NamedFunction | AllowedTools,
    Field(discriminator="type"),
    kinds("function", "custom", "allowed_tools", why=_ONLY),
]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = Field(description="The format of the answer")
    name: Name | None = Field(None, description="Of the schema; ignored", examples=["answer"])
    description: Text | None = Field(None, description="Ignored", examples=["An age"])
    schema_: JsonObject | None = Field(
        None, alias="schema", description="The schema that the answer matches", examples=[chat.SCHEMA]
    )
    strict: bool | None = Field(None, description="Ignored: the schema always applies", examples=[True])

    @model_validator(mode="after")
    def _consistent(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema is required with format json_schema, and with no other")
        return self


class TextBody(Body):
    format: TextFormat | None = Field(
        None, description="Text, any JSON object, or a schema", examples=[{"type": "json_object"}]
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Ignored", examples=["low"])


class ReasoningBody(Body):
    effort: Effort = None
    summary: Annotated[str, Field(max_length=32)] | None = Field(
        None, description="Ignored: reasoning is returned in full, not summarised", examples=["auto"]
    )


Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[Text, Field(max_length=512)]]


class ResponsesBody(OpenAIFields):
    """`POST /v1/responses`."""

    form = "text.format"

    input: Annotated[Text, Field(min_length=1)] | Items = Field(
        description="A question, or items: messages, function calls and their outputs, reasoning",
        examples=[chat.QUESTION, chat.MESSAGES],
    )
    instructions: Text | Items | None = Field(
        None, description="A system message before the input, or items", examples=["Be brief."]
    )
    tools: ResponseTools = Field(
        [], description="Functions the model may call", examples=[[{"type": "function", "name": "now"}]]
    )
    tool_choice: chat.ToolMode | Chosen = Field("auto", description=chat.TOOL_CHOICE)
    parallel_tool_calls: bool = Field(True, description="Allow several calls in one answer")
    text: TextBody | None = Field(
        None, description="The format of the answer", examples=[{"format": {"type": "json_object"}}]
    )
    reasoning: ReasoningBody | None = Field(
        None, description="How much to reason", examples=[{"effort": "low"}]
    )
    max_output_tokens: TokenLimit | None = Field(
        None, description="Maximum tokens, reasoning included; null or -1: as many as fit", examples=[64]
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="Log-probabilities of this many most likely tokens", examples=[2]
    )
    include: Annotated[list[Name], Field(max_length=32)] | None = Field(
        None, description=f"`{LOGPROBS}` is honoured, anything else ignored", examples=[[LOGPROBS]]
    )
    stream: bool = Field(False, description="Answer as server-sent events")
    store: bool = Field(
        True, description="Keep the response for `previous_response_id`, while there is room for it"
    )
    metadata: Annotated[Metadata, Field(max_length=16)] | None = Field(
        None, description="Returned unchanged: up to 16 texts", examples=[{"order": "17"}]
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="Nothing is truncated: input that does not fit is refused", examples=["disabled"]
    )
    chat_template_kwargs: chat.TemplateOptions = None
    previous_response_id: Name | None = Field(
        None, description="A stored response, whose conversation is continued", examples=[None]
    )
    conversation: Name | dict[str, Any] | None = Field(
        None, description="Refused: no conversations are stored", examples=[None]
    )
    prompt: dict[str, Any] | None = Field(None, description="Refused: no prompts are stored", examples=[None])
    background: bool | None = Field(None, description="Refused if true", examples=[False])

    model_config = ConfigDict(
        json_schema_extra={"example": {"input": chat.QUESTION, "max_output_tokens": 64}}
    )

    @field_validator("conversation", "prompt", "background")
    @classmethod
    def _unsupported(cls, value: Any) -> Any:
        if value:
            raise ValueError(
                "not supported: send input items, or previous_response_id to continue a response"
            )
        return value

    @model_validator(mode="after")
    def _check_tools(self) -> ResponsesBody:
        self._choice.check([tool.name for tool in self.tools])
        return self

    @property
    def _choice(self) -> ToolChoice:
        parallel = self.parallel_tool_calls
        match self.tool_choice:
            case NamedFunction(name=name):
                return ToolChoice(mode="required", names=(name,), parallel=False)
            case AllowedTools(mode=mode, tools=tools):
                return ToolChoice(mode=mode, names=tuple(tool.name for tool in tools), parallel=parallel)
            case mode:
                return ToolChoice(mode=mode, parallel=parallel)

    @property
    def top(self) -> int | None:
        """How many most likely tokens are returned; None: no log-probabilities."""
        wanted = LOGPROBS in (self.include or ()) or self.top_logprobs
        return (self.top_logprobs or 0) if wanted else None

    def form_schema(self) -> dict[str, Any] | None:
        wanted = self.text.format if self.text is not None else None
        if wanted is None or wanted.type == "text":
            return None
        return wanted.schema_ or {"type": "object"}

    @property
    def items(self) -> Items:
        """The input as items."""
        if isinstance(self.input, str):
            return [MessageItem(type="message", role="user", content=self.input)]
        return self.input

    def to_conversation(self, history: Iterable[Item] = ()) -> Conversation:
        """The conversation in the terms of `cllm.chat`, `history` before the input. Raises InvalidRequest."""
        builder = MessageBuilder("input")
        if isinstance(self.instructions, str):
            builder.add_text("system", self.instructions)
        instructions = () if isinstance(self.instructions, str) else self.instructions or ()
        for items in (instructions, (*history, *self.items)):
            answered = count_answered([str(getattr(item, "role", "")) for item in items])
            for index, item in enumerate(items):
                builder.answered = index < answered
                item.add_to(builder)
        if not builder.messages:
            raise InvalidRequest("input: it has no content", "input")
        effort = self.reasoning.effort if self.reasoning is not None else None
        return Conversation(
            messages=tuple(builder.messages),
            options=make_template_options(self.chat_template_kwargs, effort),
            think=effort != "none",
            **self._choice.apply([tool.tool() for tool in self.tools]),
        )


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
    service_tier: str = "default"
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None


def echo(body: ResponsesBody, model: str) -> dict[str, Any]:
    """The fields of the response that repeat the request."""
    same = {"instructions", "max_output_tokens", "previous_response_id", "store", "temperature"}
    same |= {"tool_choice", "tools", "top_p", "user"}
    wanted = body.text.format if body.text is not None else None
    text_format = wanted.model_dump(by_alias=True, exclude_none=True) if wanted else {"type": "text"}
    return {
        **body.model_dump(include=same),
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls,
        "text": {"format": text_format},
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "metadata": body.metadata or {},
        "top_logprobs": body.top_logprobs or 0,
    }


EXAMPLE = ResponseObject(
    id="resp_8f0c2d7e",
    created_at=1767225600,
    completed_at=1767225601,
    status="completed",
    **echo(
        ResponsesBody.model_validate({"input": "?", "instructions": "Be brief.", "max_output_tokens": 64}),
        "SmolLM2-135M-Instruct",
    ),
    output=[OutputMessage("msg_2b7e", "completed", [OutputText("AI is …")])],
    usage=ResponseUsage(4, InputTokensDetails(0), 3, OutputTokensDetails(0), 7),
)


class InputTokens(msgspec.Struct):
    """The response of `/v1/responses/input_tokens`."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ResponseEvent(StreamEvent):
    """One event of a stream."""

    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | OutputReasoning | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    code: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
