"""Relay: the requests of one gateway on the replicas of a model. Places them, passes outputs on, moves them.

It stands where an engine would: commands come in, reports go out. When a replica is lost, its requests go on
elsewhere with what was delivered. One that is there each time a replica dies is isolated, then failed. Pure
logic without sockets or Ray: the cluster worker says what happens.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import msgspec

from cllm import messages
from cllm.cluster.link import Draining, FromReplica
from cllm.cluster.placer import ReplicaChoice, ReplicaPlacer, ReplicaReport, hash_blocks
from cllm.cluster.replica_metrics import ReplicaMetrics, add_states, add_work, merge_ready
from cllm.errors import EngineNotReady, NotSupported, PoisonRequest
from cllm.types import Failure, Request, RequestOutput
from cllm.workers.supervisor import ResumableRequest

log = logging.getLogger(__name__)
_replace = msgspec.structs.replace
DEFAULT_PREFILL_TOKEN_S = 1e-3  # where no replica has measured it


class RelayedRequest(ResumableRequest):
    """A request of this gateway, and the replica that has it."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.replica: RemoteReplica | None = None  # None while it waits for one
        self.placement: ReplicaChoice  # the last
        self.placed = 0  # times
        self.silent = True  # nothing has come from where it is


class RemoteReplica:
    """A replica as this gateway knows it."""

    def __init__(self, number: int, name: str, send: Callable[[msgspec.Struct], None]) -> None:
        self.number = number  # for the placer; used again when it has gone
        self.name = name
        self.send = send
        self.ready: messages.Ready | None = None
        self.load: ReplicaReport | None = None
        self.draining = False
        self.stats = messages.StepStats()  # the last
        self.requests: dict[str, RelayedRequest] = {}  # by the id that they have there
        self.generated = 0

    @property
    def available(self) -> bool:
        return self.ready is not None and self.load is not None and not self.draining

    @property
    def slots(self) -> int:
        return 0 if self.ready is None else self.ready.limits.max_running

    def describe(self) -> messages.ReplicaStatus:
        load = self.load
        return messages.ReplicaStatus(
            name=self.name,
            ready=self.available,
            requests=len(self.requests) if load is None else len(load.requests),
            slots=self.slots,
            cells=0 if load is None else load.cells,
            cells_used=0 if load is None else load.cells_used,
            generated=self.generated,
        )


class Relay:
    """Every request that is submitted gets one terminal output. One thread at a time."""

    WAIT_LIMIT_S = 30.0  # for a replica, while there is none

    def __init__(
        self,
        emit: Callable[[messages.Report], None],
        name: str,
        *,
        absent: str = "no replica computes this model",
        share_across_tenants: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name` of this gateway, unique in the cluster. `absent` says what is wrong where none is there."""
        self._emit, self._name, self._absent, self._clock = emit, name, absent, clock
        self._share = share_across_tenants
        self._placer = ReplicaPlacer()
        self._requests: dict[str, RelayedRequest] = {}
        self._waiting: deque[RelayedRequest] = deque()  # for a replica
        self._suspects: deque[RelayedRequest] = deque()  # each is to run alone
        self._isolated: RelayedRequest | None = None  # it does now, and no other is placed beside it
        self.replicas: list[RemoteReplica] = []
        self._calls: dict[int, ReplicaMetrics] = {}
        self._snapshots = itertools.count(1)
        self._outputs: list[RequestOutput] = []  # for the next report
        self._work: messages.StepStats | None = None
        self._spent = defaultdict[str, float](float)  # seconds of steps by request, not yet reported
        self._absent_since: float | None = None  # there was a replica, and there is none
        self._given_up = False
        self.moved = 0

    # Commands ----------------------------------------------------------------------------------------

    def handle(self, command: messages.Command) -> None:
        match command:
            case messages.Submit(request):
                relayed = self._requests[request.id] = RelayedRequest(request)
                self._place(relayed)
            case messages.Cancel(request_id):
                self._cancel(request_id)
            case messages.UseSlot(call_id):
                why = "slots are of one machine: they cannot be used with --cluster"
                self._emit(messages.CacheDone(call_id, failure=Failure(NotSupported.code, why)))
            case messages.LoadAdapter(call_id, adapter) | messages.UnloadAdapter(call_id, adapter):
                why = "adapters are of one machine: they cannot be used with --cluster"
                self._emit(messages.AdapterDone(call_id, adapter, failure=Failure(NotSupported.code, why)))
            case messages.Inspect() | messages.ClearCache():
                asked = [replica for replica in self.replicas if replica.ready is not None]
                self._calls[command.call_id] = ReplicaMetrics(command, asked, next(self._snapshots))
                for replica in asked:
                    replica.send(command)
                self._settle_calls()

    def _cancel(self, request_id: str) -> None:
        if (relayed := self._requests.get(request_id)) is None or relayed.cancelled:
            return
        relayed.cancelled = True
        if relayed.replica is not None:
            relayed.replica.send(messages.Cancel(relayed.placement.request_id))
        else:
            for queue in (self._waiting, self._suspects):
                if relayed in queue:
                    queue.remove(relayed)
            self._end(relayed, relayed.make_end())

    # Placement ---------------------------------------------------------------------------------------

    def _place(self, relayed: RelayedRequest) -> None:
        """Send a request to the replica that is expected to begin it first; where there is none, it waits."""
        if relayed.alone:
            self._suspects.append(relayed)
            self._isolate()
            return
        closed = {replica.number for replica in self.replicas if not replica.available}
        if self._isolated is not None and self._isolated.replica is not None:
            closed.add(self._isolated.replica.number)
        self._send(relayed, closed)

    def _send(self, relayed: RelayedRequest, closed: set[int]) -> None:
        request = relayed.resumption or relayed.request
        tokens = request.prompt.keyed((*request.prompt.items, *request.generated_prefix))
        tenant = request.prompt.key("" if self._share else request.tenant)
        blocks = hash_blocks(tokens, tenant) if request.reuse and tokens else ()
        name = f"{request.id}~{self._name}.{relayed.placed}"
        try:
            placement = self._placer.place(name, max(1, len(tokens) or request.input_tokens), blocks, closed)
        except EngineNotReady:
            self._waiting.append(relayed)
            return
        replica = next(each for each in self.replicas if each.number == placement.replica)
        relayed.placed += 1
        relayed.replica, relayed.placement, relayed.silent = replica, placement, True
        replica.requests[name] = relayed
        replica.send(messages.Submit(_replace(request, id=name)))

    def _isolate(self) -> None:
        """Give the next suspect a replica of its own; what runs there goes elsewhere, or waits."""
        available = [replica for replica in self.replicas if replica.available]
        if self._isolated is not None or not self._suspects or not available:
            return
        self._isolated = relayed = self._suspects.popleft()
        chosen = min(available, key=lambda replica: len(replica.requests))
        others = [each for each in chosen.requests.values() if not each.cancelled]
        self._withdraw(others, chosen)
        log.warning("request %s runs alone on replica %s", relayed.request.id, chosen.name)
        self._send(relayed, {each.number for each in self.replicas if each is not chosen})
        for other in others:
            self._place(other)

    def _release(self) -> None:
        """Let the replica of the isolated request, which has ended or is cleared, take others again."""
        self._isolated = None
        self._isolate()
        self._place_waiting()

    def _withdraw(self, relayed: Sequence[RelayedRequest], replica: RemoteReplica) -> None:
        """Take requests from their replica, to place them again."""
        for each in relayed:
            replica.send(messages.Cancel(each.placement.request_id))
            self._detach(each)
            each.resume()
        self.moved += len(relayed)

    def _detach(self, relayed: RelayedRequest) -> None:
        assert relayed.replica is not None
        relayed.replica.requests.pop(relayed.placement.request_id, None)
        self._placer.ended(relayed.placement)
        relayed.replica = None

    def _place_waiting(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for relayed in waiting:
            self._place(relayed)

    def _rebalance(self, joined: RemoteReplica) -> None:
        """Move requests that wait for a slot elsewhere to a replica that has joined."""
        for replica in self.replicas:
            excess = len(replica.requests) - replica.slots
            if replica is joined or excess <= 0:
                continue
            silent = [each for each in replica.requests.values() if each.silent and not each.cancelled]
            chosen = silent[-min(excess, joined.slots) :]
            self._withdraw(chosen, replica)
            for relayed in chosen:
                self._place(relayed)

    # Replicas ----------------------------------------------------------------------------------------

    def join(self, name: str, send: Callable[[msgspec.Struct], None]) -> RemoteReplica:
        """Add a replica that is connected. It is used when it has sent `Ready` and its load."""
        used = {replica.number for replica in self.replicas}
        replica = RemoteReplica(next(n for n in itertools.count() if n not in used), name, send)
        self.replicas.append(replica)
        return replica

    def receive(self, replica: RemoteReplica, message: FromReplica) -> None:
        match message:
            case messages.StepReport(outputs, stats, spent):
                for request_id, seconds in spent.items():
                    if (known := replica.requests.get(request_id)) is not None:
                        self._spent[known.request.id] += seconds
                self._process(replica, outputs)
                replica.stats = stats
                self._work = stats if self._work is None else add_work(self._work, stats)
            case ReplicaReport(gateways=gateways):
                joined, replica.load = not replica.available, message
                self._placer.report(replica.number, self._complete(message))
                if self._name in gateways:
                    self._placer.gateway = sorted(gateways).index(self._name)
                    self._placer.gateways = len(gateways)
                if joined and replica.available:
                    log.info("replica %s computes, %d slots", replica.name, replica.slots)
                    self._absent_since, self._given_up = None, False
                    self._isolate()
                    self._place_waiting()
                    self._rebalance(replica)
                    self._announce()
            case messages.Ready():
                replica.ready, replica.load = message, None
            case messages.Died(_, why):
                log.warning("the engine of replica %s died: %s", replica.name, why)
                replica.ready = replica.load = None
                self._move_all(replica, blame=True)
            case Draining():
                replica.draining = True
                self._announce()
            case messages.Inspection(call_id) | messages.CacheDone(call_id):
                if (metrics := self._calls.get(call_id)) is not None:
                    metrics.settle(replica, message)
                    self._settle_calls()
            case messages.Heartbeat():
                pass

    def _complete(self, report: ReplicaReport) -> ReplicaReport:
        """Expect a replica that has computed no prompt yet to be as fast as the others."""
        if report.speed.prefill_token_s:
            return report
        loads = (each.load for each in self.replicas if each.load is not None)
        known = [load.speed.prefill_token_s for load in loads if load.speed.prefill_token_s]
        expected = sum(known) / len(known) if known else DEFAULT_PREFILL_TOKEN_S
        return _replace(report, speed=_replace(report.speed, prefill_token_s=expected))

    def leave(self, replica: RemoteReplica, why: str) -> None:
        """Remove a replica that is gone; its requests go on elsewhere, without blame where it was to end."""
        log.warning("replica %s is gone: %s (%d requests go on)", replica.name, why, len(replica.requests))
        self.replicas.remove(replica)
        self._move_all(replica, blame=not replica.draining)

    def _move_all(self, replica: RemoteReplica, *, blame: bool) -> None:
        self._placer.remove(replica.number)
        replica.stats = messages.StepStats()
        moved = [*replica.requests.values()]
        replica.requests.clear()
        failed = [relayed for relayed in moved if blame and relayed.blame()]
        for relayed in moved:
            relayed.replica = None
        if self._isolated in moved:
            self._isolated = None
        for relayed in moved:
            if relayed.cancelled:
                self._end(relayed, relayed.make_end())
            elif relayed in failed:
                error = PoisonRequest("a replica died each time it computed this request")
                self._end(relayed, relayed.make_end(error))
            else:
                relayed.resume()
                self.moved += 1
                self._place(relayed)
        for metrics in self._calls.values():
            metrics.settle(replica)
        self._settle_calls()
        if self._isolated is None:
            self._release()
        self._announce()

    def _announce(self) -> None:
        """Report the replicas together as ready, or that there is none."""
        self.flush()
        if ready := [each.ready for each in self.replicas if each.available and each.ready is not None]:
            self._emit(merge_ready(ready))
        elif self._absent_since is None:
            self._absent_since = self._clock()
            why = f"{self._absent}; requests wait up to {self.WAIT_LIMIT_S:.0f} s for one"
            self._emit(messages.Unready(why))
        self._emit(self.report())

    def keep_limits(self) -> None:
        """Fail what has waited too long for a replica. Called every second or so."""
        if self._absent_since is None or self._clock() - self._absent_since < self.WAIT_LIMIT_S:
            return
        error = EngineNotReady(f"{self._absent}: `cllm cluster status` shows the cluster; try again later")
        waiting, self._waiting = [*self._waiting, *self._suspects], deque()
        self._suspects.clear()
        for relayed in waiting:
            self._end(relayed, relayed.make_end(error))
        self.flush()
        running = any(replica.requests for replica in self.replicas)  # where one drains
        if not (self._given_up or running):
            self._given_up = True
            self._emit(messages.Unready(error.message, given_up=True))

    def report(self) -> messages.ClusterReport:
        """Report the state of the replicas."""
        return messages.ClusterReport(tuple(replica.describe() for replica in self.replicas), self.moved)

    # Outputs -----------------------------------------------------------------------------------------

    def _process(self, replica: RemoteReplica, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if (relayed := replica.requests.get(output.request_id)) is None:  # it was withdrawn
                continue
            if relayed.silent:
                relayed.silent = False
                self._placer.first_token(relayed.placement)
            so_far = output.usage_so_far
            if output.tokens:
                replica.generated += len(output.tokens)
                relayed.add_tokens(output)
                if relayed.crashes and relayed.clear_by_progress() and relayed is self._isolated:
                    self._release()
            output = _replace(
                output,
                request_id=relayed.request.id,
                usage=None if output.usage is None else relayed.whole_usage(output.usage),
                usage_so_far=None if so_far is None else relayed.whole_usage(so_far),
            )
            if output.finish_reason is None:
                self._outputs.append(output)
            else:
                self._detach(relayed)
                self._end(relayed, output)

    def _end(self, relayed: RelayedRequest, output: RequestOutput) -> None:
        del self._requests[relayed.request.id]
        self._outputs.append(output)
        if relayed is self._isolated:
            self._release()

    def flush(self) -> None:
        """Report all outputs that came together as one."""
        if self._outputs or self._work is not None:
            outputs, self._outputs = tuple(self._outputs), []
            work, self._work = self._work or messages.StepStats(), None
            states = [replica.stats for replica in self.replicas]
            spent, self._spent = dict(self._spent), defaultdict(float)
            self._emit(messages.StepReport(outputs, add_states(work, states), spent))

    def _settle_calls(self) -> None:
        for call_id in [call_id for call_id, metrics in self._calls.items() if not metrics.left]:
            self._emit(self._calls.pop(call_id).answer())
