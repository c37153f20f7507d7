"""The engine core on the test's own thread, one step at a time, with its invariants checked after each."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty
from typing import Any

import numpy as np

from cllm.adapters import Adapter, join_key, make_salt
from cllm.backend.base import Drafter, ModelRunner
from cllm.config import EngineConfig
from cllm.core.engine_core import EngineCore
from cllm.core.kv_cache.prefix_cache import PrefixCache
from cllm.core.kv_cache.prefix_index import CachedPrefix
from cllm.core.kv_cache.tiers import HostKVCache
from cllm.core.preparation import Preparation
from cllm.core.sequence import Rows
from cllm.core.spec_decode import SpecDecodePolicy
from cllm.core.step_cost import StepCostModel
from cllm.errors import EngineDied
from cllm.messages import (
    CacheDone,
    Cancel,
    ClearCache,
    LoadAdapter,
    Report,
    StepReport,
    StepStats,
    Submit,
    UseSlot,
)
from cllm.testing.scripted import make_vector
from cllm.types import FinishReason, Prompt, Request, RequestOutput, SamplingParams, TokenLogprob, Usage
from tests.driver.fake_runner import TOKEN_BITS, FakeRunner, expected_text, mark
from tests.driver.runner import CheckedRunner

Tokens = tuple[int, ...]


@dataclass
class Answer:
    """Everything that one request received."""

    text: str = ""
    tokens: Tokens = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embeddings: tuple[bytes, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error_code: str | None = None
    error_message: str = ""
    ids: set[int] = field(default_factory=set)  # slots it was computed in

    def take(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, "one terminal event: nothing comes after it"
        self.text += output.text
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.embeddings += output.embeddings
        self.finish_reason = output.finish_reason
        self.usage = output.usage
        if output.error is not None:
            self.error_code, self.error_message = output.error.code, output.error.message

    @property
    def work(self) -> Usage:
        assert self.usage is not None
        return self.usage

    @property
    def recomputed(self) -> int:
        """Tokens that went through the model a second time."""
        return self.work.decoded_tokens + self.work.cached_tokens - self.work.cells


class InlineExecutor(Executor):
    """Calls at once, on the caller's thread."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments, **named))
        except Exception as error:
            future.set_exception(error)
        return future


prepare_at_once = partial(Preparation, new_executor=lambda _: InlineExecutor())


class StepDriver:
    """An `EngineCore` that runs only when a test says `step`, `run` or `finish`.

    The runner may be any; a `CheckedRunner` is put around it. `settings` are fields of `EngineConfig`.
    On a `FakeRunner` the driver also knows what each slot must hold and what each text must be.
    Unless it `learns`, no measurement decides what pays or how much is computed at once: the machine that
    runs the tests may be busy.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        swap_space_mb: int = 64,
        cache_mb: int = 0,
        new_drafter: Callable[[], Drafter] | None = None,
        cost: StepCostModel | None = None,
        learns: bool = False,
        **settings: Any,
    ) -> None:
        self.runner = runner if isinstance(runner, CheckedRunner) else CheckedRunner(runner)
        settings = {"prefix_cache": cache_mb > 0, **settings}
        config = EngineConfig(threads=1, swap_space_mb=swap_space_mb, cache_ram_mb=cache_mb, **settings)
        room = max(0, runner.limits.batch_tokens - runner.limits.sequences)
        room = min(room, runner.limits.rollback_tokens or room)
        drafts = new_drafter and eager_drafts(new_drafter, min(config.draft_tokens, room))
        self.core = EngineCore(
            self.runner, config, self._take, cost=cost, spec_decode=drafts, preparation=prepare_at_once
        )
        self.scheduler = self.core.scheduler
        if cost is None:
            self.scheduler.budget.cost.frozen = not learns
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, Answer] = {}
        self.stats: list[StepStats] = []
        self.cache_answers: list[CacheDone] = []
        self.died = False
        self.filled: set[int] = set()  # slots that the test itself put tokens into
        self.follows = False  # batches may be submitted ahead, as by an engine with a GPU
        self.followed = 0  # that were
        self.kv_runs_out = False  # NO_ROOM is simulated: a lone request may end early, with `length`

    # Requests ---------------------------------------------------------------------------------------

    def land(self) -> None:
        """Commands are handled only while nothing is submitted."""
        if self.core._ahead is not None:
            self.step(land=True)

    def submit(self, *requests: Request) -> None:
        self.land()
        for request in requests:
            self.requests[request.id] = request
            self.answers[request.id] = Answer()
            self.core._handle(Submit(request))

    def enqueue(self, *requests: Request) -> None:
        """Put requests into the inbox, for a test that runs `core.run` itself."""
        for request in requests:
            self.requests[request.id] = request
            self.answers[request.id] = Answer()
            self.core.inbox.put(Submit(request))

    def add(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> str:
        """Submit a prompt with the next name: `r0`, `r1`, …; `fields` of the request or of its sampling."""
        sampling = {name: fields.pop(name) for name in ("seed", "ignore_eos") if name in fields}
        adapter = {name: fields.pop(name) for name in ("adapter", "adapter_from") if name in fields}
        name = f"r{len(self.requests)}"
        self.submit(
            Request(
                id=name,
                prompt=Prompt(tuple(prompt), **adapter),
                max_tokens=max_tokens,
                sampling=SamplingParams(**sampling),
                **fields,
            )
        )
        return name

    def load_adapter(self, name: str, scale: float = 1.0) -> str:
        """Load an adapter on the fake, and return the key of the set that is it alone."""
        self.land()
        self.core._handle(LoadAdapter(0, Adapter(name=name, file=f"{name}.gguf")))
        return join_key([(self.runner.check_adapter(Adapter(name=name, file=f"{name}.gguf")).digest, scale)])

    def add_media(self, prompt: Prompt, media: Mapping[str, Rows], max_tokens: int, **fields: Any) -> str:
        """Submit a prompt with the rows of its pictures, with the next name."""
        self.land()
        name = f"r{len(self.requests)}"
        rows = {media: values.tobytes() for media, values in media.items()}
        request = Request(id=name, prompt=prompt, max_tokens=max_tokens, media=rows, **fields)
        self.requests[name], self.answers[name] = request, Answer()
        self.scheduler.add(request)
        return name

    def embed(self, *inputs: Sequence[int], tenant: str = "") -> str:
        """Submit inputs to embed, with the next name."""
        return self.add((), 0, embed=tuple(map(tuple, inputs)), tenant=tenant)

    def cancel(self, name: str) -> None:
        self.land()
        self.core._handle(Cancel(name))

    def _take(self, report: Report) -> None:
        if isinstance(report, StepReport):
            self.stats.append(report.stats)
            for output in report.outputs:
                self.answers[output.request_id].take(output)
        elif isinstance(report, CacheDone):
            self.cache_answers.append(report)

    # Steps ------------------------------------------------------------------------------------------

    def step(self, count: int = 1, *, land: bool = False) -> None:
        """Some steps; the invariants hold after each. A dying engine raises, with every request ended.

        While a batch is submitted ahead its tokens are in memory before they are counted.
        """
        follow = self.follows and not land
        for _ in range(count):
            try:
                self.core.step(follow=follow)
            except EngineDied as error:
                self.died = True
                self._end_all(error)
                self.check_invariants()
                raise
            if self.core._ahead is None:
                self.check_invariants()
            else:
                self.followed += 1

    def run(self, max_steps: int = 20_000) -> None:
        """Step until nothing is left to do, or the engine died."""
        with suppress(EngineDied):
            for _ in range(max_steps):
                if self.died:
                    return
                self.step()  # once at least: it brings the outputs of cancelled requests, too
                if self.core.idle:
                    break
        assert self.died or self.core.idle, f"not idle after {max_steps} steps"

    def finish(self, max_steps: int = 20_000) -> dict[str, Answer]:
        """Step until every request is answered; then nothing is left. An engine that dies raises."""
        for _ in range(max_steps):
            self._wait_for_disk()
            self.step()
            if self.core.idle:
                break
        assert self.core.idle, f"not idle after {max_steps} steps"
        self.check_idle()
        return self.answers

    def offload(self) -> None:
        """Evict what free slots hold, to RAM where that pays: as other requests would, and nothing waits."""
        while self.prefix_cache.slots.evict_one(others=False):
            self.check_invariants()

    def _wait_for_disk(self) -> None:
        """Sleep while every request waits for its prefix to be read, as the loop does."""
        if not self.core.has_work and (limit_s := self.scheduler.loading_s) is not None:
            with suppress(Empty):
                self.core.inbox.get(timeout=limit_s)

    def use_cache(self, command: ClearCache | UseSlot) -> CacheDone:
        """Send a command to the cache, and wait for its answer as the loop does."""
        self.land()
        self.core._handle(command)
        while self.core.cache_calls.calls:
            self.core.inbox.get(timeout=60)
            self.core.cache_calls.advance()
        self.check_invariants()
        return self.cache_answers[-1]

    def close_disk(self) -> None:
        """Write what is cached to disk, as at the end of the loop."""
        self.core.disk.close(self.prefix_cache.loader.candidates(), within_s=60)

    # Answers ----------------------------------------------------------------------------------------

    def outcome(self, name: str) -> FinishReason:
        reason = self.answers[name].finish_reason
        assert reason is not None, f"{name} has no terminal event"
        return reason

    def usage(self, name: str) -> Usage:
        return self.answers[name].work

    def text(self, name: str) -> str:
        return self.answers[name].text

    @property
    def fake(self) -> FakeRunner:
        """The fake runner inside."""
        assert isinstance(self.runner.inner, FakeRunner)
        return self.runner.inner

    def expected(self, name: str) -> str:
        """The whole text of a request, as the fake's model gives it."""
        request = self.requests[name]
        limit = min(request.max_tokens, self.fake.limits.request_tokens - len(request.prompt))
        ends = not request.sampling.ignore_eos
        prompt = request.prompt
        adapter: dict[str, Any] = {"adapter": prompt.adapter, "adapter_from": prompt.adapter_from}
        return expected_text(prompt.items, limit, request.sampling.seed or 0, ends=ends, **adapter)

    # Checks -----------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """What holds after every step."""
        pool, running = self.scheduler.pool, self.scheduler.running
        # Slots: each is held once, by a running request; the rest are free, or retired for ever.
        assert pool.held.keys() == running.keys()
        assert len(pool.held) + len(pool.free) + len(pool.retired) == pool.size
        for seq_id, lease in pool.held.items():
            assert (lease.seq_id, lease.request_id) == (seq_id, running[seq_id].id)
            self.answers[lease.request_id].ids.add(seq_id)
        # KV accounting in host RAM: no budget is exceeded.
        host = self.host_cache
        assert host.cached_bytes <= host.cached_limit and host.swapped_bytes <= host.swap_limit
        assert host.cached_bytes + host.swapped_bytes <= host.limit
        assert host.cached_bytes == sum(entry.size for entry in host.entries)
        spans = (span for request in self.requests.values() for span in request.prompt.spans)
        grids = any(span.columns for span in spans)  # their cells share a position, which is what is known
        if self.runner.limits.unified and not pool.retired and not self.filled and not grids:
            cells = sum(self.prefix_cache.count_cells(running.values()))
            assert cells == self.runner.cells_used, "each cell is counted once"
        if isinstance(self.runner.inner, FakeRunner):
            self._check_memory(self.runner.inner)

    def _check_memory(self, fake: FakeRunner) -> None:
        """A free slot holds what is cached there, a leased one only its own tokens; states are of theirs."""
        for seq_id, memory in enumerate(fake.memory):
            if (lease := self.scheduler.pool.held.get(seq_id)) is not None:
                request, answer = self.requests[lease.request_id], self.answers[lease.request_id]
                known = [*request.prompt.items, *request.generated_prefix, *answer.tokens]
                begin, added = request.prompt.adapter_from, mark(request.prompt.adapter)
                computed = [*known[:begin], *(token | added for token in known[begin:])]
                assert memory == computed[: len(memory)]
            elif seq_id not in self.scheduler.pool.retired | self.filled:
                content = self.prefix_cache.device.by_slot.get(seq_id)
                assert memory == ([] if content is None else self._memory_of(content))
        for entry in self.host_cache.entries:
            assert entry.state == np.array(self._memory_of(entry), np.int32).tobytes()

    def _memory_of(self, prefix: CachedPrefix) -> list[int]:
        """What the fake's memory held: tokens, marked with the adapters that they were computed with."""
        adapter = prefix.tenant.partition("\0")[2]
        salts = {
            make_salt(request.prompt.adapter): request.prompt.adapter for request in self.requests.values()
        }

        def unsalt(token: int) -> int:
            found = [salt for salt in salts if 0 <= token ^ salt < 1 << TOKEN_BITS] if token >> 30 else []
            return token ^ found[0] | mark(salts[found[0]]) if found else token | mark(adapter)

        return [unsalt(token) for token in prefix.tokens]

    def check_idle(self) -> None:
        """Nothing is left, and every request has its terminal event."""
        self.check_released()
        assert all(answer.finish_reason is not None for answer in self.answers.values())

    def check_released(self) -> None:
        """Nothing is left: no lease, no cell in use, no sampler. What is cached is what the memory holds."""
        self.scheduler.check_idle()
        assert self.core.idle and not self.scheduler.pool.retired
        assert self.runner.open_samplers == 0
        if isinstance(self.runner.inner, FakeRunner):
            assert self.runner.inner.embedding_memory == []

    def check_end(self) -> None:
        """On the fake, after failures: one terminal event each, right texts, and nothing is left."""
        for name in self.requests:
            self.check_answer(name)
        assert self.runner.open_samplers == 0
        if not self.died and not self.scheduler.pool.retired:
            self.fake.fail = None
            self.check_idle()

    def check_answer(self, name: str) -> None:
        """On the fake: a request that ended well has the right text, any other a prefix of it."""
        reason, request, answer = self.outcome(name), self.requests[name], self.answers[name]
        if request.embed:
            if reason is FinishReason.STOP:
                assert answer.embeddings == tuple(map(make_vector, request.embed))
                assert answer.work.prompt_tokens == sum(map(len, request.embed))
            else:
                assert reason in (FinishReason.CANCELLED, FinishReason.ERROR) and answer.embeddings == ()
        elif reason is FinishReason.STOP or (reason is FinishReason.LENGTH and not self.kv_runs_out):
            assert answer.text == self.expected(name), name
        else:
            assert self.expected(name).startswith(answer.text), name

    # Internals of the core: nothing else here reaches deeper than `scheduler.pool` ----------------------

    @property
    def prefix_cache(self) -> PrefixCache:
        return self.scheduler.prefix_cache

    @property
    def host_cache(self) -> HostKVCache:
        """The tier of the KV cache in host RAM."""
        return self.prefix_cache.host

    def _end_all(self, error: EngineDied) -> None:
        """As a client does when the engine dies and is not replaced."""
        self.scheduler.fail_all(error)
        self.core.embedding.fail_all(error)
        for output in (*self.scheduler.take_outputs(), *self.core.embedding.outputs):
            self.answers[output.request_id].take(output)


def eager_drafts(new_drafter: Callable[[], Drafter], max_tokens: int) -> SpecDecodePolicy:
    """Drafts that are submitted at once, without having come true before."""
    policy = SpecDecodePolicy(max_tokens, new_drafter)
    policy.NGRAM_ACCEPTANCE = 0.9
    return policy


def ask(
    name: str, prompt: Sequence[int], max_tokens: int = 8, *, logprobs: int = 2, **sampling: Any
) -> Request:
    """A greedy request, unless `sampling` says otherwise."""
    params = SamplingParams(**{"temperature": 0, **sampling})
    return Request(
        id=name, prompt=Prompt(tuple(prompt)), max_tokens=max_tokens, sampling=params, logprobs=logprobs
    )


def words(seed: int, length: int) -> Tokens:
    """A prompt of `length` tokens, the same for the same seed."""
    source = random.Random(seed)
    return tuple(source.randrange(32, 127) for _ in range(length))
