"""A sequence by itself: its tokens, what is pending, and what it makes of what is sampled."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import Any

import pytest

from cllm.core.kv_cache.prefix_index import Checkpoint
from cllm.core.sequence import Sequence
from cllm.core.slot_pool import CellSegment, KVLayout, SlotPool, share_cells
from cllm.errors import EngineError
from cllm.testing import FakeVocabulary
from cllm.testing.scripted import END_TOKEN, TURN
from cllm.types import (
    FinishReason,
    Limits,
    Prompt,
    ReasoningLimit,
    Request,
    SamplingParams,
    TokenLogprob,
)
from tests.driver.fake_runner import FakeRunner, FakeSampler

LIMITS = Limits(sequences=2, cells=64, sequence_cells=64, request_tokens=64, batch_tokens=8, unified=True)


def make(prompt: bytes = b"prompt", max_tokens: int = 8, *, capacity: int = 64, **fields: Any) -> Sequence:
    return Sequence(Request(id="r", prompt=Prompt(tuple(prompt)), max_tokens=max_tokens, **fields), capacity)


def run(sequence: Sequence) -> Sequence:
    """Give it a slot."""
    sequence.lease = SlotPool(FakeRunner(sequences=1)).lease("r")
    return sequence


def test_the_limit_is_that_of_the_request_and_of_the_context() -> None:
    assert make(max_tokens=8).stopping.token_limit == 14
    assert make(max_tokens=8, capacity=10).stopping.token_limit == 10


@pytest.mark.parametrize(("count", "outputs"), [(3, 0), (5, 0), (6, 1)])
def test_a_token_is_wanted_where_nothing_stays_pending(count: int, outputs: int) -> None:
    row = run(make()).row(count)
    assert (row.seq_id, row.position, bytes(row.tokens)) == (0, 0, b"prompt"[:count])
    assert row.outputs == outputs
    assert run(make(max_tokens=0)).row(count).outputs == 0


def test_drafts_follow_the_pending_token_and_are_verified() -> None:
    sequence = run(make())
    sequence.num_computed = 5
    row = sequence.row(1, [97, 98])
    assert (row.position, list(row.tokens), row.outputs) == (5, [ord("t"), 97, 98], 3)


@pytest.mark.parametrize(("computed", "count", "scored"), [(0, 3, b"rom"), (3, 2, b"pt"), (3, 3, b"pt")])
def test_the_prompt_is_scored_by_the_tokens_that_follow(computed: int, count: int, scored: bytes) -> None:
    sequence = run(make(prompt_logprobs=1))
    sequence.num_computed = computed
    sequence.score([TokenLogprob(token, 0.0) for token in b"prompt"[1 : computed + 1]], 5)
    assert sequence.unscored == 5 - computed
    assert bytes(sequence.row(count).scored) == scored


def test_where_nothing_is_generated_the_last_line_stands_for_itself() -> None:
    assert bytes(run(make(max_tokens=0, prompt_logprobs=1)).row(6).scored) == b"romptt"
    assert bytes(run(make(max_tokens=1, prompt_logprobs=1)).row(6).scored) == b"rompt"


def test_cells_are_counted_once_however_many_share_them() -> None:
    source, copy = make(), make()
    source.num_computed, copy.num_computed = 6, 4
    layout = KVLayout(LIMITS)
    copy.segments = share_cells(source, 4)
    assert layout.count([source, copy]) == 6
    copy.num_computed = 6
    assert layout.count([source, copy]) == 8 and layout.count([copy]) == 6 and layout.count([]) == 0


def test_a_cut_leaves_cells_of_its_own_as_they_are() -> None:
    sequence = make()
    own = sequence.segments[0]
    assert isinstance(own, CellSegment) and not own.shared
    sequence.num_computed = 6
    sequence.cut_to(3)
    assert sequence.segments == [own] and sequence.num_computed == 3
    sequence.segments[0].shared = True  # the other has a copy
    sequence.cut_to(3)  # what it computes next is not the other's
    assert [segment.begin for segment in sequence.segments] == [0, 3]
    sequence.cut_to(0)
    assert [segment.begin for segment in sequence.segments] == [0] and sequence.segments[0] is not own


@pytest.mark.parametrize("stop", [(), ("xyz",)], ids=["plain", "with a stop string"])
@pytest.mark.parametrize(
    ("sampled", "tokens", "reason", "kept"),
    [
        (b"a", b"a", None, 1),
        (b"abc", b"abc", FinishReason.LENGTH, 3),
        (b"abcd", b"abc", FinishReason.LENGTH, 3),
        ([97, END_TOKEN, 98], b"a", FinishReason.STOP, 1),
        ([END_TOKEN], b"", FinishReason.STOP, 0),
    ],
)
def test_tokens_are_appended_until_the_end(
    sampled: bytes | list[int], tokens: bytes, reason: FinishReason | None, kept: int, stop: tuple[str, ...]
) -> None:
    appended = make(max_tokens=3, stop=stop).stopping.append(list(sampled), FakeVocabulary())
    assert (bytes(appended.tokens), appended.reason, appended.kept) == (tokens, reason, kept)
    assert appended.text == (tokens.decode() if stop else None)


def test_an_ignored_end_token_is_a_token() -> None:
    for stop in ((), ("xyz",)):
        sequence = make(sampling=SamplingParams(ignore_eos=True), stop=stop)
        assert sequence.stopping.append((END_TOKEN,), FakeVocabulary()).reason is None
        assert sequence.tokens[-1] == END_TOKEN


def test_a_stop_string_ends_it_and_is_not_part_of_the_text() -> None:
    appended = make(stop=("bc",)).stopping.append(tuple(b"abcd"), FakeVocabulary())
    assert (appended.text, appended.reason, appended.kept) == ("a", FinishReason.STOP, 3)


def test_what_a_stop_string_held_back_is_given_at_the_end() -> None:
    sequence = make(max_tokens=2, stop=("bcd",))
    assert sequence.stopping.append((97,), FakeVocabulary()).text == "a"
    assert sequence.stopping.append((98,), FakeVocabulary()).text == "b"


@pytest.mark.parametrize(("length", "continues"), [(6, True), (12, True), (13, False)])
def test_it_continues_while_two_more_tokens_have_room(length: int, continues: bool) -> None:
    sequence = make()
    sequence.tokens += [97] * (length - 6)
    assert sequence.continues is continues
    for changed in ({"stops": [3]}, {"unscored": 1}):
        other = make()
        vars(other).update(changed)
        assert not other.continues


@pytest.mark.parametrize(("markers", "text"), [((), "ab"), (("<|x|>",), "a<|x|>b"), (("a", "none"), "ab")])
def test_control_tokens_are_spelled_for_those_who_ask(markers: tuple[str, ...], text: str) -> None:
    assert make(markers=markers).stopping.detokenize((97, TURN, 98), FakeVocabulary()) == text


def test_no_step_goes_beyond_the_next_checkpoint() -> None:
    sequence = make()
    sequence.stops = [4, 6]
    assert sequence.computable == 4
    sequence.num_computed, sequence.stops = 4, [6]
    assert sequence.computable == 2


def test_the_draft_room_leaves_one_token_to_be_sampled() -> None:
    sequence = make(max_tokens=8)
    assert sequence.stopping.draft_room == 7
    sequence.tokens += [97] * 7
    assert sequence.stopping.draft_room == 0
    assert make(prompt_logprobs=1).stopping.draft_room == 0
    waits = make(min_tokens=2)
    assert waits.stopping.draft_room == 0 and not waits.stopping.endable
    waits.tokens += [97, 97]
    assert waits.stopping.endable and waits.stopping.draft_room == 5


class RecordingSampler(FakeSampler):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(FakeRunner(), SamplingParams())
        self.accepted: list[int] = []
        self.skipped: list[int] = []

    def accept(self, tokens: Tokens[int]) -> None:
        self.accepted += tokens

    def skip(self, token: int) -> None:
        self.skipped.append(token)


def test_what_is_forced_is_told_to_the_sampler_and_what_was_sampled_is_not() -> None:
    limit = ReasoningLimit(budget=2, closing=tuple(b"</>"), inside=True)
    sequence = make(max_tokens=20, reasoning=limit)
    sequence.stopping.sampler = sampler = RecordingSampler()
    assert (
        sequence.stopping.append(tuple(b"a"), FakeVocabulary()).tokens == tuple(b"a")
        and sampler.accepted == []
    )
    appended = sequence.stopping.append(tuple(b"b"), FakeVocabulary())
    assert bytes(appended.tokens) == b"b</>" and appended.kept == 1
    assert bytes(sampler.accepted) == b"</>"
    without = make(max_tokens=20, reasoning=limit)
    assert bytes(without.stopping.append(tuple(b"ab"), FakeVocabulary()).tokens) == b"ab</>"


def test_what_is_resumed_is_skipped_by_the_sampler() -> None:
    sequence = make(generated_prefix=tuple(b"ab"))
    sequence.stopping.sampler = sampler = RecordingSampler()
    sequence.resume(FakeVocabulary())
    assert bytes(sampler.skipped) == b"ab" and bytes(sequence.tokens) == b"promptab"
    ended = make(generated_prefix=(97, END_TOKEN, 98))
    with pytest.raises(EngineError):
        ended.resume(FakeVocabulary())


def test_checkpoints_beyond_a_cut_are_gone() -> None:
    sequence = make()
    sequence.num_computed = 6
    sequence.checkpoints = kept = [Checkpoint(length, b"") for length in (2, 4, 5)]
    sequence.cut_to(4)
    assert sequence.checkpoints == kept[:2]


def test_a_copy_shares_what_it_has_and_no_more() -> None:
    first, second, third = make(), make(), make()
    first.num_computed = second.num_computed = third.num_computed = 3
    second.segments = share_cells(first, 3)
    second.num_computed = 5
    third.segments = share_cells(second, 3)
    assert [segment.begin for segment in third.segments] == [0, 3]
    assert third.segments[0] is first.segments[0] and third.segments[1] is not second.segments[1]
    second.cut_to(4)  # its own cells: the next goes there, too
    assert [segment.begin for segment in second.segments] == [0, 3]


def test_two_share_all_but_the_last_token_of_the_one_that_starts() -> None:
    one, other = make(b"abcd"), make(b"abcdef")
    assert (one.shared_with(other.keyed), other.shared_with(one.keyed)) == (3, 4)
    assert make(b"xbcd").shared_with(other.keyed) == 0 and make(b"a").shared_with(other.keyed) == 0
