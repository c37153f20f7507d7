"""What a replica says of itself: pending tokens, speed, and the blocks of its cache."""

from __future__ import annotations

from cllm.cluster.block_hashes import hash_blocks
from cllm.cluster.replica_load import ReplicaLoad
from cllm.messages import StepStats
from cllm.types import FinishReason, Limits, Prompt, Request, RequestOutput

LIMITS = Limits(sequences=2, cells=512, sequence_cells=256, request_tokens=256, batch_tokens=64)
PROMPT = tuple(range(130))


def make_load() -> ReplicaLoad:
    load = ReplicaLoad()
    load.reset(LIMITS)
    return load


def end(name: str, tokens: tuple[int, ...] = ()) -> RequestOutput:
    return RequestOutput(request_id=name, tokens=tokens, finish_reason=FinishReason.STOP)


def test_a_request_is_pending_until_its_first_token_and_leaves_its_blocks() -> None:
    load = make_load()
    load.submitted(Request(id="r", prompt=Prompt(PROMPT), max_tokens=9, tenant="t"), 1.0)
    assert load.report().requests == {"r": 130}
    load.processed([RequestOutput(request_id="r", tokens=(1,))], StepStats(), 2.0)
    assert load.report().requests == {"r": 0}
    load.processed([end("r", tuple(range(62)))], StepStats(), 5.0)
    report = load.report(all_blocks=True)
    assert report.requests == {} and report.speed.slot_s == 4.0
    whole = (*PROMPT, 1, *range(62), 0)
    assert set(report.blocks or ()) == set(hash_blocks(whole, "t")) and len(report.blocks or ()) == 3
    load.submitted(Request(id="again", prompt=Prompt(PROMPT), max_tokens=9, tenant="t"), 6.0)
    assert load.report().requests == {"again": 130 - 128}
    load.submitted(Request(id="foreign", prompt=Prompt(PROMPT), max_tokens=9, tenant="u"), 6.0)
    assert load.report().requests["foreign"] == 130


def test_blocks_are_reported_when_they_change_and_are_bounded_by_the_memory() -> None:
    load = make_load()
    assert load.report().blocks == []
    assert load.report().blocks is None
    for number in range(9):
        load.submitted(Request(id=f"{number}", prompt=Prompt((number,) * 65), max_tokens=1), 0.0)
    assert len(load.report().blocks or ()) == LIMITS.cells // 64
    load.forget_blocks()
    assert load.report().blocks == []


def test_speed_is_that_of_steps_with_a_prompt() -> None:
    load = make_load()
    load.processed([], StepStats(tokens=1, step_s=5.0, running=1), 0.0)
    assert load.report().speed.prefill_token_s == 0.0, "not known yet"
    load.processed([], StepStats(tokens=500, step_s=1.0, running=1), 0.0)
    assert load.report().speed.prefill_token_s == 0.002
    for _ in range(100):
        load.processed([], StepStats(tokens=500, step_s=2.0, running=1), 0.0)
    assert abs(load.report().speed.prefill_token_s - 0.004) < 1e-4


def test_what_waits_is_beyond_the_slots() -> None:
    load = make_load()
    for number in range(5):
        load.submitted(Request(id=f"{number}", prompt=Prompt((1,)), max_tokens=1), 0.0)
    assert load.waiting == 3
    load.reset(LIMITS)
    assert load.waiting == 0 and load.report().requests == {}
