"""Computed prefixes outlive their request: who takes over what, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import Any

import pytest

from cllm.backend.base import KVState, StepStatus
from cllm.core.kv_cache.tiers import Entry
from cllm.core.step_cost import StepShape
from cllm.types import FinishReason
from tests.driver.engine import StepDriver
from tests.driver.fake_runner import FakeRunner, expected_text

SYSTEM = tuple(b"You are a helpful assistant that answers in as few words as it can. " * 2)  # 136 tokens


def failing(call: str, number: int) -> tuple[Callable[[int, str], Exception | None], list[str]]:
    """One native call of this name fails: the first, the second, …; and all of them that were made."""
    seen: list[str] = []

    def fail(_: int, name: str) -> Exception | None:
        seen.extend([name] * (name == call))
        return RuntimeError("native") if name == call and len(seen) == number else None

    return fail, seen


class Talk(StepDriver):
    """An engine on the fake runner with a prefix cache of 1 MiB, asked one thing after the other."""

    def __init__(self, runner: FakeRunner | None = None, *, cache_mb: int = 1, **settings: Any) -> None:
        super().__init__(
            runner or FakeRunner(sequences=4, cells=8192, batch_tokens=64), cache_mb=cache_mb, **settings
        )

    def send(self, prompt: Tokens[int], count: int = 8, tenant: str = "", *, reuse: bool = True) -> str:
        return self.add(prompt, count, tenant=tenant, reuse=reuse, ignore_eos=True)

    def ask(self, prompt: Tokens[int], count: int = 8, tenant: str = "", *, reuse: bool = True) -> int:
        """Ask alone, check the text; how many tokens came from the cache."""
        name = self.send(prompt, count, tenant, reuse=reuse)
        self.finish()
        assert self.text(name) == expected_text(prompt, count, ends=False)
        return self.usage(name).cached_tokens

    def total(self, field: str) -> int:
        return sum(getattr(stats, field) for stats in self.stats)


def test_the_same_prompt_again_computes_its_last_token_alone() -> None:
    talk = Talk()
    assert talk.ask(SYSTEM) == 0
    assert talk.ask(SYSTEM) == len(SYSTEM) - 1
    assert talk.total("prefix_hits") == 1
    assert talk.total("prefix_tokens") == len(SYSTEM) - 1


def test_a_growing_history_is_computed_once_and_held_once() -> None:
    talk = Talk()
    history = SYSTEM
    known = 0
    for turn in range(6):
        history += tuple(b"and another question, number %d, that is asked as an afterthought" % turn)
        answer = expected_text(history, 20, ends=False).encode()
        assert talk.ask(history, 20) == known
        known = len(history) + len(answer) - 1  # the last token of an answer is sent, not computed
        history += tuple(answer)
        assert talk.usage(f"r{turn}").cached_from == ("device" if turn else "")
    assert len(talk.prefix_cache.device.entries) == 1 and not talk.host_cache.entries, "it is held once"


def test_different_questions_share_the_common_part_from_either() -> None:
    talk = Talk()
    for letter in b"abc":
        assert talk.ask(SYSTEM + (letter,) * 100) == (0 if letter == ord("a") else len(SYSTEM))
    assert len(talk.prefix_cache.device.entries) == 3


@pytest.mark.parametrize(("save_s", "kept"), [(0.0, 6), (1.0, 1)])
def test_what_brings_little_new_is_offloaded_where_saving_is_quick(save_s: float, kept: int) -> None:
    talk = Talk(learns=True)
    for letter in b"abcdef":
        talk.ask(SYSTEM + (letter,) * 20)
        talk.offload()
        for _ in range(9):
            talk.scheduler.budget.cost.observe_transfer(1000, save_s, restore=False)
    assert len(talk.host_cache.entries) == kept


def test_tenants_share_nothing_unless_configured() -> None:
    talk = Talk()
    assert talk.ask(SYSTEM, tenant="one") == 0
    assert talk.ask(SYSTEM, tenant="two") == 0
    assert talk.ask(SYSTEM, tenant="one") == len(SYSTEM) - 1
    names = [talk.send(SYSTEM * 2, tenant=tenant) for tenant in ("three", "four", "four")]
    talk.finish()
    assert [talk.usage(name).cached_tokens for name in names] == [0, 0, 2 * len(SYSTEM) - 1]
    talk = Talk(share_prefixes_across_tenants=True)
    assert talk.ask(SYSTEM, tenant="one") == 0
    assert talk.ask(SYSTEM, tenant="two") == len(SYSTEM) - 1


def test_a_request_without_reuse_neither_stores_nor_matches() -> None:
    talk = Talk()
    assert talk.ask(SYSTEM, reuse=False) == 0
    assert talk.ask(SYSTEM) == 0
    assert talk.ask(SYSTEM, reuse=False) == 0
    names = [talk.send(SYSTEM[::-1], reuse=reuse) for reuse in (False, True, False)]
    talk.finish()
    assert [talk.usage(name).cached_tokens for name in names] == [0, 0, 0]


def test_without_ram_nothing_is_kept() -> None:
    talk = Talk(cache_mb=0)
    assert talk.ask(SYSTEM) == talk.ask(SYSTEM) == 0
    assert talk.total("prefix_saves") == 0


def test_the_byte_budget_holds_and_the_oldest_are_evicted() -> None:
    talk = Talk(swap_space_mb=0)
    talk.host_cache.cached_limit = talk.host_cache.limit = 4000  # bytes: two or three prompts of 150 tokens
    for letter in b"abcde" * 2:
        assert talk.ask((letter,) * 150) == 0, "five take turns where there is room for fewer"
        talk.offload()
        assert talk.host_cache.cached_bytes <= 4000
    assert talk.host_cache.evictions > 5
    assert talk.ask((ord("e"),) * 150) == 149 and talk.usage("r10").cached_from == "ram"


@pytest.mark.parametrize("trimmable", [True, False])
@pytest.mark.parametrize("offloaded", [True, False])
def test_memory_that_cannot_be_cut_is_put_back_to_a_checkpoint(trimmable: bool, offloaded: bool) -> None:
    talk = Talk(FakeRunner(sequences=2, cells=8192, batch_tokens=64, trimmable=trimmable))

    def ask_again(prompt: Tokens[int], count: int) -> tuple[int, str]:
        if offloaded:
            talk.offload()
        cached = talk.ask(prompt, count)
        return cached, talk.usage(f"r{len(talk.requests) - 1}").cached_from

    answer = tuple(expected_text(SYSTEM, 30, ends=False).encode())
    assert talk.ask(SYSTEM, 30) == 0
    tier = "ram" if offloaded else "device"
    put_back = tier + ("" if trimmable else "+checkpoint")
    assert ask_again(SYSTEM, 30) == (len(SYSTEM) - 1, put_back)
    turn = SYSTEM + answer + tuple(b"and then?")
    assert ask_again(turn, 80) == (len(SYSTEM) + 29, tier)
    assert ask_again(turn, 80) == (len(turn) - 1, put_back)


def test_checkpoints_that_go_leave_their_room_in_ram() -> None:
    talk = Talk(FakeRunner(sequences=2, cells=8192, batch_tokens=64, trimmable=False))
    talk.ask(SYSTEM)
    host = talk.host_cache
    assert host.room < host.cached_limit, "a free slot holds checkpoints"
    talk.send(SYSTEM[::-1] * 8)
    while not talk.scheduler.running or not next(iter(talk.scheduler.running.values())).checkpoints:
        talk.step()
    talk.prefix_cache.clear()
    assert host.room < host.cached_limit, "so does a running sequence"
    talk.cancel("r1")
    talk.finish()
    talk.prefix_cache.clear()
    assert host.room == host.cached_limit


def test_a_cancelled_request_stores_what_it_has_computed() -> None:
    talk = Talk()
    name = talk.send(SYSTEM * 3)
    for _ in range(3):
        talk.step()
    talk.cancel(name)
    assert talk.ask(SYSTEM * 3) == 3 * 64


def test_a_failed_request_leaves_nothing() -> None:
    talk = Talk()
    talk.send(SYSTEM)
    for _ in range(4):
        talk.step()
    talk.fake.fail = lambda _, name: StepStatus.BAD_BATCH if name == "collect" else None
    talk.finish()
    assert talk.outcome("r0") is FinishReason.ERROR
    assert len(talk.host_cache.entries) == 0


FAILING = (SYSTEM + tuple(b"x" * 90), tuple(b"y" * 90))


@pytest.mark.parametrize(
    ("call", "victims"), [("save", 0), ("restore", 0), ("copy", 0), ("truncate", 1), ("next_position", 1)]
)
def test_a_call_that_fails_around_the_cache_costs_a_recompute_at_most(call: str, victims: int) -> None:
    """Where it is the law's own check that fails, the request it was made for."""
    for number in range(1, 1000):
        talk = Talk()
        talk.ask(SYSTEM)
        talk.fake.fail, seen = failing(call, number)
        names = [talk.send(prompt) for prompt in FAILING]
        talk.run()
        if len(seen) < number:
            assert number > 1 or call == "copy"
            return
        failed = [name for name in names if talk.outcome(name) is FinishReason.ERROR]
        assert len(failed) <= victims
        for name, prompt in zip(names, FAILING, strict=True):
            if name not in failed:
                assert talk.text(name) == expected_text(prompt, 8, ends=False)


@pytest.mark.parametrize(("cells", "copies"), [(65_536, 0), (2048, 3)], ids=["long streams", "short ones"])
def test_a_load_is_served_through_ram_where_that_is_quicker_than_copying_kv_streams(
    cells: int, copies: int
) -> None:
    talk = Talk(FakeRunner(sequences=4, cells=cells, batch_tokens=64))
    talk.ask(tuple(b"so that it is known how large a state is" * 3))
    talk.prefix_cache.clear()
    calls: list[str] = []

    def listen(_: int, name: str) -> None:
        calls.append(name)

    talk.fake.fail = listen
    prompts = [(*SYSTEM, *SYSTEM, letter) for letter in b"abcd"]
    names = [talk.send(prompt, 30) for prompt in prompts]
    while talk.scheduler.waiting:
        talk.step()
    assert [calls.count(name) for name in ("copy", "save", "restore")] == [copies, copies == 0, 3 - copies]
    talk.finish()
    assert [talk.usage(name).cached_tokens for name in names] == [0, *[2 * len(SYSTEM)] * 3]
    for name, prompt in zip(names, prompts, strict=True):
        assert talk.text(name) == expected_text(prompt, 30, ends=False)


def test_requests_that_share_more_with_each_other_wait_for_each_other() -> None:
    talk = Talk()
    first = talk.send(SYSTEM + (1,) * 300)
    second = talk.send(SYSTEM + (2,) * 300 + (3,))
    third = talk.send(SYSTEM + (2,) * 300 + (4,))
    talk.finish()
    cached = [talk.usage(name).cached_tokens for name in (first, second, third)]
    assert cached == [0, len(SYSTEM), len(SYSTEM) + 300]


def test_no_request_waits_for_one_that_is_behind_the_cache() -> None:
    talk = Talk()
    slow = talk.send(SYSTEM * 10)
    talk.step()
    talk.host_cache.put(Entry("", SYSTEM * 2, b"".join(token.to_bytes(4, "little") for token in SYSTEM * 2)))
    quick = talk.send((*SYSTEM, *SYSTEM, 6))
    talk.step()
    assert len(talk.scheduler.running) == 2, "it does not wait"
    talk.finish()
    assert talk.usage(quick).cached_tokens == 2 * len(SYSTEM)
    assert talk.usage(slow).cached_tokens == 0


def test_a_long_prompt_that_a_short_one_waits_for_is_computed_first() -> None:
    talk = Talk(FakeRunner(sequences=4, cells=16_384, batch_tokens=64))
    oldest = talk.send(tuple(b"o" * 2000), 1)
    long = talk.send(SYSTEM * 20 + (1,), 1)
    talk.step()
    middle = talk.send(tuple(b"m" * 600), 1)
    short = talk.send((*SYSTEM, 2), 1)
    done: list[str] = []
    while talk.scheduler.live:
        talk.step()
        done += [name for name, answer in talk.answers.items() if answer.tokens and name not in done]
    assert done[:2] == [short, middle] and set(done[2:]) == {oldest, long}
    assert talk.usage(short).cached_tokens == len(SYSTEM)


def test_the_cheapest_state_that_covers_the_prefix_is_restored() -> None:
    talk = Talk()
    restored: list[int] = []
    original = talk.fake.restore

    def restore(seq_id: int, state: KVState) -> bool:
        restored.append(len(state) // 4)
        return original(seq_id, state)

    talk.fake.restore = restore  # type: ignore[method-assign]
    talk.ask(SYSTEM + (1,) * 1500, 1)
    talk.ask(SYSTEM + (2,) * 100, 1)
    talk.offload()
    restored.clear()
    assert talk.ask(SYSTEM + (3,) * 10, 1) == len(SYSTEM)
    assert restored == [len(SYSTEM) + 100]


@pytest.mark.parametrize("unified", [True, False])
def test_a_state_that_finds_no_room_now_is_kept(unified: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the free cells of a unified KV do not lie together."""
    talk = Talk(FakeRunner(sequences=4, cells=8192, batch_tokens=64, unified=unified))
    talk.ask(SYSTEM)
    talk.offload()
    (entry,) = talk.host_cache.entries
    neighbour = talk.send(b"neighbour" * 10, 400)
    talk.step(3)
    with monkeypatch.context() as patch:
        patch.setattr(talk.fake, "restore", lambda seq_id, state: False)
        refused = talk.send(SYSTEM, 1)
        while talk.answers[refused].finish_reason is None:
            talk.step()
    assert talk.usage(refused).cached_tokens == 0 and entry in talk.host_cache.entries
    talk.prefix_cache.clear_slots()
    again = talk.send(SYSTEM, 1)
    talk.finish()
    assert talk.usage(again).cached_tokens == len(SYSTEM) - 1
    assert talk.text(neighbour) == expected_text(b"neighbour" * 10, 400, ends=False)


def test_a_prefix_that_cannot_be_restored_now_is_copied_from_one_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the cells of the slot are still to be copied to another's."""
    talk = Talk()
    talk.ask(SYSTEM)
    talk.offload()
    running = talk.send(SYSTEM + (1,) * 10, 400)
    talk.step(8)
    monkeypatch.setattr(talk.fake, "restore", lambda seq_id, state: False)
    refused = talk.send(SYSTEM + (2,) * 10, 1)
    talk.finish()
    assert talk.usage(running).cached_from == "ram"
    assert talk.usage(refused).cached_tokens == len(SYSTEM) and talk.usage(refused).cached_from == "device"
    assert talk.text(refused) == expected_text(SYSTEM + (2,) * 10, 1, ends=False)


def test_a_state_that_is_refused_by_an_empty_memory_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk()
    talk.ask(SYSTEM)
    talk.offload()
    (entry,) = talk.host_cache.entries
    monkeypatch.setattr(talk.fake, "restore", lambda seq_id, state: False)
    assert talk.ask(SYSTEM) == 0 and entry not in talk.host_cache.entries


def test_a_restore_that_takes_longer_than_computing_is_not_made() -> None:
    talk = Talk(learns=True)
    cost = talk.scheduler.budget.cost
    talk.ask(SYSTEM)
    talk.offload()
    for _ in range(20):
        cost.observe_shape(StepShape(1, 100, 0, 0.0), 1e-4)  # a microsecond a token
        cost.observe_transfer(1000, 1.0, restore=True)
    for _ in range(3):
        assert talk.ask(SYSTEM) == 0
        talk.prefix_cache.clear_slots()
    # It is not given up for good: now and then the default is believed again.
    found = []
    for _ in range(10):
        found.append(talk.ask(SYSTEM))
        talk.prefix_cache.clear_slots()
    assert any(found)


def test_saving_that_would_make_others_wait_too_long_is_left() -> None:
    talk = Talk(target_itl_ms=1, learns=True)
    cost = talk.scheduler.budget.cost
    for _ in range(9):
        cost.observe_transfer(1000, 0.01, restore=False)
        cost.observe_transfer(1000, 1e-9, restore=True)
    talk.ask(SYSTEM, 1)
    slots = talk.prefix_cache.slots
    assert slots.evict_one(others=True) and not talk.host_cache.entries
    talk.ask(SYSTEM, 1)
    assert slots.evict_one(others=False) and talk.host_cache.entries, "none waited"


@pytest.mark.parametrize(("common", "taken"), [(5, 0), (7, 0), (8, 8), (30, 30), (63, 63)])
def test_a_short_system_prompt_is_taken_from_ram_too(common: int, taken: int) -> None:
    talk = Talk()
    system = b"you are a helpful assistant who answers in short and clear sentences."[:common]
    assert talk.ask(system + b"0" * 70) == 0
    talk.offload()
    assert talk.ask(system + b"1" * 70) == taken
    assert talk.ask(system + b"2" * 5) == taken
