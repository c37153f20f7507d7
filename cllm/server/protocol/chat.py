"""Request and response of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from cllm.chat.conversation import TEXT_PARTS, Conversation, ToolChoice, normalize_messages, write_arguments
from cllm.chat.reply import ChatReply
from cllm.server.protocol.base import (
    Body,
    JsonObject,
    JsonValue,
    ModelName,
    Text,
    TimedResponse,
    TokenLimit,
    ToolDescription,
    kinds,
    make_timings,
    skip_tools,
)
from cllm.server.protocol.completions import (
    CompletionUsage,
    Name,
    OpenAIBody,
    PredictedBody,
    PromptLogprobs,
    PromptTokensDetails,
    ReasoningFormat,
    ThinkingBody,
)
from cllm.text.chat_format import Tool
from cllm.types import FinishReason, TokenLogprob

MAX_MESSAGES = 4096
MAX_TOOLS = 4096

# What the bodies of the three chat APIs share: types of fields, descriptions, examples.
QUESTION = "What is AI?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
REASONING = "The user wants to know what AI is."
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL_CHOICE = "Whether a tool may or must be called, or which; forced calls always match their schema"
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,256}$", examples=["get_weather"])]
# In the history: as a client has it, whatever it is.
CalledName = Annotated[Text, Field(description="The tool that was called", examples=["get_weather"])]
CallId = Annotated[Text | None, Field(description="The id from the response", examples=["call_1"])]
Arguments = Annotated[
    Text,
    BeforeValidator(write_arguments),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}),
    Field(description="Its arguments, as JSON text or as an object", examples=["{}"]),
]
ToolMode = Annotated[
    Literal["none", "auto", "required"], BeforeValidator(lambda mode: "required" if mode == "any" else mode)
]
TemplateOptions = Annotated[
    Annotated[JsonObject, Field(max_length=32)] | None,
    Field(description="Variables for the chat template", examples=[{"enable_thinking": False}]),
]


class ContentPart(Body):
    """A part of a message. In the history, what is no text is replaced by a note."""

    type: Annotated[Text, Field(max_length=64)] = Field(
        description="`text`, or `refusal` and `thinking` of the assistant; else refused in the last question",
        examples=["text"],
    )
    text: Text | None = Field(None, description="The text of this part", examples=[QUESTION])
    refusal: Text | None = Field(None, description="The text of a refusal", examples=["Rather not."])
    thinking: JsonValue = Field(None, description="Reasoning", examples=[REASONING])

    @model_validator(mode="after")
    def _has_text(self) -> ContentPart:
        if self.type in TEXT_PARTS and self.text is None and self.refusal is None:
            raise ValueError("'text' is missing")
        return self


class CalledFunction(Body):
    name: CalledName
    arguments: Arguments = "{}"


class ToolCallBody(Body):
    """A tool call of an earlier assistant message."""

    id: CallId = None
    type: Name | None = Field("function", description="Always `function`")
    function: CalledFunction = Field(description="The tool and its arguments", examples=[{"name": "now"}])


def _drop_objects(value: Any) -> Any:
    return value if isinstance(value, str) else None


Reasoning = Annotated[
    Text | None,
    BeforeValidator(_drop_objects),
    Field(description="Reasoning of the assistant, for templates that repeat it", examples=[REASONING]),
]


class MessageBody(Body):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = Field(
        description="The author"
    )
    content: Text | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES)] | None = Field(
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
    tool_call_id: Text | None = Field(None, description="The call that this answers", examples=["call_1"])
    function_call: CalledFunction | None = Field(
        None, description="A call in OpenAI's older form", examples=[{"name": "now", "arguments": "{}"}]
    )
    refusal: Text | None = Field(None, description="In the place of the content", examples=["Rather not."])
    reasoning_content: Reasoning = None
    reasoning: Reasoning = None
    thinking: Reasoning = None


class FunctionBody(Body):
    """A function the model may call."""

    name: FunctionName = Field(description="Letters, digits, `_`, `-` and `.`, at most 256")
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


class AllowedFunctions(Body):
    mode: Literal["auto", "required"] = Field(description="Whether one must be called")
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_TOOLS)] = Field(
        description="Some of the tools", examples=[[{"type": "function", "function": {"name": "now"}}]]
    )


class AllowedChatTools(Body):
    """The tools that may be called."""

    type: Literal["allowed_tools"] = Field(description="Always `allowed_tools`")
    allowed_tools: AllowedFunctions = Field(
        description="Which tools, and whether one must be called",
        examples=[{"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}],
    )


Chosen = Annotated[
    ChosenTool | AllowedChatTools, Field(discriminator="type"), kinds("function", "allowed_tools")
]


Tools = Annotated[
    Annotated[list[ToolBody], Field(max_length=MAX_TOOLS), skip_tools("function", default="function")] | None,
    Field(
        description="Functions the model may call",
        examples=[[{"type": "function", "function": {"name": "now", "description": "The time"}}]],
    ),
]


class ConversationBody(ThinkingBody):
    """Messages and tools, as `/apply-template` also takes them."""

    model: ModelName = None
    messages: list[MessageBody] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        description="The conversation; an assistant message at its end is continued",
        examples=[MESSAGES],
    )
    tools: Tools = None
    tool_choice: ToolMode | Chosen = Field("auto", description=TOOL_CHOICE)
    parallel_tool_calls: bool = Field(True, description="Allow several calls in one answer")
    functions: Annotated[list[FunctionBody], Field(max_length=MAX_TOOLS)] | None = Field(
        None,
        description="`tools` in OpenAI's older form; the answer then has a `function_call`",
        examples=[[{"name": "now", "description": "The time"}]],
    )
    function_call: Literal["none", "auto"] | ChosenFunction | None = Field(
        None, description="`tool_choice` for `functions`", examples=["auto", {"name": "now"}]
    )
    chat_template_kwargs: TemplateOptions = None
    reasoning_format: ReasoningFormat = "auto"
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = Field(
        None,
        description="`false`: an assistant message at the end is history, not continued",
        examples=[True],
    )

    model_config = ConfigDict(json_schema_extra={"example": {"messages": MESSAGES}})

    @model_validator(mode="after")
    def _check_tools(self) -> ConversationBody:
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message: the last message is not the assistant's")
        self._choice.check([function.name for function in self._functions])
        return self

    @property
    def older_form(self) -> bool:
        """Whether the tools are `functions`, and the answer's calls a `function_call`."""
        return bool(self.functions) and not self.tools

    @property
    def _functions(self) -> list[FunctionBody]:
        return [tool.function for tool in self.tools or ()] or self.functions or []

    @property
    def _choice(self) -> ToolChoice:
        if self.older_form:
            wanted = self.function_call or "auto"
            if isinstance(wanted, ChosenFunction):
                return ToolChoice(mode="required", names=(wanted.name,), parallel=False)
            return ToolChoice(mode=wanted, parallel=False)
        parallel = self.parallel_tool_calls
        match self.tool_choice:
            case ChosenTool(function=function):
                return ToolChoice(mode="required", names=(function.name,), parallel=False)
            case AllowedChatTools(allowed_tools=allowed):
                names = tuple(tool.function.name for tool in allowed.tools)
                return ToolChoice(mode=allowed.mode, names=names, parallel=parallel)
            case mode:
                return ToolChoice(mode=mode, parallel=parallel)

    def conversation(self) -> Conversation:
        """The conversation in the terms of `cllm.chat`."""
        return Conversation(
            messages=normalize_messages(each.model_dump(exclude_none=True) for each in self.messages),
            reasoning=self.reasoning_format != "none",
            continued=self.continue_final_message is not False,
            **self.thinking_options(self.chat_template_kwargs),
            **self._choice.apply([function.tool() for function in self._functions]),
        )


class ChatBody(ConversationBody, PredictedBody, OpenAIBody):
    """`POST /v1/chat/completions`."""

    max_tokens: TokenLimit | None = Field(
        None,
        validation_alias=AliasChoices("max_completion_tokens", "max_tokens", "n_predict"),
        description="Maximum tokens to generate (also `max_tokens`, `n_predict`); null or -1: as many as fit",
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
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs cannot be streamed: leave out one of the two")
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
    function_call: CalledFunctionResult | UnsetType = UNSET

    @classmethod
    def from_reply(cls, reply: ChatReply, *, older_form: bool = False) -> ReplyMessage:
        calls = [
            ToolCallResult(CalledFunctionResult(call.arguments, call.name), call.id, "function")
            for call in reply.tool_calls
        ]
        return cls(
            reply.text if reply.text or not calls else None,
            reasoning_content=reply.reasoning or UNSET,
            tool_calls=calls if calls and not older_form else UNSET,
            function_call=calls[0].function if calls and older_form else UNSET,
        )


def get_finish_reason(reason: FinishReason, *, called: bool, older_form: bool = False) -> str:
    """`tool_calls` (in the older form `function_call`) where the answer stopped after a call."""
    if called and reason is FinishReason.STOP:
        return "function_call" if older_form else "tool_calls"
    return reason.value


class ChatChoice(msgspec.Struct):
    """One of the `n` answers."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletion(TimedResponse, frozen=True, kw_only=True):
    """The response."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChunkDelta(msgspec.Struct, omit_defaults=True):
    """More of one choice."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallResult] | UnsetType = UNSET
    function_call: CalledFunctionResult | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """More of one choice, or its end."""

    index: int
    delta: ChunkDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(TimedResponse, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    usage: CompletionUsage | UnsetType = UNSET
    choices: Sequence[ChunkChoice] = ()  # last: a stream encodes what precedes it once


_HEAD: dict[str, Any] = {"id": "chatcmpl-1", "created": 1767225600, "model": "SmolLM2-135M-Instruct"}
EXAMPLE = ChatCompletion(
    **_HEAD,
    choices=[ChatChoice(0, ReplyMessage("AI is …"), finish_reason="stop")],
    usage=CompletionUsage(4, 3, 7, PromptTokensDetails(0)),
    timings=make_timings(prompt_tokens=4, generated=3, prompt_s=0.0215, generated_s=0.0182),
)
EXAMPLE_CHUNKS = (
    ChatCompletionChunk(**_HEAD, choices=[ChunkChoice(0, ChunkDelta(role="assistant", content="AI"))]),
    ChatCompletionChunk(**_HEAD, choices=[ChunkChoice(0, ChunkDelta(), finish_reason="stop")]),
)
