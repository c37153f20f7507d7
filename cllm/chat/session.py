"""Chat session: a conversation opened on an engine, its outputs read as events of an output parser."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Generic

import msgspec

from cllm.chat.conversation import Conversation
from cllm.chat.reply import ParsedOutput
from cllm.errors import EngineDied, InvalidRequest
from cllm.frontend.async_calls import loaded, merged, run_tokenizer, submit_all
from cllm.frontend.engine_client import EngineClient, StreamKind
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.text.call_grammar import make_call_grammar
from cllm.text.chat_format import GENERIC, ChatFormat
from cllm.text.output_parser import OutputEvent, OutputParser
from cllm.text.prompt import Chat
from cllm.types import (
    ConstraintKind,
    ConstraintSpec,
    FinishReason,
    ReasoningLimit,
    ReasoningMarks,
    Request,
    RequestOutput,
)
from cllm.workers.messages import (
    CheckConstraint,
    Described,
    DescribeFormat,
    Text,
    TokenizeChat,
    TokenizeText,
    Tokens,
)

log = logging.getLogger(__name__)
_replace = msgspec.structs.replace
ChoiceEvents = tuple[int, list[OutputEvent], RequestOutput]  # which choice, its new events, their output


class ChatPlan(msgspec.Struct, frozen=True):
    """How a conversation is opened: chat format, prompt task and request."""

    conversation: Conversation
    chat_format: ChatFormat
    request: Request  # complete but for the prompt
    prompt: TokenizeChat
    check: CheckConstraint | None  # of the grammar of calls

    def without_grammar(self) -> ChatPlan:
        """The plan where the grammar of calls that are not forced cannot be used."""
        return _replace(self, request=_replace(self.request, constraint=None), check=None)

    def make_request(self, prompt: Tokens) -> Request:
        """The request, its constraint and its limit of reasoning in force from where they belong."""
        known, request = self.chat_format, self.request
        constraint, budget = request.constraint, self.conversation.reasoning_budget
        if constraint is not None and constraint.triggers:
            openings, closings = (
                tuple(mark.strip() for mark in marks)
                for marks in (known.reasoning_openings, known.reasoning_closings)
            )
            marks = ReasoningMarks(openings, closings, prompt.thinking)
            constraint = _replace(constraint, reasoning=marks)
        elif constraint is not None:
            triggers: tuple[str, ...] = ()
            if prompt.thinking:
                triggers = tuple(mark.strip() for mark in known.reasoning_closings)
            elif known.lead and not self.conversation.forced:  # its text has an opening
                triggers = tuple(mark.removeprefix(known.lead) for mark in known.text_openings)
            constraint = _replace(constraint, triggers=triggers)
        limit = None
        free = constraint is None or constraint.triggers
        if budget is not None and free and known.closing_ids and self.conversation.think:
            ids = {"opening": known.opening_ids, "closing": known.closing_ids}
            limit = ReasoningLimit(budget=budget, inside=prompt.thinking, **ids)
        return _replace(request, constraint=constraint, reasoning=limit)


def plan_chat(
    engine: EngineClient, conversation: Conversation, request: Request, chat_format: ChatFormat
) -> ChatPlan:
    """Plan a chat. `request` gives everything but the prompt and the grammar of calls.

    A constraint of the request is for the text of the answer: a forced call drops it.
    """
    engine.check_capacity()
    _, limits = loaded(engine)
    constraint, check, tools = request.constraint, None, conversation.tools
    form = constraint if not conversation.forced else None
    # Besides a schema calls stay possible; any other form is the whole answer's.
    if tools and (form is None or form.kind is ConstraintKind.JSON_SCHEMA):
        free = form is None and not conversation.forced
        constraint = make_call_grammar(chat_format, tools, parallel=conversation.parallel, forced=not free)
        if form is not None and constraint is not None:
            constraint = _make_either(constraint, form)
        check = CheckConstraint(constraint) if constraint is not None else None
    request = _replace(request, constraint=constraint, markers=chat_format.markers)
    constrained = constraint is not None and not constraint.triggers
    prompt = TokenizeChat(conversation.for_template(constrained=constrained), limits.request_tokens)
    return ChatPlan(conversation, chat_format, request, prompt, check)


def _make_either(calls: ConstraintSpec, form: ConstraintSpec) -> ConstraintSpec:
    """The grammar of an answer that is calls, or JSON by the form's schema."""
    schema = json.loads(form.source)
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_flexible": False}}
    rules = calls.source.replace("start:", "calls:", 1)
    source = f"start: calls | form\nform: %json {json.dumps(schema)}\n{rules}"
    return ConstraintSpec(ConstraintKind.TOOLS, source)


class ChatSession(Generic[StreamKind]):
    """A conversation with n choices on their way, each with an output parser of its own."""

    def __init__(
        self, engine: EngineClient, plan: ChatPlan, prompt: Tokens, n: int, kind: type[StreamKind]
    ) -> None:
        self.engine = engine
        self.prompt_tokens = len(prompt.tokens)
        self.streams = submit_all(engine, plan.make_request(prompt), [prompt.tokens], n, kind)
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

    def parse(self, outputs: Sequence[RequestOutput]) -> list[ParsedOutput]:
        """All outputs of one finished choice with their events."""
        parser = self._make_parser()
        return [(_parse(parser, output), output) for output in outputs]

    def _make_parser(self) -> OutputParser:
        conversation, constraint = self._plan.conversation, self._plan.request.constraint
        formed = constraint is not None and constraint.kind is not ConstraintKind.TOOLS
        return OutputParser(
            self._plan.chat_format,
            () if formed else conversation.tools,
            thinking=self._thinking,
            forced=conversation.forced,
            parallel=conversation.parallel,
            reasoning=conversation.reasoning
            and (self._thinking or not formed or bool(self._plan.chat_format.lead)),
        )


def _parse(parser: OutputParser, output: RequestOutput) -> list[OutputEvent]:
    events = parser.feed(output.text) if output.text else []
    if output.finish_reason is None:
        return events
    return events + parser.finish(cut=output.finish_reason is not FinishReason.STOP)


async def get_chat_format(engine: EngineClient, *, tools: bool) -> ChatFormat:
    """How the model writes an answer; the tokenizer is asked once. The generic format where it cannot say."""
    if tools not in engine.chat_formats:
        try:
            answer = await run_tokenizer(engine, DescribeFormat(tools), Described)
            engine.chat_formats[tools] = answer.chat_format
        except (InvalidRequest, EngineDied) as error:
            log.warning("no format of tool calls could be derived from the chat template: %s", error.code)
            engine.chat_formats[tools] = GENERIC
    return engine.chat_formats[tools]


def _predict(plan: ChatPlan, engine: EngineClient, predicted: Tokens) -> ChatPlan:
    """The plan with the tokens of the conversation's prediction."""
    _, limits = loaded(engine)
    prediction = predicted.tokens[: limits.request_tokens]
    return _replace(plan, request=_replace(plan.request, prediction=prediction))


def _use_without_grammar(plan: ChatPlan, error: InvalidRequest) -> ChatPlan:
    """The plan without a refused grammar. Raises the error where the client asked for one."""
    constraint = plan.request.constraint
    if constraint is None or not constraint.triggers:
        raise error
    log.debug("the schemas of the tools make no grammar: calls are not constrained")
    return plan.without_grammar()


async def open_chat(
    engine: EngineClient, conversation: Conversation, request: Request, n: int = 1
) -> ChatSession[AsyncOutputStream]:
    """Submit n choices. Raises InvalidRequest (template, grammar), and what `EngineClient.submit` raises."""
    chat_format = await get_chat_format(engine, tools=bool(conversation.tools))
    plan = plan_chat(engine, conversation, request, chat_format)
    if plan.check is not None:
        try:
            await run_tokenizer(engine, plan.check, Text)
        except InvalidRequest as error:
            plan = _use_without_grammar(plan, error)
    if conversation.prediction:
        task = TokenizeText(conversation.prediction, add_special=False)
        plan = _predict(plan, engine, await run_tokenizer(engine, task, Tokens))
    prompt = await run_tokenizer(engine, plan.prompt, Tokens)
    return ChatSession(engine, plan, prompt, n, AsyncOutputStream)


async def count_tokens(engine: EngineClient, conversation: Conversation, *, constrained: bool) -> int:
    """Length of the prompt of this conversation, even where it is too long; nothing is generated."""
    chat = conversation.for_template(constrained=constrained or conversation.forced)
    return len((await run_tokenizer(engine, TokenizeChat(chat, 0), Tokens)).tokens)
