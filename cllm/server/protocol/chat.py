"""Request and response of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import AliasChoices, ConfigDict, Field, model_validator

from cllm.chat.conversation import Conversation, ToolChoice, make_template_options, normalize_message
from cllm.chat.reply import ChatReply
from cllm.server.protocol.base import UNSUPPORTED_MEDIA, Body, JsonObject, Text, ToolDescription, kinds
from cllm.server.protocol.completions import CompletionUsage, Name, OpenAIBody, PromptTokensDetails
from cllm.text.chat_format import Tool
from cllm.types import FinishReason, TokenLogprob

MAX_MESSAGES = 4096
MAX_TOOLS = 128

# What the bodies of the three chat APIs share: types of fields, descriptions, examples.
QUESTION = "What is AI?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
REASONING = "The user wants to know what AI is."
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL_CHOICE = "Whether a tool may or must be called, or which; forced calls always match their schema"
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$", examples=["get_weather"])]
ToolMode = Literal["none", "auto", "required"]
Effort = Annotated[
    Annotated[str, Field(max_length=32)] | None,
    Field(description="A variable for the chat template; `none` switches reasoning off", examples=["low"]),
]
TemplateOptions = Annotated[
    Annotated[JsonObject, Field(max_length=32)] | None,
    Field(description="Variables for the chat template", examples=[{"enable_thinking": False}]),
]


class TextPart(Body):
    type: Literal["text"] = Field(description="Always `text`: the model accepts text only")
    text: Text = Field(description="The text of this part", examples=[QUESTION])


TextParts = Annotated[
    list[Annotated[TextPart, kinds("text", why={"": UNSUPPORTED_MEDIA})]], Field(max_length=MAX_MESSAGES)
]


class CalledFunction(Body):
    name: FunctionName = Field(description="The tool that was called")
    arguments: Text = Field("{}", description="Its arguments as JSON text")


class ToolCallBody(Body):
    """A tool call of an earlier assistant message."""

    id: Name = Field(description="The id from the response", examples=["call_1"])
    type: Literal["function"] = Field("function", description="Always `function`")
    function: CalledFunction = Field(description="The tool and its arguments", examples=[{"name": "now"}])


class MessageBody(Body):
    """One message, text only."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="The author")
    content: Text | TextParts | None = Field(
        None,
        description="Text, or parts of text; the text of control tokens stays plain text",
        examples=[QUESTION, [{"type": "text", "text": QUESTION}]],
    )
    name: Name | None = Field(None, description="Of the author, for templates that use it", examples=["Ann"])
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=MAX_TOOLS)] | None = Field(
        None,
        description="Tool calls of an assistant message",
        examples=[[{"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}]],
    )
    tool_call_id: Name | None = Field(None, description="The call that this answers", examples=["call_1"])
    reasoning_content: Text | None = Field(
        None, description="Reasoning of the assistant, for templates that repeat it", examples=[REASONING]
    )


class FunctionBody(Body):
    """A function the model may call."""

    name: FunctionName = Field(description="Letters, digits, `_`, `-` and `.`, at most 64")
    description: ToolDescription = None
    parameters: JsonObject | None = Field(
        None, description="JSON schema of its arguments; left out: it takes none", examples=[PARAMETERS]
    )
    strict: bool | None = Field(None, description="Ignored: forced calls always match", examples=[True])

    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.parameters or {})


class ToolBody(Body):
    type: Literal["function"] = Field(description="Always `function`")
    function: FunctionBody = Field(description="The function", examples=[{"name": "now"}])


class ChosenFunction(Body):
    name: FunctionName = Field(description="One of the tools")


class ChosenTool(Body):
    """The tool that must be called."""

    type: Literal["function"] = Field(description="Always `function`")
    function: ChosenFunction = Field(description="Its name", examples=[{"name": "get_weather"}])


class ConversationBody(Body):
    """Messages and tools, as `/apply-template` also takes them."""

    messages: list[MessageBody] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        description="The conversation; an assistant message at its end is continued",
        examples=[MESSAGES],
    )
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)] | None = Field(
        None,
        description="Functions the model may call",
        examples=[[{"type": "function", "function": {"name": "now", "description": "The time"}}]],
    )
    tool_choice: ToolMode | ChosenTool = Field("auto", description=TOOL_CHOICE)
    parallel_tool_calls: bool = Field(True, description="Allow several calls in one answer")
    chat_template_kwargs: TemplateOptions = None
    reasoning_effort: Effort = None
    reasoning_format: Literal["auto", "none"] = Field(
        "auto", description="`auto`: reasoning goes to `reasoning_content`; `none`: it stays in the text"
    )

    model_config = ConfigDict(json_schema_extra={"example": {"messages": MESSAGES}})

    @model_validator(mode="after")
    def _check_tools(self) -> ConversationBody:
        self._choice.check([tool.function.name for tool in self.tools or ()])
        return self

    @property
    def _choice(self) -> ToolChoice:
        wanted = self.tool_choice
        if isinstance(wanted, ChosenTool):
            return ToolChoice(mode="required", names=(wanted.function.name,), parallel=False)
        return ToolChoice(mode=wanted, parallel=self.parallel_tool_calls)

    def conversation(self) -> Conversation:
        """The conversation in the terms of `cllm.chat`."""
        return Conversation(
            messages=tuple(normalize_message(each.model_dump(exclude_none=True)) for each in self.messages),
            options=make_template_options(self.chat_template_kwargs, self.reasoning_effort),
            reasoning=self.reasoning_format != "none",
            **self._choice.apply([tool.function.tool() for tool in self.tools or ()]),
        )


class ChatBody(ConversationBody, OpenAIBody):
    """`POST /v1/chat/completions`."""

    max_tokens: int | None = Field(
        None,
        ge=1,
        validation_alias=AliasChoices("max_completion_tokens", "max_tokens"),
        description="Maximum tokens to generate (also `max_tokens`); null: as many as fit",
        examples=[64],
    )
    logprobs: bool = Field(False, description="Return log-probabilities of the sampled tokens")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="And of this many most likely tokens; needs `logprobs`", examples=[2]
    )

    model_config = ConfigDict(json_schema_extra={"example": {"messages": MESSAGES, "max_tokens": 64}})

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    @property
    def top(self) -> int | None:
        """How many most likely tokens are returned; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CandidateLogprob(msgspec.Struct):
    """A token that could have been sampled."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(CandidateLogprob):
    """The sampled token, and the most likely ones in its place."""

    top_logprobs: list[CandidateLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of an answer's tokens."""

    content: list[ChatTokenLogprob]


def make_logprobs(entries: Sequence[TokenLogprob], top: int) -> list[ChatTokenLogprob]:
    """One entry a token, each with the `top` most likely ones."""

    def fields(piece: bytes, logprob: float) -> tuple[str, float, list[int]]:
        return piece.decode(errors="replace"), logprob, list(piece)

    return [
        ChatTokenLogprob(
            *fields(entry.pieces[0], entry.logprob),
            [
                CandidateLogprob(*fields(piece, logprob))
                for piece, (_, logprob) in zip(entry.pieces[1:], entry.top, strict=True)
            ][:top],
        )
        for entry in entries
    ]


class CalledFunctionResult(msgspec.Struct):
    """The function of a call; `arguments` is JSON text. A later chunk has only more of the arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallResult(msgspec.Struct):
    """A tool call of an answer. Chunks have an `index`; only the first of a call has `id` and `type`."""

    function: CalledFunctionResult
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET


class ReplyMessage(msgspec.Struct):
    """The answer."""

    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallResult] | UnsetType = UNSET

    @classmethod
    def from_reply(cls, reply: ChatReply) -> ReplyMessage:
        calls = [
            ToolCallResult(CalledFunctionResult(call.arguments, call.name), call.id, "function")
            for call in reply.tool_calls
        ]
        return cls(
            reply.text if reply.text or not calls else None,
            reasoning_content=reply.reasoning or UNSET,
            tool_calls=calls or UNSET,
        )


def get_finish_reason(reason: FinishReason, *, called: bool) -> str:
    """`tool_calls` where the answer stopped after a call."""
    return "tool_calls" if called and reason is FinishReason.STOP else reason.value


class ChatChoice(msgspec.Struct):
    """One of the `n` answers."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The response."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class ChunkDelta(msgspec.Struct, omit_defaults=True):
    """More of one choice."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallResult] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """More of one choice, or its end."""

    index: int
    delta: ChunkDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    usage: CompletionUsage | UnsetType = UNSET
    choices: list[ChunkChoice] = []  # last: a stream encodes what precedes it once


_HEAD: dict[str, Any] = {"id": "chatcmpl-1", "created": 1767225600, "model": "SmolLM2-135M-Instruct"}
EXAMPLE = ChatCompletion(
    **_HEAD,
    choices=[ChatChoice(0, ReplyMessage("AI is …"), finish_reason="stop")],
    usage=CompletionUsage(4, 3, 7, PromptTokensDetails(0)),
)
EXAMPLE_CHUNKS = (
    ChatCompletionChunk(**_HEAD, choices=[ChunkChoice(0, ChunkDelta(role="assistant", content="AI"))]),
    ChatCompletionChunk(**_HEAD, choices=[ChunkChoice(0, ChunkDelta(), finish_reason="stop")]),
)
