"""`ReplyBuilder`: any reply comes as blocks that start, grow and end, one after another."""

from __future__ import annotations

from hypothesis import given, settings

from cllm.chat.reply import Block, BlockDelta, BlockEnd, BlockKind, BlockStart, ReplyBuilder
from cllm.text.output_parser import ContentText, ReasoningText, ToolCallArguments, ToolCallStart
from cllm.types import FinishReason
from tests.unit.chat.replies import USAGE, GivenParser, Step, answers, build, logprob, said, step


@settings(deadline=None)
@given(answers())
def test_blocks_are_well_formed(steps: list[Step]) -> None:
    reply = ReplyBuilder(GivenParser(steps))
    open_block: Block | None = None
    texts: list[str] = []
    for _, output in steps:
        for event in reply.add(output):
            match event:
                case BlockStart(block):
                    assert open_block is None and block.index == len(texts)
                    open_block = block
                    texts.append("")
                case BlockDelta(block, text):
                    assert block is open_block
                    texts[-1] += text
                case BlockEnd(block):
                    assert block is open_block
                    open_block = None
    assert open_block is None and texts
    assert [block.text for block in reply.blocks] == texts
    assert "".join(texts) == said(steps)
    assert reply.finish_reason is steps[-1][1].finish_reason and reply.usage == USAGE
    assert not any(block.cut for block in reply.blocks[:-1])
    begun = [event.name for events, _ in steps for event in events if isinstance(event, ToolCallStart)]
    assert [block.name for block in reply.blocks if block.kind is BlockKind.TOOL_CALL] == begun


def test_an_answer_of_nothing_is_an_empty_text() -> None:
    reply = ReplyBuilder()
    begun, ended = reply.add(step(end=FinishReason.STOP)[1])
    assert isinstance(begun, BlockStart) and isinstance(ended, BlockEnd)
    assert [(block.kind, block.text) for block in reply.blocks] == [(BlockKind.TEXT, "")]


def test_what_the_length_ends_is_cut() -> None:
    reply = build([step(ReasoningText("hm")), step(ContentText("so"), end=FinishReason.LENGTH)])
    assert [block.cut for block in reply.blocks] == [False, True]


def test_tokens_of_reasoning_are_counted() -> None:
    steps = [
        step(ReasoningText("a"), tokens=3),
        step(tokens=2),  # held back
        step(ContentText("b"), tokens=5),
        step(end=FinishReason.STOP, tokens=1),
    ]
    assert build(steps).reasoning_tokens == 5


def test_logprobs_stay_with_the_words() -> None:
    steps = [
        step(ReasoningText("t"), logprobs=(logprob("t"),)),
        step(logprobs=(logprob("a"),)),  # of a text that is held back in the reasoning's block
        step(ContentText("b"), logprobs=(logprob("b"),)),
        step(logprobs=(logprob("c"),)),
        step(ContentText("cd"), logprobs=(logprob("d"),)),
        step(ToolCallStart(0, "look"), logprobs=(logprob("x"),)),
        step(ToolCallArguments(0, "{}"), logprobs=(logprob("y"),), end=FinishReason.STOP),
    ]
    reply = ReplyBuilder(GivenParser(steps))
    grown = [reply.add(output) for _, output in steps][4][0]
    assert isinstance(grown, BlockDelta) and [entry.pieces[0] for entry in grown.logprobs] == [b"c", b"d"]
    assert [entry.pieces[0] for entry in reply.blocks[1].logprobs] == [b"b", b"c", b"d"]
    assert [len(block.logprobs) for block in reply.blocks] == [0, 3, 0]
