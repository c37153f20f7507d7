"""Chat session: a conversation opened on an engine, its outputs read as events of an output parser.

`open_chat` serves asyncio (HTTP routes, `AsyncLLM`), `open_chat_blocking` threads (`LLM`).
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Generic

import msgspec

from cllm.chat.conversation import Conversation
from cllm.chat.reply import ParsedOutput
from cllm.frontend.async_calls import loaded, merged, run_tokenizer, submit_all
from cllm.frontend.engine_client import EngineClient, StreamKind
from cllm.frontend.output_stream import AsyncOutputStream, BlockingOutputStream
from cllm.text.output_parser import THINK_END, THINK_START, OutputEvent, OutputParser
from cllm.text.prompt import Chat
from cllm.text.tool_formats import ToolFormat, get_tool_format
from cllm.types import ConstraintKind, ConstraintSpec, ReasoningLimit, Request, RequestOutput
from cllm.workers.messages import CheckConstraint, Text, TokenizeChat, TokenizeText, Tokens

ChoiceEvents = tuple[int, list[OutputEvent], RequestOutput]  # which choice, its new events, their output


class ChatPlan(msgspec.Struct, frozen=True):
    """How a conversation is opened: tool-call format, prompt task and request."""

    conversation: Conversation
    tool_format: ToolFormat
    request: Request  # complete but for the prompt
    prompt: TokenizeChat
    check: CheckConstraint | None  # of the grammar of forced calls


def plan_chat(engine: EngineClient, conversation: Conversation, request: Request) -> ChatPlan:
    """Plan a chat. `request` gives everything but the prompt and the grammar of calls.

    A constraint of the request is for the text of the answer: a forced call drops it.
    """
    engine.check_capacity()
    info, limits = loaded(engine)
    tool_format = get_tool_format(info.template_for(tools=bool(conversation.tools)))
    form, check = request.constraint, None
    constraint = form
    # Besides a schema calls stay possible; any other form is the whole answer's.
    may_call = bool(conversation.tools) and (form is None or form.kind is ConstraintKind.JSON_SCHEMA)
    if conversation.forced or (may_call and form is not None):
        constraint = tool_format.make_call_grammar(conversation.tools, parallel=conversation.parallel)
        if form is not None and not conversation.forced:
            constraint = _make_either(constraint, form, tool_format.forced_opening)
        check = CheckConstraint(constraint)
    markers = tool_format.markers if may_call and not conversation.forced else ()
    request = msgspec.structs.replace(request, constraint=constraint, markers=markers)
    chat = conversation.for_template(tool_format, constrained=constraint is not None)
    prompt = TokenizeChat(chat, limits.request_tokens)
    return ChatPlan(conversation, tool_format, request, prompt, check)


def _make_either(calls: ConstraintSpec, form: ConstraintSpec, opening: str) -> ConstraintSpec:
    """The grammar of an answer that is calls, or JSON by the form's schema."""
    schema = json.loads(form.source)
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_flexible": False}}
    begin = f"{json.dumps(opening)} " if opening else ""
    rules = calls.source.replace("start:", "calls:", 1)
    source = f"start: {begin}calls | form\nform: %json {json.dumps(schema)}\n{rules}"
    return ConstraintSpec(ConstraintKind.TOOLS, source)


async def _limit_reasoning(engine: EngineClient, plan: ChatPlan, prompt: Tokens) -> ChatPlan:
    """The plan with the budget of its reasoning, if it has one."""
    conversation, request = plan.conversation, plan.request
    if conversation.reasoning_budget is None or request.constraint is not None or not conversation.think:
        return plan
    markers = []
    for text in (THINK_START, THINK_END):
        task = TokenizeText(text, add_special=False, parse_special=True)
        markers.append((await run_tokenizer(engine, task, Tokens)).tokens)
    limit = ReasoningLimit(
        budget=conversation.reasoning_budget,
        opening=markers[0],
        closing=markers[1],
        inside=prompt.thinking,
    )
    return msgspec.structs.replace(plan, request=msgspec.structs.replace(request, reasoning=limit))


class ChatSession(Generic[StreamKind]):
    """A conversation with n choices on their way, each with an output parser of its own."""

    def __init__(
        self, engine: EngineClient, plan: ChatPlan, prompt: Tokens, n: int, kind: type[StreamKind]
    ) -> None:
        self.engine = engine
        self.prompt_tokens = len(prompt.tokens)
        self.streams = submit_all(engine, plan.request, [prompt.tokens], n, kind)
        self._plan = plan
        self._thinking = prompt.thinking

    @property
    def chat(self) -> Chat:
        """What its prompt was made of."""
        return self._plan.prompt.chat

    async def events(self: ChatSession[AsyncOutputStream]) -> AsyncIterator[ChoiceEvents]:
        """The events of all choices as they arrive."""
        parsers = [self._make_parser() for _ in self.streams]
        if len(self.streams) == 1:  # the usual case, without a generator in between
            stream, parser = self.streams[0], parsers[0]
            while True:
                output = await stream.next()
                yield 0, _parse(parser, output), output
                if output.finish_reason is not None:
                    return
        async for index, output in merged(self.streams):
            yield index, _parse(parsers[index], output), output

    def events_blocking(self: ChatSession[BlockingOutputStream]) -> Iterator[ChoiceEvents]:
        """`events` for threads."""
        parsers = [self._make_parser() for _ in self.streams]
        for index, output in _merge_blocking(self.streams):
            yield index, _parse(parsers[index], output), output

    def parse(self, outputs: Sequence[RequestOutput]) -> list[ParsedOutput]:
        """All outputs of one finished choice with their events."""
        parser = self._make_parser()
        return [(_parse(parser, output), output) for output in outputs]

    def _make_parser(self) -> OutputParser:
        conversation, tool_format = self._plan.conversation, self._plan.tool_format
        names = [tool.name for tool in conversation.tools]
        if conversation.forced:
            return OutputParser(tool_format, names, calling=True, parallel=conversation.parallel)
        constraint = self._plan.request.constraint
        if constraint is not None and constraint.kind is not ConstraintKind.TOOLS:
            return OutputParser(reasoning=False)
        return OutputParser(
            tool_format if names else None,
            names,
            thinking=self._thinking,
            parallel=conversation.parallel,
            reasoning=conversation.reasoning and constraint is None,
        )


def _parse(parser: OutputParser, output: RequestOutput) -> list[OutputEvent]:
    events = parser.feed(output.text) if output.text else []
    return events if output.finish_reason is None else events + parser.finish()


def _merge_blocking(streams: Sequence[BlockingOutputStream]) -> Iterator[tuple[int, RequestOutput]]:
    """The outputs of several streams as they arrive, each with the index of its stream.

    One thread a stream; it ends with its stream. To leave early, cancel the requests.
    """
    if len(streams) == 1:
        yield from ((0, output) for output in streams[0])
        return
    outputs: queue.SimpleQueue[tuple[int, RequestOutput]] = queue.SimpleQueue()

    def pump(index: int, stream: BlockingOutputStream) -> None:
        for output in stream:
            outputs.put((index, output))

    for index, stream in enumerate(streams):
        threading.Thread(target=pump, args=(index, stream), name="cllm-choice", daemon=True).start()
    running = len(streams)
    while running:
        index, output = outputs.get()
        running -= output.finish_reason is not None
        yield index, output


async def open_chat(
    engine: EngineClient, conversation: Conversation, request: Request, n: int = 1
) -> ChatSession[AsyncOutputStream]:
    """Submit n choices. Raises InvalidRequest (template, grammar), and what `EngineClient.submit` raises."""
    plan = plan_chat(engine, conversation, request)
    if plan.check is not None:
        await run_tokenizer(engine, plan.check, Text)
    prompt = await run_tokenizer(engine, plan.prompt, Tokens)
    plan = await _limit_reasoning(engine, plan, prompt)
    return ChatSession(engine, plan, prompt, n, AsyncOutputStream)


def open_chat_blocking(
    engine: EngineClient, conversation: Conversation, request: Request, n: int = 1
) -> ChatSession[BlockingOutputStream]:
    """`open_chat` for threads, without time limits on tokenizer tasks."""
    plan = plan_chat(engine, conversation, request)
    if plan.check is not None:
        engine.tokenizer.submit(plan.check).result()
    prompt = engine.tokenizer.submit(plan.prompt).result()
    assert isinstance(prompt, Tokens)
    return ChatSession(engine, plan, prompt, n, BlockingOutputStream)


async def count_tokens(engine: EngineClient, conversation: Conversation, *, constrained: bool) -> int:
    """Length of the prompt of this conversation, even where it is too long; nothing is generated."""
    tool_format = get_tool_format(loaded(engine)[0].template_for(tools=bool(conversation.tools)))
    chat = conversation.for_template(tool_format, constrained=constrained or conversation.forced)
    return len((await run_tokenizer(engine, TokenizeChat(chat, 0), Tokens)).tokens)
