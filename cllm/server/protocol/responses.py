"""The body of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from cllm.chat.conversation import Conversation, Turns
from cllm.errors import InvalidRequest
from cllm.server.protocol.base import UNSUPPORTED_MEDIA, Body, JsonObject, Text, check_tools, kinds
from cllm.server.protocol.chat import MAX_MESSAGES, MAX_TOOLS, FunctionBody, FunctionName
from cllm.server.protocol.completions import Name, OpenAIFields

LOGPROBS = "message.output_text.logprobs"
_FUNCTIONS_ONLY = {"": "this server runs no tools of its own, it only asks for calls of type 'function'"}


class FunctionTool(FunctionBody):
    type: Literal["function"] = Field(description="Always `function`")


class NamedFunction(Body):
    type: Literal["function"] = Field(description="This one must be called")
    name: FunctionName = Field(description="One of the tools", examples=["get_weather"])


class AllowedTools(Body):
    type: Literal["allowed_tools"] = Field(description="Only these may be called")
    mode: Literal["auto", "required"] = Field(description="Whether one must be")
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
    type: Literal["text", "json_object", "json_schema"] = Field(description="What the answer is")
    name: Name | None = Field(None, description="Of the schema; ignored", examples=["answer"])
    description: Text | None = Field(
        None, max_length=1 << 14, description="Of the schema; ignored", examples=["Somebody's age"]
    )
    schema_: JsonObject | None = Field(
        None,
        alias="schema",
        description="What the answer validates against",
        examples=[{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}],
    )
    strict: bool | None = Field(None, description="Ignored: the schema is always kept", examples=[True])

    @model_validator(mode="after")
    def _consistent(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema belongs to the format json_schema, and is needed there")
        return self


class TextBody(Body):
    format: TextFormat | None = Field(
        None, description="Text, any JSON object, or a schema", examples=[{"type": "json_object"}]
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Ignored", examples=["low"])


class ReasoningBody(Body):
    effort: Annotated[str, Field(max_length=32)] | None = Field(
        None,
        description="A variable for the chat template; `none` also switches thinking off",
        examples=["none", "low"],
    )
    summary: Annotated[str, Field(max_length=32)] | None = Field(
        None, description="Ignored: thoughts are given as they are, not summarised", examples=["auto"]
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
        description="Whether one may or must be called, or which; forced calls always fit their schema",
    )
    parallel_tool_calls: bool = Field(True, description="Several calls in one answer are fine")
    text: TextBody | None = Field(
        None, description="What form the answer has", examples=[{"format": {"type": "json_object"}}]
    )
    reasoning: ReasoningBody | None = Field(
        None, description="How much to think", examples=[{"effort": "none"}]
    )
    max_output_tokens: int | None = Field(
        None,
        ge=1,
        description="Most tokens to generate, thoughts included; null: as many as fit",
        examples=[64],
    )
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="Log-probabilities of the chosen tokens and this many likeliest",
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
    ) = Field(None, description="Given back as it is: up to 16 texts", examples=[{"order": "17"}])
    truncation: Literal["auto", "disabled"] | None = Field(
        None,
        description="Nothing is ever cut off: an input that does not fit is a 400",
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
    prompt: dict[str, Any] | None = Field(
        None, description="Refused: no prompts are stored here", examples=[None]
    )
    background: bool | None = Field(
        None, description="Refused if true: nothing is stored here", examples=[False]
    )

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
    def _tools_are_named(self) -> ResponsesBody:
        demanded = "required" if self.must_call else ""
        check_tools([tool.name for tool in self.tools], self.chosen, demanded=demanded)
        return self

    @property
    def chosen(self) -> list[str]:
        """The names that tool_choice gives; empty where it gives none."""
        match self.tool_choice:
            case NamedFunction(name=name):
                return [name]
            case AllowedTools(tools=tools):
                return [tool.name for tool in tools]
        return []

    @property
    def must_call(self) -> bool:
        wanted = self.tool_choice
        if isinstance(wanted, AllowedTools):
            return wanted.mode == "required"
        return wanted == "required" or isinstance(wanted, NamedFunction)

    @property
    def top(self) -> int | None:
        """How many likeliest tokens are told; None: no log-probabilities at all."""
        wanted = LOGPROBS in (self.include or ()) or self.top_logprobs
        return (self.top_logprobs or 0) if wanted else None

    def form_schema(self) -> dict[str, Any] | None:
        wanted = self.text.format if self.text is not None else None
        if wanted is None or wanted.type == "text":
            return None
        return wanted.schema_ or {"type": "object"}

    def to_conversation(self) -> Conversation:
        """In neutral words. Raises InvalidRequest."""
        turns = Turns()
        if self.instructions:
            turns.say("system", self.instructions)
        if isinstance(self.input, str):
            turns.say("user", self.input)
        else:
            for item in self.input:
                item.add_to(turns)
        if not turns.messages:
            raise InvalidRequest("input: there is nothing to answer in it", "input")
        tools = [] if self.tool_choice == "none" else [tool.tool() for tool in self.tools]
        if self.chosen:
            tools = [tool for tool in tools if tool.name in self.chosen]
        options = dict(self.chat_template_kwargs or {})
        effort = self.reasoning.effort if self.reasoning is not None else None
        if effort is not None:
            options.setdefault("reasoning_effort", effort)
            options.setdefault("enable_thinking", effort != "none")
        return Conversation(
            messages=tuple(turns.messages),
            tools=tuple(tools),
            forced=self.must_call,
            parallel=self.parallel_tool_calls and not isinstance(self.tool_choice, NamedFunction),
            options=options,
            think=effort != "none",
        )


_STATELESS = "nothing is stored here, so nothing can be referred to; send the items themselves"
_EYELESS = {
    "input_image": UNSUPPORTED_MEDIA,
    "input_file": UNSUPPORTED_MEDIA,
    "input_audio": UNSUPPORTED_MEDIA,
}


class ItemText(Body):
    type: Literal["input_text", "output_text", "text"] = Field(description="Who wrote it does not matter")
    text: Text = Field(description="The text of this part", examples=["What is AI?"])


class RefusalPart(Body):
    type: Literal["refusal"] = Field(description="What the assistant refused with")
    refusal: Text = Field(description="The text of this part", examples=["I would rather not."])

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[
    ItemText | RefusalPart,
    Field(discriminator="type"),
    kinds("input_text", "output_text", "text", "refusal", why=_EYELESS),
]
Parts = Annotated[list[Part], Field(max_length=MAX_MESSAGES)]


def text_of(content: str | list[ItemText | RefusalPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class MessageItem(Body):
    """Somebody's words."""

    type: Literal["message"] = Field("message", description="May be left out")
    role: Literal["system", "developer", "user", "assistant"] = Field(description="Who speaks")
    content: Text | Parts = Field(
        description="Text, or parts of text; control tokens spelled in it stay plain text",
        examples=["What is AI?", [{"type": "input_text", "text": "What is AI?"}]],
    )

    def add_to(self, turns: Turns) -> None:
        turns.say("system" if self.role == "developer" else self.role, text_of(self.content))


class FunctionCallItem(Body):
    """A call the assistant made earlier."""

    type: Literal["function_call"] = Field(description="Always `function_call`")
    call_id: Name = Field(description="As the answer that made it gave it", examples=["call_1"])
    name: FunctionName = Field(description="The tool that was called", examples=["get_weather"])
    arguments: Text = Field("{}", description="Its arguments as JSON text")

    def add_to(self, turns: Turns) -> None:
        turns.call(self.call_id, self.name, self.arguments)


class FunctionOutputItem(Body):
    """What such a call returned."""

    type: Literal["function_call_output"] = Field(description="Always `function_call_output`")
    call_id: Name = Field(description="Which call this answers", examples=["call_1"])
    output: Text | Parts = Field(description="Text, or parts of text", examples=["12 degrees, rain"])

    def add_to(self, turns: Turns) -> None:
        turns.result(self.call_id, text_of(self.output))


class Thought(Body):
    type: Literal["reasoning_text", "summary_text"] = Field(description="What kind of text it is")
    text: Text = Field(description="The text of this part", examples=["The user wants to know what AI is."])


class ReasoningItem(Body):
    """What the assistant thought earlier, for templates that repeat it."""

    type: Literal["reasoning"] = Field(description="Always `reasoning`")
    content: Annotated[list[Thought], Field(max_length=MAX_MESSAGES)] | None = Field(
        None,
        description="The thoughts",
        examples=[[{"type": "reasoning_text", "text": "A short answer will do."}]],
    )
    summary: Annotated[list[Thought], Field(max_length=MAX_MESSAGES)] | None = Field(
        None,
        description="Used where there is no `content`",
        examples=[[{"type": "summary_text", "text": "A short answer will do."}]],
    )

    def add_to(self, turns: Turns) -> None:
        if text := "".join(thought.text for thought in self.content or self.summary or ()):
            turns.think(text)


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
