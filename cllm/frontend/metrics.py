"""What Prometheus sees. One registry per engine, no module globals."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from cllm.errors import CllmError
from cllm.frontend.request_queue import RequestQueue, RequestState
from cllm.types import Limits, RequestOutput
from cllm.workers.messages import StepStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class EngineMetrics:
    """Counters and histograms of one engine, updated once per step or per request; per token only gaps."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"cllm_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"cllm_{name}", text, registry=self.registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"cllm_{name}", text, buckets=_SECONDS, registry=self.registry)

        self.accepted = counter("requests_accepted", "Requests taken into the queue")
        self.finished = counter("requests_finished", "Requests ended, by outcome", "outcome")
        self.refused = counter("requests_refused", "Requests refused before the queue, by reason", "reason")
        self.failed = counter(
            "requests_failed", "Accepted requests that ended with an error, by reason", "reason"
        )
        self.deadlines = counter(
            "deadlines_exceeded", "Requests whose time was up, by where they were", "place"
        )
        self.slow_readers = counter("slow_readers", "Streams ended because their client did not read")
        self.queue = gauge("queue_requests", "Requests waiting in the parent")
        self.queue_tokens = gauge("queue_tokens", "Prompt tokens waiting in the parent")
        self.interrupted = gauge(
            "steps_interrupted", "Steps ended early since the engine started: their client left"
        )
        self.running = gauge("running_requests", "Requests being computed")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests")
        self.generated_tokens = counter("generated_tokens", "Tokens generated")
        self.decoded_tokens = counter("decoded_tokens", "Tokens that went through the model")
        self.drafted_tokens = counter("drafted_tokens", "Tokens guessed ahead, of finished requests")
        self.accepted_tokens = counter("accepted_tokens", "Tokens guessed ahead that were right")
        self.time_to_first_token = histogram("time_to_first_token_seconds", "From arrival to first token")
        self.inter_token = PlainHistogram(
            "cllm_inter_token_seconds", "Between two deltas of one request", _SECONDS, self.registry
        )
        self.queue_time = histogram("queue_seconds", "From arrival to the engine")
        self.request_time = histogram("request_seconds", "From arrival to the end")
        self.kv_cells_used = gauge("kv_cells_used", "KV cells in use")
        self.kv_cells_total = gauge("kv_cells_total", "KV cells in all")
        self.leases = gauge("sequence_leases", "Sequence ids leased")
        self.restarts = counter("engine_restarts", "Engine processes started after a death")
        self.integrity_failures = gauge("integrity_failures", "Idle checks that found something left over")
        self.steps = counter("steps", "Native decode calls")
        self.step_seconds = counter("step_seconds", "Time in steps, Python included")
        self.compute_seconds = counter("step_compute_seconds", "Time in native decode")
        self.sample_seconds = counter("step_sample_seconds", "Time choosing tokens")
        self.move_seconds = counter("kv_move_seconds", "Time moving KV memory to RAM and back")
        self.prefix_hits = counter("prefix_hits", "Requests that began with a prefix computed before")
        self.prefix_tokens = counter("prefix_tokens", "Tokens taken over instead of computed")
        self.prefix_saves = counter("prefix_saves", "PrefixCache put into RAM")
        self.prefix_evictions = counter("prefix_evictions", "PrefixCache pushed out of RAM")
        self.prefix_bytes = gauge("prefix_ram_bytes", "RAM held by computed prefixes")
        self.swapped_bytes = gauge("parked_ram_bytes", "RAM held by the state of parked requests")
        self.preemptions = counter("preemptions", "Requests parked because KV was full")
        self.swap_ins = counter("swap_ins", "Parked requests that went on from their saved state")
        self.memory = Gauge(
            "cllm_memory_bytes", "Memory by part; buffers are an estimate", ("part",), registry=self.registry
        )
        self._ram_tier = self.memory.labels("ram_tier")
        self.state_file_failures = counter("state_file_failures", "State files not written, or not read")
        self.ready = gauge("ready", "1 when requests are computed")
        self._last = StepStats()
        self._counters = (
            ("steps", self.steps),
            ("step_s", self.step_seconds),
            ("compute_s", self.compute_seconds),
            ("sample_s", self.sample_seconds),
            ("transfer_s", self.move_seconds),
            ("tokens", self.decoded_tokens),
            ("prefix_hits", self.prefix_hits),
            ("prefix_tokens", self.prefix_tokens),
            ("prefix_saves", self.prefix_saves),
            ("prefix_evictions", self.prefix_evictions),
            ("preemptions", self.preemptions),
            ("swap_ins", self.swap_ins),
        )
        self._gauges = (
            ("running", self.running),
            ("leases", self.leases),
            ("cells_used", self.kv_cells_used),
            ("interrupted", self.interrupted),
            ("integrity_failures", self.integrity_failures),
            ("prefix_bytes", self.prefix_bytes),
            ("swapped_bytes", self.swapped_bytes),
        )

    def loaded(self, limits: Limits, memory: dict[str, int]) -> None:
        for part, size in memory.items():
            self.memory.labels(part).set(size)
        self.kv_cells_total.set(limits.cells)
        self.ready.set(1)

    def take_over(self, newer: EngineMetrics) -> None:
        """Another engine takes this one's place: what it holds, in our account."""
        for sample in next(iter(newer.memory.collect())).samples:
            self.memory.labels(sample.labels["part"]).set(sample.value)
        self.kv_cells_total.set(newer.registry.get_sample_value("cllm_kv_cells_total") or 0)
        self.ready.set(1)

    def step(self, stats: StepStats) -> None:
        """Take in what a step did. Most of it is nothing new, and told nobody."""
        last, self._last = self._last, stats
        for field, count in self._counters:
            if value := getattr(stats, field):
                count.inc(value)
        for field, show in self._gauges:
            if (value := getattr(stats, field)) != getattr(last, field):
                show.set(value)
        self._ram_tier.set(stats.prefix_bytes + stats.swapped_bytes)

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Counts what is raised inside."""
        try:
            yield
        except CllmError as error:
            self.refused.labels(error.code).inc()
            raise

    def queued(self, admission: RequestQueue) -> None:
        self.queue.set(admission.waiting_count)
        self.queue_tokens.set(admission.waiting_tokens)

    def delta(self, ticket: RequestState, delta: RequestOutput, now: float) -> None:
        """Token times, as the parent sees them: the clients' view, not the engine's."""
        if not delta.tokens:
            return
        if ticket.last_token is None:
            self.time_to_first_token.observe(now - ticket.arrived)
        else:
            self.inter_token.observe(now - ticket.last_token)

    def closed(self, ticket: RequestState, delta: RequestOutput) -> None:
        assert delta.finish_reason is not None
        self.finished.labels(delta.finish_reason.value).inc()
        if delta.error is not None:
            self.failed.labels(delta.error.code).inc()
        self.request_time.observe(time.monotonic() - ticket.arrived)
        if delta.usage is not None:
            self.prompt_tokens.inc(delta.usage.prompt_tokens)
            self.drafted_tokens.inc(delta.usage.drafted_tokens)
            self.accepted_tokens.inc(delta.usage.accepted_tokens)

    def gone(self) -> None:
        """The engine is dead: nothing runs, nothing is held."""
        self._last = StepStats()
        for _, gauge in (*self._gauges, ("", self.ready)):
            gauge.set(0)
        for part in ("model", "kv", "buffers", "ram_tier"):
            self.memory.labels(part).set(0)

    def render(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


class PlainHistogram(Collector):
    """Counts by upper bound. No lock: one thread at a time observes."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)  # the last is beyond every bound
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Cumulative, as the exposition format has it."""
        buckets: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*map(float, self._bounds), float("inf")), tuple(self._counts), strict=True):
            seen += count
            buckets.append((str(bound) if bound < float("inf") else "+Inf", seen))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)
