"""The body of `/v1/chat/completions`: messages, tools, and how they are to be answered."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, ConfigDict, Field, model_validator

from cllm.server.chat import Conversation
from cllm.server.openai.schema import Name, OpenAIBody
from cllm.server.schema import Body, JsonObject, Text
from cllm.text.dialects import Tool

MOST_MESSAGES = 4096
MOST_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class TextPart(Body):
    type: Literal["text"] = Field(description="Only text: the model has no eyes or ears")
    text: Text = Field(description="The text of this part")


class CalledFunction(Body):
    name: FunctionName = Field(description="The tool that was called")
    arguments: Text = Field("{}", description="Its arguments as JSON text")


class ToolCallBody(Body):
    """A call the assistant made earlier in the conversation."""

    id: Name = Field(description="As the answer that made it gave it")
    type: Literal["function"] = Field("function", description="Always `function`")
    function: CalledFunction


class MessageBody(Body):
    """One message. Only text: the model has no eyes."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="Who speaks")
    content: Text | Annotated[list[TextPart], Field(max_length=MOST_MESSAGES)] | None = Field(
        None, description="Text, or parts of text; control tokens spelled in it stay plain text"
    )
    name: Name | None = Field(None, description="Of the speaker, for templates that use it")
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=MOST_TOOLS)] | None = Field(
        None, description="Calls of an assistant's message"
    )
    tool_call_id: Name | None = Field(None, description="Which call a `tool` message answers")
    reasoning_content: Text | None = Field(
        None, description="Thoughts of an assistant's message, for templates that repeat them"
    )

    def plain(self) -> dict[str, Any]:
        """As chat templates want it: text content, and no role they do not know."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        plain: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content or "",
        }
        for key in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, key)) is not None:
                plain[key] = value
        if self.tool_calls:
            plain["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return plain


class FunctionBody(Body):
    name: FunctionName = Field(description="Letters, digits, `_`, `-` and `.`, at most 64")
    description: Text | None = Field(
        None, max_length=1 << 14, description="What it does and when, for the model"
    )
    parameters: JsonObject | None = Field(None, description="JSON schema of its arguments")
    strict: bool | None = Field(None, description="Ignored: forced calls always fit the schema")


class ToolBody(Body):
    type: Literal["function"] = Field(description="Always `function`")
    function: FunctionBody

    def tool(self) -> Tool:
        return Tool(self.function.name, self.function.description or "", self.function.parameters or {})


class ChosenFunction(Body):
    name: FunctionName = Field(description="One of the tools")


class ChosenTool(Body):
    type: Literal["function"] = Field(description="Always `function`")
    function: ChosenFunction


class ConversationBody(Body):
    """Messages and tools: what `/apply-template` needs too."""

    messages: list[MessageBody] = Field(
        min_length=1,
        max_length=MOST_MESSAGES,
        description="The conversation; if the assistant's words end it, they are continued",
    )
    tools: Annotated[list[ToolBody], Field(max_length=MOST_TOOLS)] | None = Field(
        None, description="Functions the model may call"
    )
    tool_choice: Literal["none", "auto", "required"] | ChosenTool = Field(
        "auto",
        description="Whether one may or must be called, or which; forced calls always fit their schema",
    )
    parallel_tool_calls: bool = Field(True, description="Several calls in one answer are fine")
    chat_template_kwargs: Annotated[JsonObject, Field(max_length=32)] | None = Field(
        None, description="Variables for the chat template, for example `enable_thinking`"
    )
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = Field(
        None,
        description="A variable for the chat template; `none` also switches `enable_thinking` off",
    )
    reasoning_format: Literal["auto", "none"] = Field(
        "auto", description="`auto`: thoughts go to `reasoning_content`; `none`: they stay in the text"
    )

    @model_validator(mode="after")
    def _tools_are_named(self) -> ConversationBody:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("tools: two of them have the same name")
        wanted = self.tool_choice
        if isinstance(wanted, ChosenTool) and wanted.function.name not in names:
            raise ValueError(f"tool_choice: {wanted.function.name!r} is not among the tools")
        if wanted == "required" and not names:
            raise ValueError("tool_choice: required needs tools")
        return self

    def conversation(self) -> Conversation:
        """In neutral words."""
        tools = () if self.tool_choice == "none" else tuple(tool.tool() for tool in self.tools or ())
        wanted = self.tool_choice
        if isinstance(wanted, ChosenTool):
            tools = tuple(tool for tool in tools if tool.name == wanted.function.name)
        options = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            options.setdefault("reasoning_effort", self.reasoning_effort)
            options.setdefault("enable_thinking", self.reasoning_effort != "none")
        return Conversation(
            messages=tuple(message.plain() for message in self.messages),
            tools=tools,
            forced=bool(tools) and wanted != "auto",
            parallel=self.parallel_tool_calls and not isinstance(wanted, ChosenTool),
            options=options,
            reasoning=self.reasoning_format != "none",
        )


class ChatBody(ConversationBody, OpenAIBody):
    """`POST /v1/chat/completions`."""

    max_tokens: int | None = Field(
        None,
        ge=1,
        validation_alias=AliasChoices("max_completion_tokens", "max_tokens"),
        description="Most tokens to generate (also `max_completion_tokens`); null: as many as fit",
    )
    logprobs: bool = Field(False, description="Log-probabilities of the chosen tokens")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="And of this many likeliest ones")

    model_config = ConfigDict(
        json_schema_extra={"example": {"messages": [{"role": "user", "content": "What is AI?"}]}}
    )

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self
