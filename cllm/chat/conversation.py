"""Conversations, whatever API they came by: from messages and tools to an answer taken apart.

`/v1/chat/completions`, `/v1/responses` and `/v1/messages` say the same things in different words. Each turns
its words into a `Conversation`, and what a `ChatJob` yields back into its own.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest

from cllm.errors import InvalidRequest
from cllm.frontend.async_calls import GRAMMAR_LIMIT_S, loaded, merged, run_tokenizer, submit_all
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.server.sse import collect
from cllm.text.output_parser import (
    ContentText,
    OutputEvent,
    OutputParser,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from cllm.text.tool_formats import Tool, ToolFormat, get_tool_format
from cllm.types import FinishReason, Request, RequestOutput, TokenLogprob, Usage
from cllm.workers.messages import Chat, CheckConstraint, Text, TokenizeChat, Tokens

Step = tuple[list[OutputEvent], RequestOutput]  # what it added, and its own account of itself


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be answered. Messages are dicts of `role`, `content` and, as OpenAI has them, `tool_calls`
    (arguments as JSON text) and `tool_call_id`."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[Tool, ...] = ()  # those that may be called
    forced: bool = False  # at least one of them must be
    parallel: bool = True  # several may be
    options: dict[str, Any] = {}  # for the chat template
    reasoning: bool = True  # thoughts are told apart; otherwise they are plain text
    think: bool = True  # thoughts that the template opens stay open

    @property
    def prefill(self) -> str:
        """A conversation that ends with the assistant's own words is to be continued there."""
        last = self.messages[-1]
        ends_with_words = last["role"] == "assistant" and not last.get("tool_calls")
        return str(last.get("content") or "") if ends_with_words else ""

    def for_template(self, tool_format: ToolFormat) -> Chat:
        """As the model's template takes it."""
        messages = self.messages[:-1] if self.prefill else self.messages
        shown = self.tools if tool_format.template_takes_tools else ()
        return Chat(
            messages=tuple(tool_format.prepare(messages, self.tools)),
            tools=tuple(tool.for_template() for tool in shown),
            options=self.options,
            opening=tool_format.forced_opening if self.forced else "",
            prefill=self.prefill,
            think=self.think,
        )


class Call(msgspec.Struct):
    """One tool call of an answer."""

    id: str
    name: str
    arguments: str = ""


class Reply(msgspec.Struct):
    """A finished answer, taken apart."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = []
    logprobs: list[TokenLogprob] = []
    finish_reason: FinishReason | None = None
    stop: str | None = None
    usage: Usage | None = None

    def add(self, events: Sequence[OutputEvent], delta: RequestOutput) -> None:
        """Take in a step's events."""
        for event in events:
            match event:
                case ContentText(text):
                    self.text += text
                case ReasoningText(text):
                    self.reasoning += text
                case ToolCallStart(_, name):
                    self.calls.append(Call(new_call_id(), name))
                case ToolCallArguments(index, text):
                    self.calls[index].arguments += text
        self.logprobs += delta.logprobs
        self.finish_reason, self.stop, self.usage = delta.finish_reason, delta.stop, delta.usage


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ChatJob:
    """A conversation on its way: submitted, and read as events. Made by `open_chat`."""

    def __init__(
        self,
        engine: EngineClient,
        conversation: Conversation,
        tool_format: ToolFormat,
        prompt: Tokens,
        streams: list[AsyncOutputStream],
        *,
        constrained: bool,
    ) -> None:
        self.engine = engine
        self.prompt_tokens = len(prompt.tokens)
        self.streams = streams
        self._conversation = conversation
        self._tool_format = tool_format
        self._thinking = prompt.thinking
        self._constrained = constrained

    async def events(self) -> AsyncIterator[tuple[int, list[OutputEvent], RequestOutput]]:
        """Of each step: which answer, what it added, and the step's own account of itself."""
        readers = [self._reader() for _ in self.streams]
        if len(self.streams) == 1:  # by far the most: without a generator in between
            stream, reader = self.streams[0], readers[0]
            while True:
                delta = await stream.next()
                yield 0, _read(reader, delta), delta
                if delta.finish_reason is not None:
                    return
        async for index, delta in merged(self.streams):
            yield index, _read(readers[index], delta), delta

    async def steps(self, http: HttpRequest) -> list[list[Step]] | None:
        """The finished answers, step by step, or None if the client has gone."""
        collected = await collect(self.engine, self.streams, http)
        if collected is None:
            return None
        answers: list[list[Step]] = []
        for deltas in collected:
            reader = self._reader()
            answers.append([(_read(reader, delta), delta) for delta in deltas])
        return answers

    async def replies(self, http: HttpRequest) -> list[Reply] | None:
        """The finished answers, or None if the client has gone."""
        answers = await self.steps(http)
        if answers is None:
            return None
        replies: list[Reply] = []
        for steps in answers:
            reply = Reply()
            for events, delta in steps:
                reply.add(events, delta)
            replies.append(reply)
        return replies

    def _reader(self) -> OutputParser:
        conversation = self._conversation
        if conversation.forced:
            names = [tool.name for tool in conversation.tools]
            return OutputParser(self._tool_format, names, calling=True, parallel=conversation.parallel)
        if self._constrained:
            return OutputParser(reasoning=False)
        return OutputParser(
            self._tool_format if conversation.tools else None,
            [tool.name for tool in conversation.tools],
            thinking=self._thinking,
            parallel=conversation.parallel,
            reasoning=conversation.reasoning,
        )


def _read(reader: OutputParser, delta: RequestOutput) -> list[OutputEvent]:
    events = reader.feed(delta.text) if delta.text else []
    return events if delta.finish_reason is None else events + reader.finish()


async def open_chat(
    engine: EngineClient, conversation: Conversation, request: Request, count: int = 1
) -> ChatJob:
    """Ask for `count` answers. `request` says everything but the prompt (and the grammar of forced calls).

    Raises InvalidRequest for what the template or the grammar cannot do, and what the engine refuses with.
    """
    engine.check_capacity()
    info, limits = loaded(engine)
    tool_format = get_tool_format(info.template_for(tools=bool(conversation.tools)))
    constraint = request.constraint
    if conversation.forced:
        if constraint is not None:
            raise InvalidRequest(
                "a tool call is demanded and the answer's form too: give only one", "tool_choice"
            )
        constraint = tool_format.forced(conversation.tools, parallel=conversation.parallel)
        await run_tokenizer(engine, CheckConstraint(constraint), Text, GRAMMAR_LIMIT_S)
    prompt = await _prompt(
        engine, conversation, tool_format, constrained=constraint is not None, most=limits.request_tokens
    )
    request = msgspec.structs.replace(
        request,
        constraint=constraint,
        markers=tool_format.markers if conversation.tools and constraint is None else (),
    )
    streams = submit_all(engine, request, [prompt.tokens], count)
    return ChatJob(engine, conversation, tool_format, prompt, streams, constrained=constraint is not None)


async def count_tokens(engine: EngineClient, conversation: Conversation, *, constrained: bool) -> int:
    """How long the prompt of this conversation is, even where it is too long; nothing is generated."""
    template = loaded(engine)[0].template_for(tools=bool(conversation.tools))
    tool_format = get_tool_format(template)
    constrained = constrained or conversation.forced
    return len((await _prompt(engine, conversation, tool_format, constrained=constrained, most=0)).tokens)


async def _prompt(
    engine: EngineClient, conversation: Conversation, tool_format: ToolFormat, *, constrained: bool, most: int
) -> Tokens:
    if constrained or conversation.prefill:  # neither may begin inside thoughts
        conversation = msgspec.structs.replace(conversation, think=False)
    return await run_tokenizer(engine, TokenizeChat(conversation.for_template(tool_format), most), Tokens)


JOINT = "\n"  # between texts that become one message


class Turns:
    """Messages as `Conversation` takes them, built piece by piece.

    Calls and thoughts belong to the assistant's message beside them. System texts in a row are one message:
    templates know no second. With `combine`, so are texts in a row by anybody else.
    """

    def __init__(self, *, combine: bool = False) -> None:
        self.messages: list[dict[str, Any]] = []
        self._combine = combine

    def say(self, role: str, text: str) -> None:
        """Somebody's words."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != role or not (self._combine or role == "system" or _only_thoughts(last)):
            self.messages.append({"role": role, "content": text})
        else:
            last["content"] = JOINT.join(filter(None, (last["content"], text)))

    def think(self, text: str) -> None:
        """The assistant's thoughts, before the words or calls that they led to."""
        turn = self._assistant()
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """The assistant called a tool; `arguments` is JSON text."""
        calls = self._assistant().setdefault("tool_calls", [])
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str) -> None:
        """What a call returned."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _assistant(self) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _only_thoughts(message: dict[str, Any]) -> bool:
    return bool(message.get("reasoning_content")) and not message["content"] and "tool_calls" not in message
