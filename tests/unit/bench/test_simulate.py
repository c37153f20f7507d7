"""The scheduler's policy on recorded costs: within 5 % of the best fixed rule on every machine."""

from __future__ import annotations

import time

import pytest

from bench.costs import MachineCosts, read_costs
from bench.simulate import Judgement, Rule, SimulatedClock, get_rules, get_workloads, main, simulate
from cllm.core import engine_core
from cllm.core.kv_cache import transfer

COSTS = read_costs()
MAX_RATIO = 1.05


def get_likely(costs: MachineCosts) -> list[Rule]:
    """The rules that are best somewhere; all of them take three times as long."""
    chunks = sorted({rule.chunk for rule in get_rules(costs) if rule.chunk is not None})
    return [*(Rule(chunk) for chunk in (chunks[1], *chunks[-2:])), Rule(chunks[-1], least_recent=True)]


@pytest.mark.parametrize("name", COSTS)
def test_the_policy_is_near_the_best_fixed_rule(name: str) -> None:
    """Nothing here takes real time: a ratio is a property of the policy, the same on every run."""
    costs = COSTS[name]
    found = {each.name: Judgement.of(costs, each, get_likely(costs)) for each in get_workloads(costs)}
    ratios = {workload: round(each.ratio, 3) for workload, each in found.items()}
    assert max(ratios.values()) <= MAX_RATIO, ratios


@pytest.mark.parametrize("workload", ["gpu-agents", "gpu-users"])
def test_no_conversation_is_lost_to_a_gap_that_others_soon_fill(workload: str) -> None:
    """As many conversations as slots, which return in any order, after a load that never came back."""
    costs = COSTS["h200-8b"]
    definition = next(each for each in get_workloads(costs) if each.name == workload)
    kept = simulate(costs, definition, Rule(least_recent=True)).cached_tokens  # each in its slot
    assert simulate(costs, definition).cached_tokens >= 0.99 * kept > 0


def test_a_simulation_repeats_itself_and_takes_no_real_time() -> None:
    costs = COSTS["x86-avx512"]
    workload = get_workloads(costs)[0]
    outcome = simulate(costs, workload)
    assert outcome == simulate(costs, workload)
    assert outcome.seconds > 5 and outcome.prompt_tokens > 1000


def test_the_clock_stands_for_time_in_the_core_alone() -> None:
    clock = SimulatedClock()
    with clock.patched():
        patched = [vars(module)["time"] for module in (engine_core, transfer)]
        assert patched == [clock, clock] and time.perf_counter() > 0
    assert vars(engine_core)["time"] is time


def test_steps_cost_what_the_machine_is_recorded_with() -> None:
    """Eight prompts, then eight rows that decode together: little else takes time."""
    costs = COSTS["neoverse-n1"]
    workload = next(each for each in get_workloads(costs) if each.name == "long")
    outcome = simulate(costs, workload, Rule(chunk=512))
    prefill_s = 8 * 480 * (costs.step.prefill_token + 240 * costs.step.tiled)
    decode_s = 40 * (costs.step.ubatch + 8 * (costs.step.row + 500 * costs.step.attended))
    assert prefill_s + 0.8 * decode_s < outcome.seconds < 1.25 * (prefill_s + decode_s)


def test_a_fixed_chunk_trades_gaps_for_time() -> None:
    costs = COSTS["x86-avx512"]
    workload = next(each for each in get_workloads(costs) if each.name == "long")
    small, large = (simulate(costs, workload, Rule(chunk)) for chunk in (16, 512))
    assert small.seconds > 1.2 * large.seconds and small.worst_gap_s < large.worst_gap_s / 4


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--costs", "x86-amx", "--workload", "burst"]) == 0
    shown = capsys.readouterr().out
    assert "policy" in shown and "best: chunk" in shown and "worst gap, s" in shown
    assert main(["--costs", "pdp-11"]) == 2
    assert "x86-amx" in capsys.readouterr().err
