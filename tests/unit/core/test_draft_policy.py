"""The draft plan of a step: equally long drafts, and only where they yield more than they cost."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.backend.base import Batch, Drafter
from cllm.core.drafts import DraftState
from cllm.core.sequence import Sequence
from cllm.core.slot_pool import SlotLease
from cllm.core.spec_decode import SpecDecodePolicy, reject_drafts
from cllm.core.step_cost import StepCostModel
from cllm.types import ConstraintKind, ConstraintSpec, Prompt, Request
from tests.unit.core.test_spec_decode import Parrot

CERTAIN = 0.99


def make_sequence(
    number: int,
    drafter: Drafter | None,
    *,
    tokens: int = 10,
    pending: int = 1,
    max_tokens: int = 100,
    acceptance: float = CERTAIN,
) -> Sequence:
    request = Request(id=f"r{number}", prompt=Prompt(tuple(range(tokens))), max_tokens=max_tokens)
    sequence = Sequence(request, capacity=1000)
    sequence.lease = SlotLease(number, request.id)
    sequence.num_computed = tokens - pending
    if drafter is not None:
        sequence.drafts = DraftState(drafter, acceptance_rate=acceptance)
    return sequence


class Priced(StepCostModel):
    """Knows what a draft token for each row costs, relative to a plain step of 10 ms."""

    def __init__(self, draft: float, *, split: bool = True) -> None:
        super().__init__(split=split)
        self.draft = draft
        self.doubts = 0
        self.gains = True

    def drafts_gain(self, rows: int) -> bool:
        return self.gains

    def draft_step(self, rows, drafting, length, context=0):  # type: ignore[no-untyped-def]
        plain = super().draft_step(rows, drafting, 0)  # a lone row, and rows computed apart
        return plain + self.draft * length * len(drafting) / rows

    def plain_step_s(self, rows: int) -> float:
        return 0.01

    def doubt_drafts(self, rows: int) -> None:
        self.doubts += 1


def drafted(
    *sequences: Sequence,
    cost: StepCostModel | None = None,
    max_tokens: int = 16,
    room: int = 512,
    max_step_s: float = 10.0,
) -> dict[int, int]:
    policy = SpecDecodePolicy(max_tokens)
    drafts = policy.draft(sequences, cost or Priced(0.05), room=room, max_step_s=max_step_s)
    return {seq_id: len(draft) for seq_id, draft in drafts.items()}


def eight(*drafting: int, able: int = 1000, acceptance: float = CERTAIN) -> list[Sequence]:
    """Eight sequences that may draft; these have a proposal."""
    return [
        make_sequence(number, Parrot(able if number in drafting else 0), acceptance=acceptance)
        for number in range(8)
    ]


def test_a_sequence_without_a_proposal_or_a_drafter_is_left_out() -> None:
    assert drafted(make_sequence(0, Parrot(0)), make_sequence(1, None)) == {}
    assert drafted() == {}
    assert set(drafted(make_sequence(0, None), make_sequence(1, Parrot()), cost=Priced(0.01))) <= {1}


@pytest.mark.parametrize(("left", "drafts"), [(1, 0), (2, 1), (3, 2), (5, 4)])
def test_no_draft_goes_beyond_the_end_of_its_sequence(left: int, drafts: int) -> None:
    """A step yields one token more than drafts are accepted."""
    found = drafted(make_sequence(0, Parrot(), max_tokens=left)).get(0, 0)
    assert found <= drafts and (found > 0 or drafts < 3)
    assert drafted(make_sequence(0, Parrot(), tokens=1000 - left)).get(0, 0) <= drafts


def test_a_prompt_in_the_step_ends_all_drafting() -> None:
    parrot = Parrot()
    assert drafted(make_sequence(0, parrot), make_sequence(1, None, pending=2)) == {}
    assert parrot.asked == []


def test_drafts_that_found_no_room_are_not_made_again_at_once() -> None:
    policy, cost = SpecDecodePolicy(8), Priced(0.05)
    drafting, other = make_sequence(0, Parrot()), make_sequence(1, None)
    running = {0: drafting, 1: other}
    drafts = [2, 3, 4]
    batch = Batch((drafting.row(1, drafts), other.row(1)))
    assert reject_drafts(batch, running)
    assert policy.draft(running.values(), cost, room=100, max_step_s=1) == {}
    # Without drafts there is nothing to give up: then a sequence has to go.
    assert not reject_drafts(Batch((drafting.row(1), other.row(1))), running)


def test_which_requests_may_draft_at_all() -> None:
    plain = Request(id="a", prompt=Prompt((1,)), max_tokens=4)
    assert SpecDecodePolicy(8).start(plain) is not None
    assert SpecDecodePolicy(0).start(plain) is None
    for refused in ({"speculate": False}, {"constraint": ConstraintSpec(ConstraintKind.REGEX, "a+")}):
        assert SpecDecodePolicy(8).start(msgspec.structs.replace(plain, **refused)) is None


def test_the_more_expensive_a_draft_the_shorter_it_is() -> None:
    lengths = [
        max(drafted(*eight(*range(8)), cost=Priced(draft)).values(), default=0)
        for draft in (0.01, 0.5, 0.9, 0.99, 1.5)
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 16 and lengths[-1] == 0


def test_the_poorer_the_acceptance_the_shorter_the_draft() -> None:
    lengths = [
        max(drafted(*eight(*range(8), acceptance=rate), cost=Priced(0.2)).values(), default=0)
        for rate in (0.99, 0.8, 0.5, 0.2, 0.1)
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 4 and lengths[-1] == 0


def test_drafts_that_are_too_expensive_are_not_made_and_that_is_counted() -> None:
    cost = Priced(3.0)
    assert drafted(*eight(*range(8)), cost=cost) == {}
    assert cost.doubts == 1
    assert drafted(*eight(), cost=cost) == {}
    assert cost.doubts == 1, "no sequence had a proposal: nothing was refused"


def test_rows_without_a_draft_are_padded_if_most_have_one() -> None:
    """Rows of different length would be computed in separate ubatches."""
    found = drafted(*eight(0, 1, 2, 4, 5, 6, 7), cost=Priced(0.2))
    assert set(found) == set(range(8)) and len(set(found.values())) == 1


@pytest.mark.parametrize("draft", [0.02, 0.1, 0.3, 0.45])
@pytest.mark.parametrize("drafting", [1, 4, 7])
@pytest.mark.parametrize("split", [True, False])
def test_a_row_that_does_not_draft_waits_half_a_step_more_at_most(
    draft: float, drafting: int, split: bool
) -> None:
    found = drafted(*eight(*range(drafting)), cost=Priced(draft, split=split))
    assert 1 + draft * sum(found.values()) / 8 <= SpecDecodePolicy.MAX_SHARED_COST


def test_with_unified_kv_no_row_needs_padding() -> None:
    found = drafted(*eight(0, 2, 5), cost=Priced(0.1, split=False))
    assert set(found) == {0, 2, 5} and len(set(found.values())) == 1


def test_a_request_that_declined_drafts_is_not_padded() -> None:
    sequences = eight(*range(7))
    sequences[7].drafts = None
    assert 7 not in drafted(*sequences)


def test_no_row_is_padded_beyond_its_end() -> None:
    sequences = eight(*range(7))
    sequences[7].stopping.token_limit = len(sequences[7].tokens) + 1
    assert 7 not in drafted(*sequences)
    sequences[7].stopping.token_limit = len(sequences[7].tokens) + 2
    assert drafted(*sequences, cost=Priced(0.4)).get(7, 0) <= 1


def test_a_padded_row_gets_its_own_proposal_first() -> None:
    policy = SpecDecodePolicy(4)
    sequences = [make_sequence(number, Parrot(4)) for number in range(7)]
    short = make_sequence(7, Parrot(1))
    drafts = policy.draft([*sequences, short], Priced(0.1), room=100, max_step_s=10)
    assert drafts[7] == [1, *[short.tokens[-1]] * (len(drafts[0]) - 1)]


def test_drafts_are_looked_for_less_and_less_where_that_is_costly_and_does_not_pay() -> None:
    policy, cost = SpecDecodePolicy(8), Priced(0.05)
    parrot = Parrot(0)
    sequences = [make_sequence(0, parrot), *(make_sequence(number, Parrot(0)) for number in range(1, 16))]

    def look(steps: int) -> list[int]:
        """The steps in which it was asked."""
        found = []
        for number in range(steps):
            before = len(parrot.asked)
            policy.draft(sequences, cost, room=512, max_step_s=10.0)
            if len(parrot.asked) > before:
                found.append(number)
        return found

    rests = [after - before for before, after in pairwise(look(800))]
    assert rests == [policy.REST, 2 * policy.REST, 4 * policy.REST, policy.MAX_REST, policy.MAX_REST]
    policy.start(Request(id="new", prompt=Prompt((1,)), max_tokens=4))
    assert look(100)[:2] == [0, policy.REST], "what is new may repeat itself"
    sequences = sequences[:4]
    policy.draft(sequences, cost, room=512, max_step_s=10.0)
    assert look(50) == list(range(50)), "for a few rows it costs nothing"


def test_on_a_gpu_a_lone_sequence_looks_now_and_then_since_a_look_costs_the_batch_prepared_ahead() -> None:
    policy, cost = SpecDecodePolicy(8), Priced(0.05)
    cost.records = True
    parrot = Parrot(0)
    sequences = [make_sequence(0, parrot)]
    for _ in range(10 * policy.LOOK_EVERY):
        policy.draft(sequences, cost, room=512, max_step_s=10.0)
    assert len(parrot.asked) == 10
    sequences = [make_sequence(0, Parrot())]
    steps = range(3 * policy.LOOK_EVERY)
    drafting = [bool(policy.draft(sequences, cost, room=512, max_step_s=10.0)) for _ in steps]
    assert all(drafting[policy.LOOK_EVERY :]), "where it pays, in every step"


def test_on_a_gpu_no_draft_is_made_before_a_plain_step_of_so_many_rows_was_measured() -> None:
    """Nor beside padding: such steps have no price, so that drafts would be taken for cheap for ever."""
    policy, sequences = SpecDecodePolicy(8), [make_sequence(number, Parrot()) for number in range(4)]
    for records in (True, False):
        cost = StepCostModel(records=records)
        assert policy.rests(4, cost) is records
        assert bool(policy.draft(sequences, cost, room=512, max_step_s=10.0)) is not records


def test_drafts_that_were_tried_and_lost_rest_for_long() -> None:
    policy, cost = SpecDecodePolicy(8), Priced(0.01)
    cost.gains = False
    sequences = [make_sequence(number, Parrot()) for number in range(16)]
    drafting = [
        number
        for number in range(policy.TRIAL_REST + 50)
        if policy.draft(sequences, cost, room=512, max_step_s=10.0)
    ]
    again = policy.TRIAL + policy.TRIAL_REST
    assert drafting == [*range(policy.TRIAL), *range(again, again + policy.TRIAL)]
    cost.gains = True
    policy = SpecDecodePolicy(8)
    assert all(policy.draft(sequences, cost, room=512, max_step_s=10.0) for _ in range(50))


def test_a_new_request_ends_a_rest_but_not_the_one_after_a_loss() -> None:
    policy, cost = SpecDecodePolicy(8), Priced(0.01)
    cost.gains = False
    sequences = [make_sequence(number, Parrot()) for number in range(16)]
    for _ in range(policy.TRIAL + 1):
        policy.draft(sequences, cost, room=512, max_step_s=10.0)
    policy.start(Request(id="new", prompt=Prompt((1,)), max_tokens=4))
    assert policy.rests(len(sequences), cost)


def test_while_drafts_rest_each_sequence_learns_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, cost = SpecDecodePolicy(8), Priced(0.05)
    sequences = [make_sequence(number, Parrot(0)) for number in range(policy.LEARN_EVERY)]
    learned: list[DraftState] = []
    monkeypatch.setattr(DraftState, "learn", lambda state, tokens: learned.append(state))
    for number, sequence in enumerate(sequences):
        sequence.arrival = number
    policy.learn(sequences)
    assert len(learned) == len(sequences), "nothing rests yet"
    policy.draft(sequences, cost, room=512, max_step_s=10.0)
    learned.clear()
    for number in range(policy.LEARN_EVERY):
        assert policy.rests(len(sequences), cost)
        policy.learn(sequences)
        assert len(set(learned)) == len(learned) == number + 1


def test_no_drafts_beyond_the_batch_or_the_target() -> None:
    assert max(drafted(*eight(*range(8)), cost=Priced(0.01), room=8 * 3).values()) <= 3
    assert max(drafted(*eight(*range(8)), cost=Priced(0.2), max_step_s=0.02).values()) <= 5


@given(
    draft=st.floats(0.01, 3),
    able=st.lists(st.integers(0, 20), min_size=1, max_size=8),
    split=st.booleans(),
    room=st.integers(0, 200),
)
def test_whatever_is_planned_all_drafts_are_equally_long_and_fit(
    draft: float, able: list[int], split: bool, room: int
) -> None:
    sequences = [make_sequence(number, Parrot(length)) for number, length in enumerate(able)]
    found = drafted(*sequences, cost=Priced(draft, split=split), room=room, max_tokens=64)
    assert len(set(found.values())) <= 1
    assert sum(found.values()) <= room


def test_a_draft_model_is_not_asked_under_load() -> None:
    parrots = [Parrot() for _ in range(8)]
    sequences = [make_sequence(number, parrot) for number, parrot in enumerate(parrots)]
    policy = SpecDecodePolicy(8, draft_model=lambda tenant: Parrot())
    assert policy.draft(sequences, Priced(0.01), room=100, max_step_s=10) == {}
    assert not any(parrot.asked for parrot in parrots)
    assert policy.draft(sequences[:2], Priced(0.01), room=100, max_step_s=10)
    assert parrots[0].asked == parrots[1].asked == [4]


@pytest.mark.parametrize("shared", [False, True])
def test_a_draft_model_hears_whose_memory_it_may_use(shared: bool) -> None:
    tenants: list[str | None] = []

    def new_drafter(tenant: str | None) -> Parrot:
        tenants.append(tenant)
        return Parrot()

    policy = SpecDecodePolicy(8, draft_model=new_drafter, share_across_tenants=shared)
    for tenant, reuse in (("a", True), ("b", True), ("b", False)):
        policy.start(Request(id="r", prompt=Prompt((1,)), max_tokens=1, tenant=tenant, reuse=reuse))
    assert tenants == (["", "", None] if shared else ["a", "b", None])


def test_a_step_without_sequences_drafts_nothing() -> None:
    """Was: a draft model's tokens divided between no sequences, which ended the engine whenever idle."""
    policy = SpecDecodePolicy(16, draft_model=lambda tenant: Parrot(3))
    assert policy.draft([], Priced(0.1), room=512, max_step_s=10.0) == {}
