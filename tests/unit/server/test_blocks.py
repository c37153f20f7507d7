"""Whatever an answer is made of, it comes as blocks that begin, grow and end, one after another."""

from __future__ import annotations

from hypothesis import given, settings

from cllm.chat.conversation import Step, Turns
from cllm.server.blocks import Begun, Block, BlockKind, Blocks, Ended, Grew
from cllm.text.output_parser import ContentText, ReasoningText, ToolCallArguments, ToolCallStart
from cllm.types import FinishReason
from tests.unit.server.answers import USAGE, answers, logprob, said, step


@settings(deadline=None)
@given(answers())
def test_blocks_are_well_formed(steps: list[Step]) -> None:
    blocks = Blocks()
    open_block: Block | None = None
    texts: list[str] = []
    for events, delta in steps:
        for event in blocks.add(events, delta):
            match event:
                case Begun(block):
                    assert open_block is None and block.index == len(texts)
                    open_block = block
                    texts.append("")
                case Grew(block, text):
                    assert block is open_block
                    texts[-1] += text
                case Ended(block):
                    assert block is open_block
                    open_block = None
    assert open_block is None and texts
    assert [block.text for block in blocks.blocks] == texts
    assert "".join(texts) == said(steps)
    assert blocks.finish_reason is steps[-1][1].finish_reason and blocks.usage == USAGE
    assert not any(block.cut for block in blocks.blocks[:-1])
    begun = [event.name for events, _ in steps for event in events if isinstance(event, ToolCallStart)]
    assert [block.name for block in blocks.blocks if block.kind is BlockKind.CALL] == begun


def test_an_answer_of_nothing_is_an_empty_text() -> None:
    blocks = Blocks()
    begun, ended = blocks.add(*step(end=FinishReason.STOP))
    assert isinstance(begun, Begun) and isinstance(ended, Ended)
    assert [(block.kind, block.text) for block in blocks.blocks] == [(BlockKind.WORDS, "")]


def test_what_the_length_ends_is_cut() -> None:
    blocks = Blocks()
    blocks.add(*step(ReasoningText("hm")))
    blocks.add(*step(ContentText("so"), end=FinishReason.LENGTH))
    assert [block.cut for block in blocks.blocks] == [False, True]


def test_tokens_of_thoughts_are_counted() -> None:
    blocks = Blocks()
    blocks.add(*step(ReasoningText("a"), tokens=3))
    blocks.add(*step(tokens=2))  # held back
    blocks.add(*step(ContentText("b"), tokens=5))
    blocks.add(*step(end=FinishReason.STOP, tokens=1))
    assert blocks.thought_tokens == 5


def test_logprobs_stay_with_the_words() -> None:
    blocks = Blocks()
    blocks.add(*step(ReasoningText("t"), logprobs=(logprob("t"),)))
    blocks.add(*step(logprobs=(logprob("a"),)))  # of a text that is held back in the thoughts' block
    blocks.add(*step(ContentText("b"), logprobs=(logprob("b"),)))
    blocks.add(*step(logprobs=(logprob("c"),)))
    grown = blocks.add(*step(ContentText("cd"), logprobs=(logprob("d"),)))
    assert isinstance(grown[0], Grew) and [entry.pieces[0] for entry in grown[0].logprobs] == [b"c", b"d"]
    blocks.add(*step(ToolCallStart(0, "look"), logprobs=(logprob("x"),)))
    blocks.add(*step(ToolCallArguments(0, "{}"), logprobs=(logprob("y"),), end=FinishReason.STOP))
    assert [entry.pieces[0] for entry in blocks.blocks[1].logprobs] == [b"b", b"c", b"d"]
    assert [len(block.logprobs) for block in blocks.blocks] == [0, 3, 0]


def test_turns_are_put_together() -> None:
    turns = Turns()
    turns.say("system", "one")
    turns.say("system", "two")
    turns.say("user", "a")
    turns.say("user", "b")
    turns.think("hm")
    turns.say("assistant", "c")
    turns.call("1", "look", "{}")
    turns.call("2", "look", "{}")
    turns.result("1", "found")
    turns.say("assistant", "d")
    turns.say("assistant", "e")
    assert [(turn["role"], turn["content"]) for turn in turns.messages] == [
        ("system", "one\ntwo"),
        ("user", "a"),
        ("user", "b"),
        ("assistant", "c"),
        ("tool", "found"),
        ("assistant", "d"),
        ("assistant", "e"),
    ]
    assert turns.messages[3]["reasoning_content"] == "hm"
    assert [call["id"] for call in turns.messages[3]["tool_calls"]] == ["1", "2"]


def test_turns_in_a_row_can_be_combined() -> None:
    turns = Turns(combine=True)
    for role, text in (("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d")):
        turns.say(role, text)
    assert [turn["content"] for turn in turns.messages] == ["a\nb", "c\nd"]
