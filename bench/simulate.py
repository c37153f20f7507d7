"""`python -m bench.simulate`: the scheduler on recorded costs, with a clock that only these move.

The real engine core runs miniatures of the workloads on a runner without a model. A step takes what its shape
takes on a recorded machine (`bench/costs`), a KV transfer what its bytes take; nothing else takes time. So
every run is the same, and a policy can be judged for a machine that is not here. Beside the policy run fixed
rules: prefill chunks of one size, slots by least recent use.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, pairwise
from operator import attrgetter
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from bench.command import make_parser, run_command
from bench.costs import MachineCosts, read_costs, split_shape
from bench.report import Table
from bench.workloads import Definition, built_in, make_plan, read_file
from cllm.backend.base import KVState, StepResult
from cllm.config import GPU_BATCH_TOKENS, EngineConfig, settle_itl
from cllm.core.engine_core import EngineCore
from cllm.core.kv_cache.prefix_cache import PrefixCache, PrefixMatch
from cllm.core.kv_cache.tiers import SlotContent
from cllm.core.kv_cache.transfer import KVTransfer
from cllm.core.prefill_budget import PrefillBudget
from cllm.core.sequence import Sequence as Running
from cllm.errors import SetupError
from cllm.messages import Command, Report, StepReport, Stop, Submit
from cllm.types import Prompt, Request, SamplingParams, Usage
from tests.driver.fake_runner import FakeRunner

Turns = list[tuple[int, int]]
"""The new tokens of each turn, and those of its answer."""

CHUNKS = (16, 64, 128, 256, 512)
GPU_CHUNKS = (128, 256, 512, 1024, 2048)
WARM_UP = (32, 8)  # tokens of a prompt and its answer
CLIENT_S = 0.03  # at most, from the end of an answer to the next turn's arrival
# Fields of miniatures: as many users, fewer tokens.
MINIATURES: dict[str, dict[str, int]] = {
    "real": {},
    "agents": {"turns": 3},
    "chat": {"count": 12, "clients": 12, "turns": 2},
    "burst": {},
    "long": {"prompt_tokens": 480, "output_tokens": 40},
}
GPU_MINIATURES: dict[str, dict[str, int]] = {
    "gpu-agents": {"prefix_tokens": 1200, "turns": 3, "output_tokens": 24},
    "gpu-users": {"count": 128, "turns": 2, "output_tokens": 24},
    "gpu-burst": {"output_tokens": 24},
}


class SimulatedClock:
    """Stands for the module `time` in the engine core."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = time = perf_counter

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Replace `time` in every module of the core that reads it."""
        with ExitStack() as stack:
            for name, module in tuple(sys.modules.items()):
                if name.startswith("cllm.core.") and getattr(module, "time", None) is time:
                    stack.enter_context(patch.object(module, "time", self))
            yield


class SimulatedState(bytes):
    """A saved state that counts as large as the machine's."""

    size = 0

    def __len__(self) -> int:
        return self.size


class SimulatedRunner(FakeRunner):
    """Takes the time that the machine takes for steps and for moving KV memory."""

    def __init__(self, costs: MachineCosts, clock: SimulatedClock, *, slots: int, cells: int) -> None:
        tokens = GPU_BATCH_TOKENS if costs.asynchronous else EngineConfig().batch_tokens
        super().__init__(sequences=slots, cells=cells, batch_tokens=tokens)
        self._costs, self._step, self._clock = costs, costs.step, clock
        self.asynchronous = costs.asynchronous
        self.stream_copy_s = None if costs.stream_copy_ms is None else 1e-3 * costs.stream_copy_ms

    def collect(self) -> StepResult:
        assert self._submitted is not None
        shape = split_shape(self._submitted, self.limits.batch_tokens)
        seconds = self._step.seconds(shape)
        self._clock.now += seconds
        return super().collect()._replace(ubatches=shape.ubatches, compute_s=seconds)

    def _next_token(self, memory: Sequence[int], params: SamplingParams) -> int:
        return ord("a") + len(memory) % 26

    def _size(self, tokens: int) -> int:
        return tokens * self._costs.state_bytes

    def state_bytes(self, seq_id: int) -> int:
        return self._size(len(self.memory[seq_id]))

    def save(self, seq_id: int) -> bytes | None:
        state = SimulatedState(super().save(seq_id) or b"")
        state.size = self.state_bytes(seq_id)
        self._clock.now += self._costs.transfer_s(state.size)
        return state

    def restore(self, seq_id: int, state: KVState) -> bool:
        self._clock.now += self._costs.transfer_s(len(state))
        return super().restore(seq_id, state)

    def copy(self, source: int, target: int, length: int) -> int:
        """llama.cpp copies the whole KV stream."""
        stream_s = self._costs.transfer_s(self._size(self.limits.sequence_cells))
        self._clock.now += stream_s if self.stream_copy_s is None else self.stream_copy_s
        return super().copy(source, target, length)


class SimulatedInbox(SimpleQueue[Command]):
    """Lets time pass until the next request where the engine would wait for one."""

    wait: Callable[[], None]

    def get(self, block: bool = True, timeout: float | None = None) -> Command:
        if self.empty():
            self.wait()
        return super().get(block, timeout)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated run took."""

    seconds: float
    worst_gap_s: float  # between two tokens of a request
    cached_tokens: int
    prompt_tokens: int


@dataclass(slots=True)
class Users:
    """The users of a workload: each sends its next turn when its last is answered, with the whole history."""

    sessions: Iterator[Turns]
    users: int  # each has one session after another
    clock: SimulatedClock
    inbox: SimulatedInbox
    began_s: float | None = None  # after a small load, as `bench.run` has it before the first round
    outcome: Outcome = Outcome(0.0, 0.0, 0, 0)
    _numbers: Iterator[int] = field(default_factory=count)
    _due: list[tuple[float, int, Request]] = field(default_factory=list)
    _live: dict[str, tuple[list[int], Turns, list[float]]] = field(default_factory=dict)

    def warm_up(self, requests: int) -> None:
        self.inbox.wait = self.wait
        for _ in range(requests):
            self._ask([], [WARM_UP], 0.0)
        self.send()

    def send(self) -> None:
        """Hand in what is due."""
        while self._due and self._due[0][0] <= self.clock.now:
            self.inbox.put(Submit(heappop(self._due)[2]))

    def wait(self) -> None:
        """Nothing is computed until the next request comes."""
        self.clock.now = max(self.clock.now, self._due[0][0])
        self.send()

    def receive(self, report: Report) -> None:
        """The `emit` of the engine core."""
        assert isinstance(report, StepReport)
        for output in report.outputs:
            assert output.error is None, output.error
            history, turns, times = self._live[output.request_id]
            history += output.tokens
            times += [self.clock.now] * bool(output.tokens)
            if output.usage is not None:
                del self._live[output.request_id]
                if self.began_s is not None:
                    self._count(output.usage, times)
                    self._go_on(history, turns, CLIENT_S)
        if self.began_s is None and not self._live:
            self.began_s = self.clock.now
            for _ in range(self.users):
                self._go_on([], [], 0.0)
        self.send()
        if not self._live:
            self.inbox.put(Stop())

    def _count(self, usage: Usage, times: list[float]) -> None:
        so_far = self.outcome
        self.outcome = Outcome(
            self.clock.now - (self.began_s or 0.0),
            max([so_far.worst_gap_s, *(later - earlier for earlier, later in pairwise(times))]),
            so_far.cached_tokens + usage.cached_tokens,
            so_far.prompt_tokens + usage.prompt_tokens,
        )

    def _go_on(self, history: list[int], turns: Turns, after_s: float) -> None:
        """Ask the next turn, or the first of another session."""
        if turns:
            self._ask(history, turns, after_s)
        elif (others := next(self.sessions, None)) is not None:
            self._ask([], others, after_s)

    def _ask(self, history: list[int], turns: Turns, after_s: float) -> None:
        (new, output), *rest = turns
        number = next(self._numbers)
        prompt = [*history, *Random(number).choices(range(256), k=new)]
        self._live[str(number)] = (list(prompt), rest, [])
        request = Request(
            id=str(number),
            prompt=Prompt(tuple(prompt)),
            max_tokens=output,
            sampling=SamplingParams(temperature=0, ignore_eos=True),
        )
        due_s = self.clock.now + after_s * Random(-number).random()  # they come in any order
        heappush(self._due, (due_s, number, request))


@dataclass(frozen=True, slots=True)
class Rule:
    """What replaces a part of the policy; None and False leave it as it is."""

    chunk: int | None = None  # prefill tokens beside decoding rows, whatever they cost
    least_recent: bool = False  # slots by use alone: none is moved

    @property
    def name(self) -> str:
        chunk = "policy" if self.chunk is None else f"chunk {self.chunk}"
        return chunk + ", LRU slots" * self.least_recent

    def apply(self, core: EngineCore) -> None:
        budget, cache = core.scheduler.budget, core.scheduler.prefix_cache
        if self.chunk is not None:
            replaced: Any = budget
            replaced.schedule_tokens = FixedChunk(budget, self.chunk)
        if self.least_recent:
            replaced = cache
            replaced.choose_slot = LeastRecentSlot(cache, core.scheduler.transfer)
            replaced.slots.tidy = lambda running: None


@dataclass(frozen=True, slots=True)
class FixedChunk:
    """Prompts get `chunk` tokens a step, the oldest first; a whole batch where no sequence decodes."""

    budget: PrefillBudget
    chunk: int

    def __call__(self, running: Iterable[Running], urgency: Callable[[Running], int]) -> dict[str, int]:
        sequences = sorted(running, key=attrgetter("arrival"))
        shares = {sequence.id: 1 for sequence in sequences if sequence.pending == 1}
        room = self.budget.batch_tokens - len(shares)
        if shares:  # the first token of a chunk is computed along with the decoding rows
            room = min(room, self.chunk + 1)
        for sequence in sequences:
            if sequence.pending > 1 and room > 0:
                shares[sequence.id] = min(sequence.computable, room)
                room -= shares[sequence.id]
        return shares


@dataclass(frozen=True, slots=True)
class LeastRecentSlot:
    """The slot that holds the prefix, an empty one, or the one that was used least recently."""

    cache: PrefixCache
    transfer: KVTransfer

    def __call__(
        self, sequence: Running, match: PrefixMatch | None, running: Mapping[int, Running]
    ) -> tuple[int, PrefixMatch | None]:
        device = self.cache.device
        if match is not None and isinstance(match.origin, SlotContent):
            device.remove(match.origin)
            return match.origin.seq_id, match
        if empty := device.pool.free - device.by_slot.keys():
            return min(empty), match
        victim = next(iter(device.entries))
        self.transfer.offload(victim, others=bool(running))
        device.clear(victim)
        return victim.seq_id, match


def get_workloads(costs: MachineCosts) -> list[Definition]:
    """The miniatures for a machine: those of a GPU have more users and longer prompts."""
    folder = Path(__file__).parent / "gpu" / "workloads"
    known = built_in()
    small = GPU_MINIATURES if costs.asynchronous else MINIATURES
    return [_miniature(known.get(name) or read_file(folder / f"{name}.toml"), small[name]) for name in small]


def _miniature(definition: Definition, fields: Mapping[str, int]) -> Definition:
    groups = tuple(replace(group, **fields) for group in definition.groups)
    return replace(definition, groups=groups, text="words")  # only the number of words counts


def simulate(costs: MachineCosts, definition: Definition, rule: Rule | None = None) -> Outcome:
    """Run a workload of one group to its end."""
    (group,) = make_plan(definition, 1).groups
    sessions = (
        [(len(turn.prompt.split()), turn.max_tokens) for turn in session.turns] for session in group.sessions
    )
    clock = SimulatedClock()
    runner = SimulatedRunner(costs, clock, slots=definition.parallel, cells=definition.ctx_size)
    config = settle_itl(EngineConfig(draft_tokens=0, cache_disk_mb=0), on_gpus=costs.asynchronous)
    users = Users(sessions, group.clients, clock, SimulatedInbox())
    with clock.patched():
        core = EngineCore(runner, config, users.receive)
        core.inbox = users.inbox
        (rule or Rule()).apply(core)
        users.warm_up(definition.parallel)
        core.run()
    return users.outcome


def get_rules(costs: MachineCosts) -> list[Rule]:
    """The fixed rules: each size of a chunk, with slots by the policy and by least recent use."""
    chunks = GPU_CHUNKS if costs.asynchronous else CHUNKS
    return [Rule(chunk, least_recent) for least_recent in (False, True) for chunk in chunks]


@dataclass(frozen=True, slots=True)
class Judgement:
    """The policy beside all fixed rules, on one machine and workload."""

    policy: Outcome
    fixed: dict[Rule, Outcome]

    @classmethod
    def of(cls, costs: MachineCosts, definition: Definition, rules: Iterable[Rule]) -> Judgement:
        return cls(simulate(costs, definition), {rule: simulate(costs, definition, rule) for rule in rules})

    @property
    def best(self) -> Rule:
        return min(self.fixed, key=lambda rule: self.fixed[rule].seconds)

    @property
    def ratio(self) -> float:
        """The policy's time over that of the best fixed rule."""
        return self.policy.seconds / self.fixed[self.best].seconds


def run(costs: list[str], workload: list[str], rules: bool) -> int:
    known = read_costs()
    for name in costs:
        if name not in known:
            raise SetupError(f"no recorded costs {name!r}: there are {', '.join(known)}")
    rows = []
    for name in costs or known:
        for definition in get_workloads(known[name]):
            if workload and definition.name not in workload:
                continue
            found = Judgement.of(known[name], definition, get_rules(known[name]))
            best = found.fixed[found.best]
            shown = {"policy": found.policy, f"best: {found.best.name}": best}
            if rules:
                shown = {"policy": found.policy, **{rule.name: each for rule, each in found.fixed.items()}}
            for label, each in shown.items():
                relative = each.seconds / best.seconds
                cached = f"{each.cached_tokens} of {each.prompt_tokens}"
                figures = (f"{relative:.3f}", f"{each.seconds:.2f}", f"{each.worst_gap_s:.2f}", cached)
                rows.append((name, definition.name, label, *figures))
    if not rows:
        raise SetupError("no such workload: --workload takes " + ", ".join((*MINIATURES, *GPU_MINIATURES)))
    columns = ("costs", "workload", "rule", "time / best fixed", "s", "worst gap, s", "cached tokens")
    print(Table(columns, rows).markdown())
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(
        "bench.simulate",
        "Judge the scheduler's policy on recorded costs, beside fixed rules.",
        costs=([], "recorded costs by name, of all without it"),
        workload=([], "miniature by name, all without it"),
        rules=(False, "show every fixed rule"),
    )
    return run_command(parser, arguments, run)


if __name__ == "__main__":
    sys.exit(main())
