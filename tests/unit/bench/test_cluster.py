"""The simulation of a cluster: its trace, one replica by hand, and the whole in small."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from bench.cluster.policies import POLICIES
from bench.cluster.replica import Job, ReplicaSize, SimulatedReplica, StepCosts
from bench.cluster.simulation import Setup, Simulation
from bench.cluster.trace import BLOCK_TOKENS, TraceRequest, load_trace

COSTS = StepCosts(base=1.0, prefill_token=0.01, row=0.5, attended=0.0, restore_token=0.001)
SMALL = ReplicaSize(slots=2, chunk_tokens=100, cache_blocks=4, target_s=100.0)


def job(name: str, tokens: int, answer: int = 3, at: float = 0.0, blocks: tuple[int, ...] = ()) -> Job:
    return Job(TraceRequest(name, at, tokens, answer, blocks))


def test_the_trace_is_the_published_one() -> None:
    trace = load_trace(compress=5)
    assert len(trace) == 12_031 and trace[-1].at_s == pytest.approx(3536.999 / 5)
    assert sum(request.tokens for request in trace) == 144_793_823
    assert (trace[0].tokens, trace[0].answer_tokens, trace[0].blocks) == (6758, 500, tuple(range(13)))
    assert all(len(request.blocks) == (request.tokens - 1) // BLOCK_TOKENS for request in trace)


def test_a_prompt_and_its_answer_take_what_their_steps_cost() -> None:
    replica, one = SimulatedReplica(0, COSTS, SMALL), job("a", 150)
    assert replica.submit(one, 0.0) == pytest.approx(2.0)  # 100 tokens
    end, following = replica.finish(2.0)
    assert not end.begun and following == pytest.approx(2.0 + 1.5)
    end, following = replica.finish(3.5)
    assert end.begun == [one] and following == pytest.approx(3.5 + 2 * 1.5), (
        "both steps that are left at once"
    )
    end, following = replica.finish(6.5)
    assert end.ended == [one] and following is None and one.left == 0


def test_an_arrival_cuts_decode_steps_short() -> None:
    replica, one, two = SimulatedReplica(0, COSTS, SMALL), job("a", 100, 11), job("b", 50)
    replica.submit(one, 0.0)
    assert replica.finish(2.0)[1] == pytest.approx(2.0 + 10 * 1.5)
    assert replica.submit(two, 4.0) == pytest.approx(5.0), "the step that runs is ended"
    _, following = replica.finish(5.0)
    assert one.generated == 3 and following == pytest.approx(5.0 + 1 + 0.5 + 0.5)
    third = job("c", 10)
    assert replica.submit(third, 5.5) is None and list(replica.waiting) == [third], "there is no slot"


def test_beside_answers_a_prompt_is_read_by_time() -> None:
    """A step of one answer takes 1.5 s, a pass for the prompt another second: 1.05 s are left of 4.2."""
    size = replace(SMALL, target_s=4.2, chunk_tokens=1000)
    replica, one, two = SimulatedReplica(0, COSTS, size), job("a", 100, 50), job("b", 200)
    now = replica.submit(one, 0.0)
    assert now is not None
    replica.finish(now)
    replica.submit(two, now)
    replica.finish(now + 1.5)
    replica.finish(now + 4.0)
    assert two.pending == 200 - 64, "a tile"
    quick = SimulatedReplica(0, COSTS, replace(size, target_s=100.0))
    assert quick._room(0, 0, 0) == quick._room(1, 0, 0) == 1000


def test_the_cache_serves_prefixes_and_forgets_the_ends_of_prompts_first() -> None:
    replica = SimulatedReplica(0, COSTS, SMALL)
    now = replica.submit(job("a", 3 * BLOCK_TOKENS + 1, 1, blocks=(1, 2, 3)), 0.0)
    while now is not None:
        now = replica.finish(now)[1]
    assert replica.count_cached((1, 2, 9)) == 2
    replica.submit(again := job("b", 2 * BLOCK_TOKENS + 5, 1, blocks=(1, 2)), 1000.0)
    assert again.pending == 5 and replica.reused == 2 * BLOCK_TOKENS
    replica._keep((1, 7, 8))
    assert set(replica.cache) == {1, 2, 7, 8}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("gateways", [1, 3])
def test_every_policy_ends_every_request_although_replicas_die(policy: str, gateways: int) -> None:
    trace = load_trace(compress=0.5, count=120)
    result = Simulation(Setup(policy, 6, gateways=gateways, kills=4), trace).run()
    assert result.lost == 0 and len(result.first_s) == 120 and min(result.first_s) > 0
    assert result.moved > 0


def test_the_same_seed_gives_the_same_run() -> None:
    trace = load_trace(compress=0.5, count=150)
    one, other = (Simulation(Setup("cllm", 5, gateways=2), trace).run() for _ in range(2))
    assert one.first_s == other.first_s and one.reused == other.reused


def test_the_placer_is_better_than_counting_requests() -> None:
    trace = load_trace(compress=0.4, count=600)
    results = {name: Simulation(Setup(name, 8), trace).run() for name in ("least requests", "cllm")}
    ours, others = (statistics.fmean(results[name].first_s) for name in ("cllm", "least requests"))
    assert ours < 0.9 * others
    assert results["cllm"].reused > results["least requests"].reused
