"""The bodies of Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cllm.chat.conversation import (
    MESSAGE_JOINT,
    Conversation,
    MessageBuilder,
    ToolChoice,
    count_answered,
    note_media,
    write_arguments,
)
from cllm.errors import InvalidRequest
from cllm.server.body import Body, ModelName, StopText, TokenLimit, about
from cllm.server.dialects.openai.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    MESSAGES,
    PARAMETERS,
    QUESTION,
    REASONING,
    SCHEMA,
    TOOL_CHOICE,
    Arguments,
    CallId,
    Effort,
    FunctionName,
    ReasoningBudget,
    TemplateOptions,
    ToolDescription,
    take_tools,
)
from cllm.server.generation import GenerationBody
from cllm.text.chat_format import Tool

log = logging.getLogger(__name__)
BILLING_HEADER = "x-anthropic-billing-header:"
MAX_BLOCKS = 4096
_FIELDS = {  # of a block, by its type; a block of any other type is replaced by its text or a note
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "content", "is_error"),
    "thinking": ("thinking",),
    "redacted_thinking": (),
}
_NEEDED = {"text": "text", "tool_use": "name", "thinking": "thinking"}


class ContentBlock(msgspec.Struct, Body, kw_only=True):
    """A block of a message: text, a tool call of the assistant or its result, or earlier reasoning.

    A note replaces a block that is no text. `cache_control`, `citations` and `signature` are ignored:
    prefixes are always cached.
    """

    type: Annotated[str, about("`text`, `tool_use`, `tool_result`, `thinking`, `document` …", "text")]
    text: Annotated[str | None, about("The text; control tokens in it stay plain text", QUESTION)] = None
    id: CallId = None
    name: Annotated[str | None, about("The tool that was called", "get_weather")] = None
    input: Arguments = "{}"
    tool_use_id: Annotated[str | None, about("The call that this answers", "toolu_1")] = None
    content: Annotated[
        str | Annotated[list[ContentBlock], Meta(max_length=MAX_BLOCKS)] | None,
        about("The result of a call: text, or blocks of text", "Rain", [{"type": "text", "text": "Rain"}]),
    ] = None
    is_error: Annotated[bool | None, about("The call failed: `Error: ` is put before the content", False)] = (
        None
    )
    thinking: Annotated[str | None, about("Earlier reasoning, for templates that repeat it", REASONING)] = (
        None
    )

    @classmethod
    def prepare(cls, value: dict[str, Any]) -> dict[str, Any]:
        kind = value.get("type")
        fields = _FIELDS.get(str(kind).removeprefix("mcp_"))
        if fields is None:
            return {"type": kind, "text": _find_text(value)}
        return {name: value[name] for name in ("type", *fields) if name in value}

    def check(self) -> None:
        needed = _NEEDED.get(self.kind, "type")
        if getattr(self, needed) is None:
            raise ValueError(f"{needed!r} is missing")
        self.input = write_arguments(self.input)

    @property
    def kind(self) -> str:
        """The type; a call that another server made is one like any other."""
        return self.type.removeprefix("mcp_")

    @property
    def shown(self) -> str:
        """The text, or a note in its place."""
        return self.text or ("" if self.kind == "text" else note_media(self.type))

    def add_to(self, builder: MessageBuilder, role: str) -> None:
        """Add the block to the messages of a conversation. Raises InvalidRequest."""
        match self.kind if role == "assistant" or self.kind == "tool_result" else None:
            case "tool_use":
                builder.add_tool_call(self.id, self.name or "", self.input)
            case "tool_result":
                text = join_text(self.content)
                builder.add_tool_result(self.tool_use_id, f"Error: {text}" if self.is_error else text)
            case "thinking":
                if self.thinking:
                    builder.add_reasoning(self.thinking)
            case "redacted_thinking":
                pass  # its content is encrypted
            case _ if self.type.startswith("server_tool") or self.type.endswith("_tool_result"):
                log.debug("skipped a block of type %.64r: another server's tool", self.type)
            case _:
                if self.kind != "text" and not self.text:
                    builder.check_media(role, self.type)
                builder.add_text(role, self.shown)


def _find_text(block: dict[str, Any]) -> str:
    """The text of a document or a search result; "" of any other block."""
    source, content = block.get("source"), block.get("content")
    found = [source.get("data")] if isinstance(source, dict) and source.get("type") == "text" else []
    if isinstance(content, list):
        found += [part.get("text") for part in content if isinstance(part, dict)]
    return MESSAGE_JOINT.join(text for text in found if isinstance(text, str))


Blocks = str | Annotated[list[ContentBlock], Meta(max_length=MAX_BLOCKS)]


def join_text(content: Blocks | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return MESSAGE_JOINT.join(block.shown for block in content)


def join_system(content: Blocks) -> str:
    """The text of a system prompt, each block without Claude Code's billing header.

    That line is for Anthropic's accounting and differs by session. Left in front, it would change the
    prefix of a prompt that is otherwise the same.
    """
    blocks = [content] if isinstance(content, str) else [block.shown for block in content]
    return MESSAGE_JOINT.join(filter(None, map(_drop_billing_header, blocks)))


def _drop_billing_header(text: str) -> str:
    if not text.startswith(BILLING_HEADER):
        return text
    log.debug("dropped the line %s at the beginning of a system block", BILLING_HEADER.rstrip(":"))
    return text.partition("\n")[2]


class AnthropicMessage(msgspec.Struct, Body, kw_only=True):
    """One message."""

    role: Annotated[
        Literal["user", "assistant", "system"],
        about("The author; `system`: instructions, where the template takes them"),
    ]
    content: Annotated[
        Blocks,
        about(
            "Text, or blocks: text, tool calls and their results, reasoning",
            QUESTION,
            [{"type": "text", "text": QUESTION}],
        ),
    ]

    def add_to(self, builder: MessageBuilder) -> None:
        """Add the message to those of a conversation. Raises InvalidRequest."""
        if self.role == "system":
            if system := join_system(self.content):
                builder.add_text("system", system)
        elif isinstance(self.content, str):
            builder.add_text(self.role, self.content)
        else:
            for block in self.content:
                block.add_to(builder, self.role)


class AnthropicTool(msgspec.Struct, Body, kw_only=True):
    """A tool of the client. `cache_control` is ignored."""

    type: Annotated[Literal["custom"] | None, about("May be left out", "custom")] = "custom"
    name: FunctionName
    description: ToolDescription = None
    input_schema: Annotated[dict[str, Any], about("JSON schema of its arguments", PARAMETERS)]

    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.input_schema)


class ToolChoiceBody(msgspec.Struct, Body, kw_only=True):
    type: Annotated[Literal["auto", "any", "tool", "none"], about("`any`, `tool`: one must be called")]
    name: Annotated[FunctionName | None, about("With `tool`: its name", "get_weather")] = None
    disable_parallel_tool_use: Annotated[bool, about("At most one call in an answer")] = False

    def check(self) -> None:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name is required with type tool, and with no other")


class ThinkingBody(msgspec.Struct, Body, kw_only=True):
    type: Annotated[Literal["enabled", "disabled", "adaptive"], about("The template's `enable_thinking`")]
    budget_tokens: ReasoningBudget = None


class JsonFormat(msgspec.Struct, Body, kw_only=True):
    type: Annotated[Literal["json_schema"], about("Always `json_schema`")]
    schema: Annotated[dict[str, Any], about("Of the answer", SCHEMA)]


class OutputConfig(msgspec.Struct, Body, kw_only=True):
    effort: Annotated[Effort, about("A variable for the chat template: `reasoning_effort`")] = None
    format: Annotated[
        JsonFormat | None, about("A schema for the answer", {"type": "json_schema", "schema": {}})
    ] = None


class CountBody(GenerationBody, frozen=True, kw_only=True):
    """`POST /v1/messages/count_tokens`: the fields that make the prompt."""

    form = "output_config.format"
    EXAMPLE = {"messages": MESSAGES}

    model: ModelName = None
    messages: Annotated[
        list[AnthropicMessage],
        about(
            "The conversation; an assistant message at its end is continued",
            MESSAGES,
            min_length=1,
            max_length=MAX_MESSAGES,
        ),
    ]
    system: Annotated[Blocks | None, about("Instructions", "Be brief.")] = None
    tools: Annotated[
        Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None,
        about("Tools the model may call", [{"name": "now", "input_schema": {}}]),
    ] = None
    tool_choice: Annotated[ToolChoiceBody | None, about(TOOL_CHOICE, {"type": "auto"})] = None
    thinking: Annotated[ThinkingBody | None, about("Reasoning, on or off", {"type": "disabled"})] = None
    output_config: Annotated[OutputConfig | None, about("Schema, effort", {"effort": "low"})] = None
    output_format: Annotated[JsonFormat | None, about("`output_config.format` by its older name", None)] = (
        None
    )
    temperature: Annotated[float, about("0 is greedy", ge=0, le=1)] = 0.8
    chat_template_kwargs: TemplateOptions = None

    @classmethod
    def prepare(cls, value: dict[str, Any]) -> dict[str, Any]:
        return take_tools(super().prepare(value), "custom", default="custom")

    def check(self) -> None:
        super().check()
        self._choice.check([tool.name for tool in self.tools or ()])

    @property
    def _choice(self) -> ToolChoice:
        if (wanted := self.tool_choice) is None:
            return ToolChoice()
        parallel = not wanted.disable_parallel_tool_use
        if wanted.type == "tool":
            return ToolChoice(mode="required", names=(wanted.name or "",), parallel=False)
        return ToolChoice.of(wanted.type, parallel=parallel)

    def form_schema(self) -> dict[str, Any] | None:
        wanted = self.output_config.format if self.output_config is not None else None
        wanted = wanted or self.output_format
        return None if wanted is None else wanted.schema

    def conversation(self) -> Conversation:
        """The conversation in the terms of `cllm.chat`. Raises InvalidRequest."""
        return Conversation(
            messages=tuple(self._build_messages()),
            options=self._options(),
            think=self.thinking is None or self.thinking.type != "disabled",
            reasoning_budget=self.thinking.budget_tokens if self.thinking is not None else None,
            **self._choice.apply([tool.tool() for tool in self.tools or ()]),
        )

    def _build_messages(self) -> list[dict[str, Any]]:
        builder = MessageBuilder("messages", combine=True)
        messages = [AnthropicMessage(role="system", content=self.system or ""), *self.messages]
        answered = count_answered([message.role for message in messages])
        for index, message in enumerate(messages):
            builder.answered = index < answered
            message.add_to(builder)
        if not builder.messages:
            raise InvalidRequest("messages: they have no content", "messages")
        return builder.messages

    def _options(self) -> dict[str, Any]:
        options = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            options.setdefault("enable_thinking", self.thinking.type != "disabled")
        if self.output_config is not None and self.output_config.effort is not None:
            options.setdefault("reasoning_effort", self.output_config.effort)
        return options


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """`POST /v1/messages`."""

    EXAMPLE = {"max_tokens": 64, "messages": MESSAGES}

    max_tokens: Annotated[
        TokenLimit | None, about("Maximum tokens to generate, reasoning included; -1: as many as fit", 64)
    ]
    stop_sequences: Annotated[
        Annotated[tuple[StopText, ...], Meta(max_length=16)] | None,
        about("Stop strings; they are not part of the answer", ["\n\n"]),
    ] = None
    stream: Annotated[bool, about("Answer as server-sent events")] = False
    metadata: Annotated[dict[str, Any] | None, about("Ignored", {"user_id": "ann"})] = None

    def check(self) -> None:
        super().check()
        self.set_limit("max_tokens")
