"""The simulation: gateways place requests on replicas, of which some die and come back."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from bench.cluster.policies import POLICIES, Expected, Policy
from bench.cluster.replica import Job, ReplicaSize, SimulatedReplica, StepCosts
from bench.cluster.trace import TraceRequest
from bench.figures import percentile

REPORT_S = 2.0  # between two reports of a replica
RETURN_S = 10.0  # from a replica's death to its return, with an empty cache
NOTICE_S = 0.01  # until its gateways know

# An 8B model on one GPU, about: 2,200 prompt tokens a second, 128 KB of KV a token over 20 GB/s.
COSTS = StepCosts(base=0.012, prefill_token=4e-4, row=2e-4, attended=6e-9, restore_token=6.4e-6)


SIZE = ReplicaSize()


class Event(Enum):
    ARRIVAL = 0
    STEP = 1
    REPORT = 2
    KILL = 3
    RETURN = 4
    MOVE = 5


@dataclass(frozen=True, slots=True)
class Setup:
    """One run."""

    policy: str
    replicas: int = 100
    gateways: int = 1
    speeds: Sequence[float] = (1.0,)  # in turn
    kills: int = 0
    seed: int = 1
    costs: StepCosts = COSTS
    size: ReplicaSize = SIZE


@dataclass(slots=True)
class Result:
    """What the requests saw."""

    first_s: list[float] = field(default_factory=list)
    lost: int = 0
    moved: int = 0
    reused: float = 0.0  # of all prompt tokens
    decision_s: list[float] = field(default_factory=list)
    took_s: float = 0.0  # of one core

    @property
    def p95_s(self) -> float:
        return percentile(self.first_s, 95)


class Simulation:
    """Runs a trace through one setup."""

    def __init__(self, setup: Setup, trace: Sequence[TraceRequest]) -> None:
        self._setup = setup
        speeds = setup.speeds
        self._all = [
            SimulatedReplica(number, setup.costs, setup.size, speeds[number % len(speeds)])
            for number in range(setup.replicas)
        ]
        self._alive = {replica.number: replica for replica in self._all}
        self._gateways: list[Policy] = [
            POLICIES[setup.policy](self._alive, setup.seed + number, number, setup.gateways)
            for number in range(setup.gateways)
        ]
        self.jobs = [Job(request, number % setup.gateways) for number, request in enumerate(trace)]
        self._open = len(self.jobs)
        self._events: list[tuple[float, int, Event, object]] = []
        self._count = 0
        for job in self.jobs:
            self._at(job.trace.at_s, Event.ARRIVAL, job)
        hears = any(type(gateway).report is not Policy.report for gateway in self._gateways)
        for replica in self._all if hears else ():
            self._at(REPORT_S * (1 + replica.number / len(self._all)), Event.REPORT, replica)
        end_s = self.jobs[-1].trace.at_s
        for number in range(setup.kills):
            victim = self._all[(7 * number + 3) % len(self._all)]
            self._at(end_s * (number + 1) / (setup.kills + 1), Event.KILL, victim)

    def _at(self, when: float, event: Event, what: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, event, what))

    def run(self) -> Result:
        began = time.process_time()
        while self._open and self._events:
            now, _, event, what = heapq.heappop(self._events)
            self._handle(now, event, what)
        result = Result(took_s=time.process_time() - began)
        for job in self.jobs:
            if job.first_s is None or job.ended_s is None or job.left:
                result.lost += 1
            else:
                result.first_s.append(job.first_s - job.trace.at_s)
            result.moved += job.moved
        computed, reused = (sum(getattr(each, name) for each in self._all) for name in ("computed", "reused"))
        result.reused = reused / max(1, computed + reused)
        for gateway in self._gateways:
            if isinstance(gateway, Expected):
                result.decision_s += gateway.took_s
        return result

    def _handle(self, now: float, event: Event, what: object) -> None:
        match event, what:
            case Event.ARRIVAL | Event.MOVE, Job() as job:
                self._place(job, now)
            case Event.STEP, (SimulatedReplica() as replica, version):
                if version == replica.version:
                    self._step(replica, now)
            case Event.REPORT, SimulatedReplica() as replica:
                if replica.alive:
                    report = replica.report()
                    for gateway in self._gateways:
                        gateway.report(replica.number, report)
                self._at(now + REPORT_S, Event.REPORT, replica)
            case Event.KILL, SimulatedReplica() as replica:
                self._kill(replica, now)
            case Event.RETURN, SimulatedReplica() as replica:
                replica.alive = True
                self._alive[replica.number] = replica
                for gateway in self._gateways:
                    gateway.report(replica.number, replica.report())

    def _place(self, job: Job, now: float) -> None:
        replica = self._alive[self._gateways[job.gateway].place(job)]
        self._schedule(replica, replica.submit(job, now))

    def _schedule(self, replica: SimulatedReplica, end: float | None) -> None:
        if end is not None:
            self._at(end, Event.STEP, (replica, replica.version))

    def _step(self, replica: SimulatedReplica, now: float) -> None:
        end, following = replica.finish(now)
        for job in end.begun:
            job.first_s = job.first_s or now
            self._gateways[job.gateway].begun(job)
        for job in end.ended:
            job.ended_s = now
            self._open -= 1
            self._gateways[job.gateway].ended(job)
        self._schedule(replica, following)

    def _kill(self, replica: SimulatedReplica, now: float) -> None:
        """Its requests go on elsewhere, with what they have said."""
        if len(self._alive) < 2 or not replica.alive:
            return
        del self._alive[replica.number]
        for job in replica.die():
            self._at(now + NOTICE_S, Event.MOVE, job)
        for gateway in self._gateways:
            gateway.died(replica.number)
        self._at(now + RETURN_S, Event.RETURN, replica)
