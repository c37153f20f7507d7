"""The draft plan of a step: equally long drafts, and only where they yield more than they cost."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.backend.base import RECORDED_AFTER, Batch, Drafter
from cllm.core.drafts import DraftState
from cllm.core.sequence import Sequence
from cllm.core.slot_pool import SlotLease
from cllm.core.spec_decode import SpecDecodePolicy, reject_drafts
from cllm.core.step_cost import TILE, StepCostModel
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

    def __init__(self, draft: float, *, split: bool = True, loaded: float | None = None) -> None:
        """`loaded` is what was measured at load."""
        super().__init__(split=split)
        self.draft, self.loaded = draft, draft if loaded is None else loaded

    def decode_step_s(self, rows, cells, drafting=(), length=0, *, corrected=True, **_):  # type: ignore[no-untyped-def]
        ids = set(drafting)
        runs = sum(each - 1 not in ids for each in ids) if self.split and len(ids) < rows else 0
        each = self.draft if corrected else self.loaded
        return 0.01 * (1 + 0.6 * runs + each * length * len(ids) / rows)


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


def plan_step(
    policy: SpecDecodePolicy, sequences: list[Sequence], cost: StepCostModel
) -> dict[int, list[int]]:
    return policy.draft(sequences, cost, room=512, max_step_s=10.0)


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


def test_drafts_that_are_too_expensive_are_not_made() -> None:
    assert drafted(*eight(*range(8)), cost=Priced(3.0)) == {}


@pytest.mark.parametrize(("draft", "lost"), [(3.0, 8 * 3.0), (1.5, 8 * 1.5)])
def test_drafts_that_only_measured_time_speaks_against_are_explored(draft: float, lost: float) -> None:
    """They were cheap at load. What they lose is a share of the time."""
    policy, sequences = SpecDecodePolicy(8), eight(*range(8))
    cost, steps = Priced(draft, loaded=0.1), 16_000
    drafting = [bool(plan_step(policy, sequences, cost)) for _ in range(steps)]
    assert sum(drafting) == pytest.approx(steps * policy.EXPLORE_SHARE / lost, rel=0.1)
    expensive = Priced(draft)
    assert not any(plan_step(policy, sequences, expensive) for _ in range(2000)), "they were never cheap"
    lone = [make_sequence(0, Parrot())]
    assert not any(plan_step(policy, lone, cost) for _ in range(2000)), "the same steps every time"


def test_rows_without_a_draft_are_padded_if_most_have_one() -> None:
    """Rows of different length would be computed in separate ubatches."""
    found = drafted(*eight(0, 1, 2, 4, 5, 6, 7), cost=Priced(0.2))
    assert set(found) == set(range(8)) and len(set(found.values())) == 1


def test_a_row_that_does_not_draft_waits_only_where_all_together_gain() -> None:
    """One of eight drafts: its two tokens do not pay for the time of seven others."""
    assert drafted(*eight(0), cost=Priced(4.0, split=False)) == {}
    assert set(drafted(*eight(0), cost=Priced(0.1, split=False))) == {0}


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


class Ticking:
    """A clock whose every reading is `tick_s` later."""

    def __init__(self, tick_s: float) -> None:
        self.tick_s, self.now = tick_s, 0.0

    def perf_counter(self) -> float:
        self.now += self.tick_s
        return self.now


@pytest.mark.parametrize(("look_s", "every"), [(1e-5, 1), (0.001, 21), (0.004, 81)])
def test_looking_for_drafts_in_vain_takes_its_share_of_the_time(
    look_s: float, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cllm.core.spec_decode.time", Ticking(look_s))
    policy, cost = SpecDecodePolicy(8), Priced(0.05)
    parrot = Parrot(0)
    sequences = [make_sequence(0, parrot), make_sequence(1, Parrot(0))]
    for _ in range(20):  # until it is known how long a look takes
        policy.start(Request(id="new", prompt=Prompt((1,)), max_tokens=4))  # may repeat what was said
        plan_step(policy, sequences, cost)
    before = len(parrot.asked)
    for _ in range(10 * every):
        plan_step(policy, sequences, cost)
    assert 9 <= len(parrot.asked) - before <= 10
    lone = Parrot(0)
    for _ in range(10 + every):
        plan_step(policy, [make_sequence(0, lone)], cost)
    assert len(lone.asked) >= 10, "a lone sequence does not depend on the clock"


def test_drafts_that_pay_are_looked_for_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cllm.core.spec_decode.time", Ticking(0.01))
    policy, cost = SpecDecodePolicy(8), Priced(0.05)
    assert all(plan_step(policy, eight(*range(8)), cost) for _ in range(20))


def test_on_a_gpu_a_lone_sequence_looks_now_and_then_since_a_look_costs_the_batch_prepared_ahead() -> None:
    policy, cost = SpecDecodePolicy(8), Priced(0.05)
    cost.records = True
    parrot = Parrot(0)
    for _ in range(10 * (RECORDED_AFTER + 1)):
        plan_step(policy, [make_sequence(0, parrot)], cost)
    assert len(parrot.asked) == 10
    sequences = [make_sequence(0, Parrot())]
    drafting = [bool(plan_step(policy, sequences, cost)) for _ in range(20)]
    assert all(drafting[RECORDED_AFTER + 1 :]), "where it pays, in every step"


def test_while_drafts_are_not_looked_for_each_sequence_learns_in_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cllm.core.spec_decode.time", Ticking(1.0))
    policy, cost = SpecDecodePolicy(8), Priced(0.05)
    sequences = [make_sequence(number, Parrot(0)) for number in range(TILE // 4)]
    learned: list[DraftState] = []
    monkeypatch.setattr(DraftState, "learn", lambda state, tokens: learned.append(state))
    for number, sequence in enumerate(sequences):
        sequence.arrival = number
    policy.learn(sequences)
    assert len(learned) == len(sequences), "nothing waits yet"
    while policy.looks():
        plan_step(policy, sequences, cost)
    learned.clear()
    for number in range(len(sequences)):
        assert not policy.looks()
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
    assert plan_step(policy, sequences, Priced(0.01)) == {}
    assert not any(parrot.asked for parrot in parrots)
    policy = SpecDecodePolicy(8, draft_model=lambda tenant: Parrot())
    assert plan_step(policy, sequences[:2], Priced(0.01))
    assert parrots[0].asked == parrots[1].asked == [4]


def test_a_draft_model_that_is_wrong_is_asked_for_a_share_of_the_steps() -> None:
    policy = SpecDecodePolicy(8, draft_model=lambda tenant: Parrot())
    parrot = Parrot()
    sequence, steps = make_sequence(0, parrot, acceptance=1.0), 2000
    for _ in range(steps):
        plan_step(policy, [sequence], Priced(0.2))
        sequence.tokens.append(9)
        sequence.num_computed += 1
        sequence.stopping.token_limit += 1
    assert steps * policy.EXPLORE_SHARE <= len(parrot.asked) <= steps * policy.EXPLORE_SHARE + 10


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
