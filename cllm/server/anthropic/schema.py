"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from cllm.errors import InvalidRequest
from cllm.server.anthropic.content import (
    MOST_BLOCKS,
    AssistantBlock,
    Identifier,
    Texts,
    ToolName,
    UserBlock,
    text_of,
)
from cllm.server.chat import Conversation
from cllm.server.kinds import kinds
from cllm.server.nullable import NullableBody
from cllm.server.schema import Body, ConstrainedBody, JsonObject, StopText, Text
from cllm.server.tools import ToolDescription, check_tools
from cllm.server.turns import Turns
from cllm.text.dialects import Tool

MOST_MESSAGES = 4096
MOST_TOOLS = 512


class UserMessage(Body):
    role: Literal["user"] = Field(description="Who speaks")
    content: Text | Annotated[list[UserBlock], Field(max_length=MOST_BLOCKS)] = Field(
        description="Text, or blocks: text and results of tools",
        examples=["What is AI?", [{"type": "text", "text": "What is AI?"}]],
    )


class AssistantMessage(Body):
    role: Literal["assistant"] = Field(description="Who speaks")
    content: Text | Annotated[list[AssistantBlock], Field(max_length=MOST_BLOCKS)] = Field(
        description="Text, or blocks: text, calls of tools, thoughts",
        examples=["AI is", [{"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}}]],
    )


class SystemMessage(Body):
    role: Literal["system"] = Field(description="Instructions, where the template takes them")
    content: Text | Texts = Field(description="Text, or blocks of text", examples=["Be brief."])


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class ClientTool(Body):
    """`cache_control` is ignored."""

    type: Literal["custom"] = Field("custom", description="May be left out; server tools are refused")
    name: ToolName = Field(
        description="Letters, digits, `_`, `-` and `.`, at most 128", examples=["get_weather"]
    )
    description: ToolDescription = None
    input_schema: JsonObject = Field(
        description="JSON schema of its arguments",
        examples=[{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}],
    )

    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.input_schema)


_NO_SERVER_TOOLS = {"": "this server runs no tools of its own, it only asks for calls of yours"}


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"] = Field(
        description="Whether a tool may (`auto`), must (`any`, `tool`) or must not (`none`) be called"
    )
    name: ToolName | None = Field(None, description="With `tool`: which one", examples=["get_weather"])
    disable_parallel_tool_use: bool = Field(False, description="At most one call in an answer")

    @model_validator(mode="after")
    def _consistent(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name belongs to the type tool, and is needed there")
        return self


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"] = Field(
        description="The template's `enable_thinking`; left out: as the template has it"
    )
    budget_tokens: int | None = Field(
        None, ge=1, description="Not enforced: thoughts count towards `max_tokens`, which is", examples=[1024]
    )


class Metadata(Body):
    user_id: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="Ignored", examples=["somebody"]
    )


class JsonFormat(Body):
    type: Literal["json_schema"] = Field(description="Always `json_schema`")
    schema_: JsonObject = Field(
        alias="schema",
        description="What the answer validates against",
        examples=[{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}],
    )


class OutputConfig(Body):
    effort: Annotated[str, Field(max_length=32)] | None = Field(
        None, description="A variable for the chat template: `reasoning_effort`", examples=["low"]
    )
    format: JsonFormat | None = Field(
        None,
        description="A schema for the answer",
        examples=[{"type": "json_schema", "schema": {"type": "object"}}],
    )


class CountBody(NullableBody, ConstrainedBody):
    """`POST /v1/messages/count_tokens`: everything that makes the prompt."""

    form = "output_config.format"

    model: Identifier | None = Field(
        None, description="Any plain name is served by the loaded model", examples=["any"]
    )
    messages: list[Message] = Field(
        min_length=1,
        max_length=MOST_MESSAGES,
        description="The conversation; if the assistant's words end it, they are continued",
        examples=[[{"role": "user", "content": "What is AI?"}]],
    )
    system: Text | Texts | None = Field(
        None, description="Instructions: text, or blocks of text", examples=["Be brief."]
    )
    tools: (
        Annotated[
            list[Annotated[ClientTool, kinds("custom", default="custom", why=_NO_SERVER_TOOLS)]],
            Field(max_length=MOST_TOOLS),
        ]
        | None
    ) = Field(
        None,
        description="Tools the model may call",
        examples=[[{"name": "now", "input_schema": {"type": "object"}}]],
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description="Whether one may or must be called, or which; forced calls always fit their schema",
        examples=[{"type": "auto"}],
    )
    thinking: Thinking | None = Field(
        None, description="Whether the model thinks before it answers", examples=[{"type": "disabled"}]
    )
    output_config: OutputConfig | None = Field(
        None, description="A schema for the answer; effort", examples=[{"effort": "low"}]
    )
    temperature: float = Field(0.8, ge=0, le=1, description="0 is greedy")
    chat_template_kwargs: Annotated[JsonObject, Field(max_length=32)] | None = Field(
        None,
        description="Variables for the chat template. Not in Anthropic's",
        examples=[{"enable_thinking": False}],
    )

    model_config = ConfigDict(
        json_schema_extra={"example": {"messages": [{"role": "user", "content": "What is AI?"}]}}
    )

    @model_validator(mode="after")
    def _tools_are_named(self) -> CountBody:
        wanted = self.tool_choice
        check_tools(
            [tool.name for tool in self.tools or ()],
            [wanted.name] if wanted is not None and wanted.name is not None else (),
            demanded="any" if wanted is not None and wanted.type == "any" else "",
        )
        return self

    def form_schema(self) -> dict[str, Any] | None:
        wanted = self.output_config.format if self.output_config is not None else None
        return None if wanted is None else wanted.schema_

    def conversation(self) -> Conversation:
        """In neutral words. Raises InvalidRequest."""
        wanted = self.tool_choice
        kind = "auto" if wanted is None else wanted.type
        tools = () if kind == "none" else tuple(tool.tool() for tool in self.tools or ())
        if wanted is not None and wanted.name is not None:
            tools = tuple(tool for tool in tools if tool.name == wanted.name)
        return Conversation(
            messages=tuple(self._turns().messages),
            tools=tools,
            forced=kind in ("any", "tool"),
            parallel=kind != "tool" and not (wanted is not None and wanted.disable_parallel_tool_use),
            options=self._options(),
            think=self.thinking is None or self.thinking.type != "disabled",
        )

    def _turns(self) -> Turns:
        turns = Turns(combine=True)
        if system := text_of(self.system):
            turns.say("system", system)
        for message in self.messages:
            if isinstance(message.content, str):
                turns.say(message.role, message.content)
            elif isinstance(message, SystemMessage):
                turns.say(message.role, text_of(message.content))
            else:
                for block in message.content:
                    block.add_to(turns, message.role)
        if not turns.messages:
            raise InvalidRequest("messages: there is nothing to answer in them", "messages")
        return turns

    def _options(self) -> dict[str, Any]:
        options = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            options.setdefault("enable_thinking", self.thinking.type != "disabled")
        if self.output_config is not None and self.output_config.effort is not None:
            options.setdefault("reasoning_effort", self.output_config.effort)
        return options


class MessagesBody(CountBody):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1, description="Most tokens to generate, thoughts included", examples=[64])
    stop_sequences: Annotated[list[StopText], Field(max_length=16)] | None = Field(
        None, description="Texts that end the answer; they are not part of it", examples=[["\n\n"]]
    )
    stream: bool = Field(False, description="Answer as server-sent events")
    metadata: Metadata | None = Field(None, description="Ignored", examples=[{"user_id": "somebody"}])

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"max_tokens": 64, "messages": [{"role": "user", "content": "What is AI?"}]}
        }
    )
