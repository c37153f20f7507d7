"""`ReplyBuilder`: any reply comes as blocks that start, grow and end, one after another."""

from __future__ import annotations

from hypothesis import given, settings

from cllm.chat.reply import Block, BlockDelta, BlockEnd, BlockKind, BlockStart, ParsedOutput, ReplyBuilder
from cllm.text.output_parser import ContentText, ReasoningText, ToolCallArguments, ToolCallStart
from cllm.types import FinishReason
from tests.unit.chat.replies import USAGE, answers, logprob, said, step


@settings(deadline=None)
@given(answers())
def test_blocks_are_well_formed(steps: list[ParsedOutput]) -> None:
    reply = ReplyBuilder()
    open_block: Block | None = None
    texts: list[str] = []
    for events, delta in steps:
        for event in reply.add(events, delta):
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
    begun, ended = reply.add(*step(end=FinishReason.STOP))
    assert isinstance(begun, BlockStart) and isinstance(ended, BlockEnd)
    assert [(block.kind, block.text) for block in reply.blocks] == [(BlockKind.TEXT, "")]


def test_what_the_length_ends_is_cut() -> None:
    reply = ReplyBuilder()
    reply.add(*step(ReasoningText("hm")))
    reply.add(*step(ContentText("so"), end=FinishReason.LENGTH))
    assert [block.cut for block in reply.blocks] == [False, True]


def test_tokens_of_reasoning_are_counted() -> None:
    reply = ReplyBuilder()
    reply.add(*step(ReasoningText("a"), tokens=3))
    reply.add(*step(tokens=2))  # held back
    reply.add(*step(ContentText("b"), tokens=5))
    reply.add(*step(end=FinishReason.STOP, tokens=1))
    assert reply.reasoning_tokens == 5


def test_logprobs_stay_with_the_words() -> None:
    reply = ReplyBuilder()
    reply.add(*step(ReasoningText("t"), logprobs=(logprob("t"),)))
    reply.add(*step(logprobs=(logprob("a"),)))  # of a text that is held back in the reasoning' block
    reply.add(*step(ContentText("b"), logprobs=(logprob("b"),)))
    reply.add(*step(logprobs=(logprob("c"),)))
    grown = reply.add(*step(ContentText("cd"), logprobs=(logprob("d"),)))
    assert isinstance(grown[0], BlockDelta) and [entry.pieces[0] for entry in grown[0].logprobs] == [
        b"c",
        b"d",
    ]
    reply.add(*step(ToolCallStart(0, "look"), logprobs=(logprob("x"),)))
    reply.add(*step(ToolCallArguments(0, "{}"), logprobs=(logprob("y"),), end=FinishReason.STOP))
    assert [entry.pieces[0] for entry in reply.blocks[1].logprobs] == [b"b", b"c", b"d"]
    assert [len(block.logprobs) for block in reply.blocks] == [0, 3, 0]
