"""The body of `/v1/chat/completions`: messages, tools, and how they are to be answered."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AliasChoices, ConfigDict, Field, model_validator

from cllm.chat.conversation import ChatJob, Conversation, Reply, new_call_id
from cllm.server.errors import failure_body
from cllm.server.protocol import completions as render
from cllm.server.protocol.base import Body, JsonObject, Text, ToolDescription, check_tools
from cllm.server.protocol.completions import Name, OpenAIBody
from cllm.server.sse import encode
from cllm.text.output_parser import ContentText, OutputEvent, ReasoningText, ToolCallArguments, ToolCallStart
from cllm.text.tool_formats import Tool
from cllm.types import FinishReason, RequestOutput, TokenLogprob

MAX_MESSAGES = 4096
MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"] = Field(description="Only text: the model has no eyes or ears")
    text: Text = Field(description="The text of this part", examples=["What is AI?"])

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"this model reads text and has no eyes for {kind[:32]!r}; nothing was fetched")
        return value


class CalledFunction(Body):
    """Which tool was called, and with what."""

    name: FunctionName = Field(description="The tool that was called", examples=["get_weather"])
    arguments: Text = Field("{}", description="Its arguments as JSON text")


class ToolCallBody(Body):
    """A call the assistant made earlier in the conversation."""

    id: Name = Field(description="As the answer that made it gave it", examples=["call_1"])
    type: Literal["function"] = Field("function", description="Always `function`")
    function: CalledFunction = Field(
        description="Which tool, and with what",
        examples=[{"name": "get_weather", "arguments": '{"city": "Bern"}'}],
    )


class MessageBody(Body):
    """One message. Only text: the model has no eyes."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="Who speaks")
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)] | None = Field(
        None,
        description="Text, or parts of text; control tokens spelled in it stay plain text",
        examples=["What is AI?", [{"type": "text", "text": "What is AI?"}]],
    )
    name: Name | None = Field(None, description="Of the speaker, for templates that use it", examples=["Ann"])
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=MAX_TOOLS)] | None = Field(
        None,
        description="Calls of an assistant's message",
        examples=[[{"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}]],
    )
    tool_call_id: Name | None = Field(
        None, description="Which call a `tool` message answers", examples=["call_1"]
    )
    reasoning_content: Text | None = Field(
        None,
        description="Thoughts of an assistant's message, for templates that repeat them",
        examples=["The user wants to know what AI is."],
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
    """A function the model may call."""

    name: FunctionName = Field(
        description="Letters, digits, `_`, `-` and `.`, at most 64", examples=["get_weather"]
    )
    description: ToolDescription = None
    parameters: JsonObject | None = Field(
        None,
        description="JSON schema of its arguments; none: it takes none",
        examples=[{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}],
    )
    strict: bool | None = Field(
        None, description="Ignored: forced calls always fit the schema", examples=[True]
    )

    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.parameters or {})


class ToolBody(Body):
    """A tool; only functions."""

    type: Literal["function"] = Field(description="Always `function`")
    function: FunctionBody = Field(description="The function", examples=[{"name": "now"}])


class ChosenFunction(Body):
    """The name of a tool."""

    name: FunctionName = Field(description="One of the tools", examples=["get_weather"])


class ChosenTool(Body):
    """The one tool that must be called."""

    type: Literal["function"] = Field(description="Always `function`")
    function: ChosenFunction = Field(description="Which", examples=[{"name": "get_weather"}])


class ConversationBody(Body):
    """Messages and tools: what `/apply-template` needs too."""

    messages: list[MessageBody] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        description="The conversation; if the assistant's words end it, they are continued",
        examples=[[{"role": "user", "content": "What is AI?"}]],
    )
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)] | None = Field(
        None,
        description="Functions the model may call",
        examples=[[{"type": "function", "function": {"name": "now", "description": "The time"}}]],
    )
    tool_choice: Literal["none", "auto", "required"] | ChosenTool = Field(
        "auto",
        description="Whether one may or must be called, or which; forced calls always fit their schema",
    )
    parallel_tool_calls: bool = Field(True, description="Several calls in one answer are fine")
    chat_template_kwargs: Annotated[JsonObject, Field(max_length=32)] | None = Field(
        None, description="Variables for the chat template", examples=[{"enable_thinking": False}]
    )
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = Field(
        None,
        description="A variable for the chat template; `none` also switches `enable_thinking` off",
        examples=["none", "low"],
    )
    reasoning_format: Literal["auto", "none"] = Field(
        "auto", description="`auto`: thoughts go to `reasoning_content`; `none`: they stay in the text"
    )

    model_config = ConfigDict(
        json_schema_extra={"example": {"messages": [{"role": "user", "content": "What is AI?"}]}}
    )

    @model_validator(mode="after")
    def _tools_are_named(self) -> ConversationBody:
        wanted = self.tool_choice
        check_tools(
            [tool.function.name for tool in self.tools or ()],
            [wanted.function.name] if isinstance(wanted, ChosenTool) else (),
            demanded="required" if wanted == "required" else "",
        )
        return self

    def conversation(self) -> Conversation:
        """In neutral words."""
        tools = () if self.tool_choice == "none" else tuple(tool.function.tool() for tool in self.tools or ())
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
        description="Most tokens to generate (also `max_tokens`); null: as many as fit",
        examples=[64],
    )
    logprobs: bool = Field(False, description="Log-probabilities of the chosen tokens")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="And of this many likeliest ones; needs `logprobs`", examples=[2]
    )

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"messages": [{"role": "user", "content": "What is AI?"}], "max_tokens": 64}
        }
    )

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


ROUTE = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
_json = msgspec.json.Encoder()
_CONTENT = b',"delta":{"content":'
_CLOSING = b'},"logprobs":null,"finish_reason":null}]}\n\n'


def finish_reason(reason: FinishReason | None, *, called: bool) -> str | None:
    """`tool_calls` where a call is how it ended."""
    if reason is None:
        return None
    return "tool_calls" if called and reason is FinishReason.STOP else reason.value


class ChatAnswer:
    """One call of the route, as a whole answer or as chunks. `top` is None where no logprobs are wanted."""

    def __init__(self, head: dict[str, Any], top: int | None, *, include_usage: bool = False) -> None:
        self._head = head
        self._top = top
        self._include_usage = include_usage
        # All chunks begin alike: that part is encoded once.
        self._prefix = b"data: " + _json.encode(self._chunk([]))[:-2]
        self._opening = self._prefix + b'{"index":'

    def _chunk(self, choices: list[Any], **more: Any) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", **more, "choices": choices}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return None if self._top is None else render.chat_logprobs(entries, self._top)

    def whole(self, replies: Sequence[Reply], prompt_tokens: int) -> dict[str, Any]:
        """The answer to a call that does not stream."""
        choices = [
            {
                "index": index,
                "message": _message(reply),
                "logprobs": self._logprobs(reply.logprobs),
                "finish_reason": finish_reason(reply.finish_reason, called=bool(reply.calls)),
            }
            for index, reply in enumerate(replies)
        ]
        used = render.make_usage([reply.usage for reply in replies], prompt_tokens)
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": used}

    async def chunks(self, job: ChatJob) -> AsyncIterator[bytes]:
        """Chunks as they come, the usage if it was asked for, `[DONE]`; or an error, and the end."""
        count = len(job.streams)
        for index in range(count):
            yield self._encoded(index, {"role": "assistant", "content": ""})
        called = [False] * count
        ended = []
        async for index, events, delta in job.events():
            if delta.error is not None:
                yield encode(failure_body(ROUTE, delta.error))
                return
            if delta.finish_reason is None and not delta.logprobs and len(events) == 1:
                event = events[0]
                if type(event) is ContentText:  # nearly all of them: put together as bytes
                    yield b"%b%d%b%b%b" % (self._opening, index, _CONTENT, _json.encode(event.text), _CLOSING)
                    continue
            called[index] = called[index] or any(isinstance(event, ToolCallStart) for event in events)
            if pieces := self._pieces(index, events, delta, called=called[index]):
                yield pieces
            if delta.finish_reason is not None:
                ended.append(delta.usage)
        if self._include_usage:
            yield encode(self._chunk([], usage=render.make_usage(ended, job.prompt_tokens)))
        yield DONE

    def _pieces(
        self, index: int, events: Sequence[OutputEvent], delta: RequestOutput, *, called: bool
    ) -> bytes:
        """A step's chunks. Its log-probabilities go with the last of them that says something."""
        deltas = [_delta(event) for event in events]
        spoken = max(0, len(deltas) - 1)
        if delta.finish_reason is not None or (delta.logprobs and not deltas):
            deltas.append({})
        finish = finish_reason(delta.finish_reason, called=called)
        last = len(deltas) - 1
        return b"".join(
            self._encoded(
                index,
                each,
                delta.logprobs if place == spoken else (),
                finish if place == last else None,
            )
            for place, each in enumerate(deltas)
        )

    def _encoded(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Sequence[TokenLogprob] = (),
        finish: str | None = None,
    ) -> bytes:
        told = self._logprobs(logprobs) if logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": told, "finish_reason": finish}
        return self._prefix + _json.encode(choice) + b"]}\n\n"


def _delta(event: OutputEvent) -> dict[str, Any]:
    match event:
        case ContentText(text):
            return {"content": text}
        case ReasoningText(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, name):
            function = {"name": name, "arguments": ""}
            return {
                "tool_calls": [
                    {"index": index, "id": new_call_id(), "type": "function", "function": function}
                ]
            }
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reply.text if reply.text or not reply.calls else None,
        "refusal": None,
    }
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in reply.calls
        ]
    return message
