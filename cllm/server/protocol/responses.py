"""Request of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from cllm.chat.conversation import Conversation, MessageBuilder, ToolChoice, make_template_options
from cllm.errors import InvalidRequest
from cllm.server.protocol.base import UNSUPPORTED_MEDIA, Body, JsonObject, Text, kinds
from cllm.server.protocol.chat import MAX_MESSAGES, MAX_TOOLS, FunctionBody, FunctionName
from cllm.server.protocol.completions import Name, OpenAIFields

LOGPROBS = "message.output_text.logprobs"
_FUNCTIONS_ONLY = {"": "this server executes no tools, it only returns calls of type 'function'"}


class FunctionTool(FunctionBody):
    type: Literal["function"] = Field(description="Always `function`")


class NamedFunction(Body):
    type: Literal["function"] = Field(description="This one must be called")
    name: FunctionName = Field(description="One of the tools", examples=["get_weather"])


class AllowedTools(Body):
    type: Literal["allowed_tools"] = Field(description="Only these may be called")
    mode: Literal["auto", "required"] = Field(description="Whether one must be called")
    tools: Annotated[
        list[Annotated[NamedFunction, kinds("function", why=_FUNCTIONS_ONLY)]],
        Field(min_length=1, max_length=MAX_TOOLS),
    ] = Field(description="Some of the tools", examples=[[{"type": "function", "name": "get_weather"}]])


Chosen = Annotated[
    NamedFunction | AllowedTools,
    Field(discriminator="type"),
    kinds("function", "allowed_tools", why=_FUNCTIONS_ONLY),
]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = Field(description="The format of the answer")
    name: Name | None = Field(None, description="Of the schema; ignored", examples=["answer"])
    description: Text | None = Field(
        None, max_length=1 << 14, description="Of the schema; ignored", examples=["The age of a person"]
    )
    schema_: JsonObject | None = Field(
        None,
        alias="schema",
        description="The schema that the answer matches",
        examples=[{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}],
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
    effort: Annotated[str, Field(max_length=32)] | None = Field(
        None,
        description="A variable for the chat template; `none` also switches reasoning off",
        examples=["none", "low"],
    )
    summary: Annotated[str, Field(max_length=32)] | None = Field(
        None, description="Ignored: reasoning is returned in full, not summarised", examples=["auto"]
    )


class ResponsesBody(OpenAIFields):
    """`POST /v1/responses`."""

    form = "text.format"

    input: (
        Annotated[Text, Field(min_length=1)]
        | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    ) = Field(
        description="A question, or items: messages, function calls and their outputs, reasoning",
        examples=["What is AI?", [{"role": "user", "content": "What is AI?"}]],
    )
    instructions: Text | None = Field(
        None, description="A system message before the input", examples=["Be brief."]
    )
    tools: Annotated[
        list[Annotated[FunctionTool, kinds("function", why=_FUNCTIONS_ONLY)]], Field(max_length=MAX_TOOLS)
    ] = Field(
        default=[],
        description="Functions the model may call",
        examples=[[{"type": "function", "name": "now"}]],
    )
    tool_choice: Literal["none", "auto", "required"] | Chosen = Field(
        "auto",
        description="Whether a tool may or must be called, or which; forced calls always match their schema",
    )
    parallel_tool_calls: bool = Field(True, description="Allow several calls in one answer")
    text: TextBody | None = Field(
        None, description="The format of the answer", examples=[{"format": {"type": "json_object"}}]
    )
    reasoning: ReasoningBody | None = Field(
        None, description="How much to reason", examples=[{"effort": "none"}]
    )
    max_output_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum tokens to generate, reasoning included; null: as many as fit",
        examples=[64],
    )
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="Return log-probabilities of the sampled and of this many most likely tokens",
        examples=[2],
    )
    include: Annotated[list[Name], Field(max_length=32)] | None = Field(
        None, description=f"`{LOGPROBS}` is honoured, anything else ignored", examples=[[LOGPROBS]]
    )
    stream: bool = Field(False, description="Answer as server-sent events")
    store: bool | None = Field(None, description="Accepted; nothing is ever stored", examples=[False])
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[Text, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = Field(None, description="Returned unchanged: up to 16 texts", examples=[{"order": "17"}])
    truncation: Literal["auto", "disabled"] | None = Field(
        None,
        description="Input is never truncated: one that does not fit is an error 400",
        examples=["disabled"],
    )
    chat_template_kwargs: Annotated[JsonObject, Field(max_length=32)] | None = Field(
        None,
        description="Variables for the chat template, for example `enable_thinking`. Not in OpenAI's",
        examples=[{"enable_thinking": False}],
    )
    previous_response_id: Name | None = Field(
        None, description="Refused: this server is stateless", examples=[None]
    )
    conversation: Name | dict[str, Any] | None = Field(
        None, description="Refused: this server is stateless", examples=[None]
    )
    prompt: dict[str, Any] | None = Field(None, description="Refused: no prompts are stored", examples=[None])
    background: bool | None = Field(None, description="Refused if true: nothing is stored", examples=[False])

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"input": "What is AI?", "max_output_tokens": 64, "instructions": "Be brief."}
        }
    )

    @field_validator("previous_response_id", "conversation", "prompt", "background")
    @classmethod
    def _stateless(cls, value: Any) -> Any:
        if value:
            raise ValueError("this server is stateless: send the whole conversation as input items")
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

    def to_conversation(self) -> Conversation:
        """The conversation in the terms of `cllm.chat`. Raises InvalidRequest."""
        builder = MessageBuilder()
        if self.instructions:
            builder.add_text("system", self.instructions)
        if isinstance(self.input, str):
            builder.add_text("user", self.input)
        else:
            for item in self.input:
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


_STATELESS = "nothing is stored, so there is nothing to refer to: send the items themselves"
_MEDIA = {
    "input_image": UNSUPPORTED_MEDIA,
    "input_file": UNSUPPORTED_MEDIA,
    "input_audio": UNSUPPORTED_MEDIA,
}


class ItemText(Body):
    type: Literal["input_text", "output_text", "text"] = Field(description="All three are read alike")
    text: Text = Field(description="The text of this part", examples=["What is AI?"])


class RefusalPart(Body):
    type: Literal["refusal"] = Field(description="A refusal of the assistant")
    refusal: Text = Field(description="The text of this part", examples=["I would rather not."])

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[
    ItemText | RefusalPart,
    Field(discriminator="type"),
    kinds("input_text", "output_text", "text", "refusal", why=_MEDIA),
]
Parts = Annotated[list[Part], Field(max_length=MAX_MESSAGES)]


def join_text(content: str | list[ItemText | RefusalPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class MessageItem(Body):
    """A message."""

    type: Literal["message"] = Field("message", description="May be left out")
    role: Literal["system", "developer", "user", "assistant"] = Field(description="The author")
    content: Text | Parts = Field(
        description="Text, or parts of text; the text of control tokens stays plain text",
        examples=["What is AI?", [{"type": "input_text", "text": "What is AI?"}]],
    )

    def add_to(self, builder: MessageBuilder) -> None:
        builder.add_text("system" if self.role == "developer" else self.role, join_text(self.content))


class FunctionCallItem(Body):
    """An earlier tool call of the assistant."""

    type: Literal["function_call"] = Field(description="Always `function_call`")
    call_id: Name = Field(description="The id from the response", examples=["call_1"])
    name: FunctionName = Field(description="The tool that was called", examples=["get_weather"])
    arguments: Text = Field("{}", description="Its arguments as JSON text")

    def add_to(self, builder: MessageBuilder) -> None:
        builder.add_tool_call(self.call_id, self.name, self.arguments)


class FunctionOutputItem(Body):
    """The result of a tool call."""

    type: Literal["function_call_output"] = Field(description="Always `function_call_output`")
    call_id: Name = Field(description="The call that this answers", examples=["call_1"])
    output: Text | Parts = Field(description="Text, or parts of text", examples=["12 degrees, rain"])

    def add_to(self, builder: MessageBuilder) -> None:
        builder.add_tool_result(self.call_id, join_text(self.output))


class ReasoningPart(Body):
    type: Literal["reasoning_text", "summary_text"] = Field(description="The reasoning or its summary")
    text: Text = Field(description="The text of this part", examples=["The user wants to know what AI is."])


class ReasoningItem(Body):
    """Earlier reasoning of the assistant, for templates that repeat it."""

    type: Literal["reasoning"] = Field(description="Always `reasoning`")
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_MESSAGES)] | None = Field(
        None,
        description="The reasoning",
        examples=[[{"type": "reasoning_text", "text": "A short answer will do."}]],
    )
    summary: Annotated[list[ReasoningPart], Field(max_length=MAX_MESSAGES)] | None = Field(
        None,
        description="Used where there is no `content`",
        examples=[[{"type": "summary_text", "text": "A short answer will do."}]],
    )

    def add_to(self, builder: MessageBuilder) -> None:
        if text := "".join(part.text for part in self.content or self.summary or ()):
            builder.add_reasoning(text)


Item = Annotated[
    MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem,
    Field(discriminator="type"),
    kinds(
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
        default="message",
        why={"item_reference": _STATELESS},
    ),
]
