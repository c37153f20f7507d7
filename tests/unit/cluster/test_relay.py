"""The relay: requests on replicas that are plain objects here. What is lost moves, what kills is isolated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from cllm.adapters import Adapter
from cllm.cluster.link import Draining
from cllm.cluster.placer import ReplicaReport, ReplicaSpeed
from cllm.cluster.relay import Relay, RemoteReplica
from cllm.errors import EngineNotReady, PoisonRequest
from cllm.messages import (
    AdapterDone,
    CacheDone,
    Cancel,
    ClearCache,
    ClusterReport,
    Died,
    Inspect,
    Inspection,
    LoadAdapter,
    Ready,
    Report,
    StepReport,
    StepStats,
    Submit,
    Unready,
    UseSlot,
)
from cllm.types import FinishReason, Limits, ModelInfo, Prompt, Request, RequestOutput, Snapshot, Usage

INFO = ModelInfo(
    name="model",
    architecture="a",
    description="d",
    parameters=1,
    size_bytes=1,
    vocabulary_size=1,
    context_train=1,
    embedding_length=1,
    layers=1,
)


Kind = TypeVar("Kind", bound=Report)


class FakeReplica:
    """The far end of a link: keeps what it was sent, and answers by hand."""

    def __init__(self, relay: Relay, name: str, *, slots: int = 4) -> None:
        self._relay = relay
        self.sent: list[msgspec.Struct] = []
        self.slots = slots
        self.remote: RemoteReplica = relay.join(name, self.sent.append)

    def become_ready(self) -> None:
        limits = Limits(
            sequences=self.slots, cells=1024, sequence_cells=256, request_tokens=256, batch_tokens=64
        )
        self._relay.receive(self.remote, Ready(INFO, limits, {"kv": 10}))
        self.report()

    def report(self, *gateways: str, token_s: float = 0.01) -> None:
        speed = ReplicaSpeed(prefill_token_s=token_s, slot_s=1.0, slots=self.slots)
        report = ReplicaReport(speed=speed, requests={}, cells=1024, gateways=gateways)
        self._relay.receive(self.remote, report)

    @property
    def requests(self) -> list[Request]:
        """Submitted and not cancelled, in their order."""
        cancelled = {message.request_id for message in self.sent if isinstance(message, Cancel)}
        submitted = [message.request for message in self.sent if isinstance(message, Submit)]
        return [request for request in submitted if request.id not in cancelled]

    def say(self, request: Request, tokens: Sequence[int], *, end: bool = False, cached: int = 0) -> None:
        usage = Usage(prompt_tokens=1, completion_tokens=len(tokens), cached_tokens=cached)
        output = RequestOutput(
            request_id=request.id,
            tokens=tuple(tokens),
            usage_so_far=usage,
            finish_reason=FinishReason.STOP if end else None,
            usage=usage if end else None,
        )
        stats = StepStats(steps=1, tokens=len(tokens), running=1, cells_used=7)
        self._relay.receive(self.remote, StepReport((output,), stats))

    def die(self) -> None:
        self._relay.leave(self.remote, "killed")


class Gateway:
    """A relay with its reports and a clock."""

    def __init__(self, *replicas: str) -> None:
        self.reports: list[Report] = []
        self.now = 0.0
        self.relay = Relay(self.reports.append, "gate", clock=lambda: self.now)
        self.replicas = [FakeReplica(self.relay, name) for name in replicas]
        for replica in self.replicas:
            replica.become_ready()

    def submit(self, name: str, *, prompt: Sequence[int] = (1, 2, 3), prefix: Sequence[int] = ()) -> None:
        request = Request(
            id=name, prompt=Prompt(tuple(prompt)), generated_prefix=tuple(prefix), max_tokens=100
        )
        self.relay.handle(Submit(request))

    def find(self, name: str) -> tuple[FakeReplica, Request]:
        """Where a request is now."""
        found = [
            (replica, request)
            for replica in self.replicas
            if replica.remote in self.relay.replicas
            for request in replica.requests
            if request.id.startswith(f"{name}~") and request.id in replica.remote.requests
        ]
        (place,) = found
        return place

    def outputs(self, name: str) -> list[RequestOutput]:
        self.relay.flush()
        reports = [report for report in self.reports if isinstance(report, StepReport)]
        return [each for report in reports for each in report.outputs if each.request_id == name]

    def last(self, kind: type[Kind]) -> Kind:
        return next(report for report in reversed(self.reports) if isinstance(report, kind))


def test_limits_are_those_of_all_replicas_together() -> None:
    gateway = Gateway("a", "b")
    ready = gateway.last(Ready)
    assert (ready.limits.sequences, ready.limits.cells, ready.limits.request_tokens) == (8, 2048, 256)
    assert ready.memory == {"kv": 20}


def test_a_request_is_moved_with_what_was_delivered() -> None:
    gateway = Gateway("a", "b")
    gateway.submit("r", prefix=(9,))
    replica, request = gateway.find("r")
    assert request.generated_prefix == (9,)
    replica.say(request, (10, 11), cached=2)
    replica.die()
    other, moved = gateway.find("r")
    assert other is not replica and moved.generated_prefix == (9, 10, 11) and moved.id != request.id
    other.say(moved, (12,), end=True, cached=3)
    outputs = gateway.outputs("r")
    assert [each.tokens for each in outputs] == [(10, 11), (12,)], "nothing comes twice"
    assert outputs[-1].usage is not None and outputs[-1].usage.cached_tokens == 2, "as on the first replica"
    assert gateway.relay.moved == 1


def test_late_outputs_of_a_replica_that_lost_a_request_are_dropped() -> None:
    gateway = Gateway("a", "b")
    gateway.submit("r")
    replica, request = gateway.find("r")
    gateway.relay._withdraw([gateway.relay._requests["r"]], replica.remote)
    replica.say(request, (1,), end=True)
    assert gateway.outputs("r") == []


def test_outputs_of_several_replicas_are_one_report() -> None:
    gateway = Gateway("a", "b")
    for number in range(4):
        gateway.submit(f"r{number}")
    for number in range(4):
        replica, request = gateway.find(f"r{number}")
        replica.say(request, (number,))
    before = len(gateway.reports)
    gateway.relay.flush()
    (report,) = gateway.reports[before:]
    assert isinstance(report, StepReport) and len(report.outputs) == 4
    assert (report.stats.steps, report.stats.running, report.stats.cells_used) == (4, 2, 14)


def test_seconds_of_steps_are_reported_for_the_gateways_own_ids() -> None:
    gateway = Gateway("a", "b")
    gateway.submit("r")
    replica, request = gateway.find("r")
    for seconds in (0.5, 0.25):
        spent = {request.id: seconds, "of another gateway": 1.0}
        gateway.relay.receive(replica.remote, StepReport((), StepStats(), spent))
    gateway.relay.flush()
    assert gateway.last(StepReport).spent == {"r": 0.75}


def test_a_request_that_kills_is_isolated_and_failed() -> None:
    gateway = Gateway("a", "b", "c", "d")
    for name in ("poison", "good"):
        gateway.submit(name)
    for _ in range(3):
        replica, _ = gateway.find("poison")
        beside = [each for each in replica.remote.requests if not each.startswith("poison")]
        alone = gateway.relay._requests["poison"].alone
        assert not (alone and beside), "it runs by itself"
        replica.die()
    (end,) = gateway.outputs("poison")
    assert end.error is not None and end.error.code == PoisonRequest.code
    replica, good = gateway.find("good")
    replica.say(good, (5,), end=True)
    assert gateway.outputs("good")[-1].finish_reason is FinishReason.STOP


def test_an_isolated_request_has_its_replica_until_it_is_cleared() -> None:
    gateway = Gateway("a", "b", "c")
    gateway.submit("suspect")
    for _ in range(2):
        gateway.find("suspect")[0].die()
    replica, suspect = gateway.find("suspect")
    gateway.submit("other")
    assert gateway.relay._waiting, "the only replica left is taken"
    replica.say(suspect, range(16))
    assert gateway.find("other")[0] is replica
    replica.say(suspect, (), end=True)


def test_engine_death_moves_requests_and_the_replica_comes_back() -> None:
    gateway = Gateway("a", "b")
    gateway.submit("r")
    replica, request = gateway.find("r")
    replica.say(request, (1,))
    gateway.relay.receive(replica.remote, Died("engine_died", "SIGSEGV", 11))
    other, moved = gateway.find("r")
    assert other is not replica and moved.generated_prefix == (1,)
    ready = gateway.last(Ready)
    assert ready.limits.sequences == 4
    replica.become_ready()
    ready = gateway.last(Ready)
    assert ready.limits.sequences == 8


def test_a_draining_replica_gets_nothing_new_and_blames_no_request() -> None:
    gateway = Gateway("a", "b")
    gateway.submit("r")
    replica, _ = gateway.find("r")
    gateway.relay.receive(replica.remote, Draining())
    for number in range(6):
        gateway.submit(f"r{number}")
        assert gateway.find(f"r{number}")[0] is not replica
    assert gateway.find("r")[0] is replica
    replica.die()
    assert gateway.find("r")[0] is not replica and gateway.relay._requests["r"].crashes == 0


def test_without_replicas_requests_wait_then_fail() -> None:
    gateway = Gateway("a")
    gateway.submit("r")
    gateway.replicas[0].die()
    assert isinstance(gateway.reports[-2], Unready) and isinstance(gateway.reports[-1], ClusterReport)
    gateway.now = Relay.WAIT_LIMIT_S - 1
    gateway.relay.keep_limits()
    assert gateway.outputs("r") == []
    gateway.now = Relay.WAIT_LIMIT_S + 1
    gateway.relay.keep_limits()
    (end,) = gateway.outputs("r")
    assert end.error is not None and end.error.code == EngineNotReady.code
    given_up = gateway.last(Unready)
    assert given_up.given_up


def test_what_a_draining_replica_computes_is_not_given_up() -> None:
    gateway = Gateway("a")
    gateway.submit("r")
    gateway.relay.receive(gateway.replicas[0].remote, Draining())
    gateway.submit("waits")
    gateway.now = Relay.WAIT_LIMIT_S + 1
    gateway.relay.keep_limits()
    assert gateway.outputs("waits")[-1].error is not None and gateway.outputs("r") == []
    last = gateway.last(Unready)
    assert not last.given_up
    replica, request = gateway.find("r")
    replica.say(request, (1,), end=True)
    gateway.relay.keep_limits()
    last = gateway.last(Unready)
    assert last.given_up


def test_isolation_leaves_cancelled_requests_where_they_are() -> None:
    gateway = Gateway("a", "b", "c")
    gateway.submit("suspect")
    gateway.find("suspect")[0].die()
    gateway.submit("left")
    place, left = gateway.find("left")
    assert place is not gateway.find("suspect")[0]
    gateway.relay.handle(Cancel("left"))
    gateway.find("suspect")[0].die()
    assert gateway.find("suspect")[0] is place and gateway.relay._requests["suspect"].alone
    assert left.id in place.remote.requests, "its end is still to come"


def test_what_waits_goes_to_the_replica_that_comes() -> None:
    gateway = Gateway("a")
    gateway.submit("r")
    gateway.replicas[0].die()
    late = FakeReplica(gateway.relay, "b")
    gateway.replicas.append(late)
    late.become_ready()
    assert gateway.find("r")[0] is late


def test_a_new_replica_takes_what_waits_for_slots() -> None:
    gateway = Gateway("a")
    for number in range(7):  # three more than slots
        gateway.submit(f"r{number}")
    first = gateway.replicas[0]
    for request in first.requests[:4]:
        first.say(request, (1,))
    late = FakeReplica(gateway.relay, "b")
    gateway.replicas.append(late)
    late.become_ready()
    assert len(late.remote.requests) == 3 and len(first.remote.requests) == 4


def test_a_cancel_reaches_the_replica_or_what_waits() -> None:
    gateway = Gateway("a")
    gateway.submit("r")
    gateway.relay.handle(Cancel("r"))
    assert isinstance(gateway.replicas[0].sent[-1], Cancel)
    gateway.replicas[0].die()
    gateway.submit("waits")
    gateway.relay.handle(Cancel("waits"))
    for name in ("r", "waits"):
        (end,) = gateway.outputs(name)
        assert end.finish_reason is FinishReason.CANCELLED
    assert not gateway.relay._requests


def test_calls_are_answered_by_all_replicas_that_are_left() -> None:
    gateway = Gateway("a", "b")
    gateway.submit("r")
    gateway.relay.handle(Inspect(7))
    empty = Snapshot(
        sequences_total=4,
        cells_total=1024,
        cells_used=3,
        cells_cached=1,
        slots_cached=1,
        leases=(),
        waiting=("r~gate.0",),
        cached={2: 64},
        leased_total=1,
        released_total=1,
        cleared_cells_total=0,
    )
    for replica in gateway.replicas:
        gateway.relay.receive(replica.remote, Inspection(7, empty))
    answer = gateway.last(Inspection)
    snapshot = answer.snapshot
    assert (answer.call_id, snapshot.sequences_total, snapshot.cells_used) == (7, 8, 6)
    assert snapshot.cached == {2: 64, 6: 64} and set(snapshot.waiting) == {"r"}
    gateway.relay.handle(ClearCache(8))
    gateway.relay.receive(gateway.replicas[0].remote, CacheDone(8, prefixes=2))
    gateway.replicas[1].die()
    assert gateway.last(CacheDone) == CacheDone(8, prefixes=2)


def test_a_replica_without_measurements_is_as_fast_as_the_others() -> None:
    gateway = Gateway("a", "b")
    gateway.replicas[0].report(token_s=1e-5)
    gateway.replicas[1].report(token_s=0.0)
    for number in range(4):
        gateway.submit(f"r{number}")
    assert [len(replica.remote.requests) for replica in gateway.replicas] == [2, 2]


def test_saved_slots_are_refused() -> None:
    gateway = Gateway("a")
    gateway.relay.handle(UseSlot(4, "save", 0, "file"))
    answer = gateway.last(CacheDone)
    assert answer.failure is not None
    assert answer.failure.code == "not_supported" and gateway.replicas[0].sent == []


def test_adapters_are_refused_and_placed_apart() -> None:
    gateway = Gateway("a", "b")
    gateway.relay.handle(LoadAdapter(5, Adapter(name="sql", file="sql.gguf")))
    failure = gateway.last(AdapterDone).failure
    assert failure is not None and "cannot be used with --cluster" in failure.message
    blocks = []
    for number, (key, begin) in enumerate((("", 0), ("x:1.0", 0), ("y:1.0", 64))):
        prompt = Prompt(tuple(range(200)), adapter=key, adapter_from=begin)
        gateway.relay.handle(Submit(Request(id=f"r{number}", prompt=prompt, max_tokens=9)))
        blocks.append(gateway.relay._requests[f"r{number}"].placement.blocks)
    assert len(blocks[0]) == 3 and not set(blocks[0]) & set(blocks[1])
    assert set(blocks[0]) & set(blocks[2]) == {blocks[0][0]}  # what stands before an aLoRA's invocation


def test_gateways_share_replicas() -> None:
    gateway = Gateway("a", "b")
    gateway.replicas[0].report("gate", "other")
    assert (gateway.relay._placer.gateway, gateway.relay._placer.gateways) == (0, 2)
