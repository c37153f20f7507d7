"""Hand-made answers for the renderers: whatever a `OutputParser` may say, in whatever steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from hypothesis import strategies as st

from cllm.chat.reply import BlockEvent, ReplyBuilder
from cllm.text.output_parser import (
    ContentText,
    OutputEvent,
    OutputParser,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from cllm.types import Failure, FinishReason, RequestOutput, TokenLogprob, Usage

USAGE = Usage(prompt_tokens=12, completion_tokens=7, cached_tokens=5)
ENDS = (FinishReason.STOP, FinishReason.LENGTH)
Step = tuple[list[OutputEvent], RequestOutput]  # what the parser says of an output
Rendered = TypeVar("Rendered")


class GivenParser(OutputParser):
    """A parser that says what the steps have, one after another."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self._given = iter([events for events, _ in steps if events])

    def feed(self, text: str) -> list[OutputEvent]:
        return next(self._given)

    def finish(self, *, cut: bool = False) -> list[OutputEvent]:
        return []


def build(steps: Sequence[Step]) -> ReplyBuilder:
    """The finished reply."""
    return ReplyBuilder(GivenParser(steps), [output for _, output in steps])


def render(
    steps: Sequence[Step],
    reply: ReplyBuilder,
    rendered: Callable[[list[BlockEvent], RequestOutput], list[Rendered]],
) -> list[Rendered]:
    """What a renderer makes of each step, in order."""
    return [event for _, output in steps for event in rendered(reply.add(output), output)]


def step(
    *events: OutputEvent,
    end: FinishReason | None = None,
    stop: str | None = None,
    tokens: int = 1,
    logprobs: tuple[TokenLogprob, ...] = (),
) -> Step:
    usage = USAGE if end is not None else None
    delta = RequestOutput(
        request_id="x",
        text="." if events else "",
        tokens=tuple(range(tokens)),
        logprobs=logprobs,
        finish_reason=end,
        usage=usage,
        stop=stop,
    )
    return list(events), delta


def failed(code: str, message: str) -> Step:
    failure = Failure(code, message)
    return [], RequestOutput(request_id="x", finish_reason=FinishReason.ERROR, error=failure)


def logprob(text: str) -> TokenLogprob:
    return TokenLogprob(1, -0.5, ((1, -0.5), (2, -1.5)), (text.encode(), text.encode(), b"?"))


_texts = st.sampled_from(["a", " ", "\n\n", "日本😀", "{", '{"a": 1}', "</think>", "<tool_call>"])
_names = st.sampled_from(["look", "add"])


@st.composite
def answers(draw: st.DrawFn) -> list[Step]:
    """The steps of one finished answer."""
    events: list[OutputEvent] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["think", "say", "call"]), max_size=5)):
        texts = draw(st.lists(_texts, min_size=1, max_size=3))
        if kind == "think":
            events += [ReasoningText(text) for text in texts]
        elif kind == "say":
            events += [ContentText(text) for text in texts]
        else:
            events.append(ToolCallStart(calls, draw(_names)))
            events += [ToolCallArguments(calls, text) for text in texts[1:]]
            calls += 1
    steps: list[Step] = []
    while events:
        taken = draw(st.integers(1, len(events)))
        steps.append(step(*events[:taken], logprobs=(logprob("t"),)))
        if draw(st.booleans()):
            steps.append(step(logprobs=(logprob("t"),)))  # its text is held back
        events = events[taken:]
    end = draw(st.sampled_from(ENDS))
    together = draw(st.booleans())
    if steps and together:
        last, delta = steps.pop()
        return [*steps, (last, msgspec.structs.replace(delta, finish_reason=end, usage=USAGE))]
    return [*steps, step(end=end)]


def said(steps: list[Step]) -> str:
    """Every text of an answer, in order."""
    return "".join(
        event.text
        for events, _ in steps
        for event in events
        if isinstance(event, ContentText | ReasoningText | ToolCallArguments)
    )
