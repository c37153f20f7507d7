"""Metrics for Prometheus, and the log of ended requests. One registry per engine, no module globals."""

from __future__ import annotations

import logging
import time
import tomllib
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cllm.frontend.request_queue import RequestQueue, RequestState
from cllm.frontend.tenants import Tenants
from cllm.messages import ClusterReport, StepStats
from cllm.types import Limits, RequestOutput

log = logging.getLogger(__name__)
Kind = TypeVar("Kind", Counter, Gauge, Histogram)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


# Metrics of fields, by the kind of metric.
_FILE = Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8")
DECLARED: dict[str, dict[str, Any]] = tomllib.loads(_FILE)


class EngineMetrics:
    """Counters and histograms of one engine, updated once per step or per request; per token only gaps."""

    bounds = _SECONDS  # of every histogram

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._by_name: dict[str, Collector] = {}
        self.request_log = RequestLog()
        self.tenants = Tenants()  # those of the queue

        def make(kind: type[Kind], name: str, text: str, *labels: str, **options: Any) -> Kind:
            made = kind(f"cllm_{name}", text, labels, registry=self.registry, **options)
            self._by_name[name] = made
            return made

        counter, gauge = partial(make, Counter), partial(make, Gauge)
        histogram = partial(make, Histogram, buckets=_SECONDS)

        self.accepted = counter("requests_accepted", "Requests accepted into the queue")
        self.finished = counter("requests_finished", "Requests ended, by outcome", "outcome")
        self.refused = counter("requests_refused", "Requests refused, by reason", "reason")
        self.failed = counter("requests_failed", "Accepted requests that failed, by reason", "reason")
        self.deadlines = counter("deadlines_exceeded", "Requests whose time was up, by stage", "place")
        self.slow_readers = counter("slow_readers", "Streams ended because their client did not read")
        self.queue = gauge("queue_requests", "Requests that wait for a slot")
        self.queue_tokens = gauge("queue_tokens", "Prompt tokens of requests that wait for a slot")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests")
        self.cached_tokens = counter(
            "cached_tokens", "Prompt tokens of finished requests taken from the KV cache, by tier", "source"
        )
        self.pictures = counter("pictures", "Pictures of requests, by the origin of their rows", "source")
        self.generated_tokens = counter("generated_tokens", "Tokens generated")
        self.drafted_tokens = counter("drafted_tokens", "Draft tokens of finished requests", "drafter")
        self.accepted_tokens = counter("accepted_tokens", "Draft tokens that were accepted", "drafter")
        self.time_to_first_token = histogram("time_to_first_token_seconds", "From arrival to first token")
        self.inter_token = PlainHistogram(
            "cllm_inter_token_seconds", "Between two outputs of one request", _SECONDS, self.registry
        )
        self._by_name["inter_token_seconds"] = self.inter_token
        self.queue_time = histogram("queue_seconds", "From arrival to the engine")
        self.request_time = histogram("request_seconds", "From arrival to the end")
        self.kv_cells_total = gauge("kv_cells_total", "KV cells in all")
        self.restarts = counter("engine_restarts", "Engine processes started after a crash")
        self.memory = gauge("memory_bytes", "Memory by part", "part")
        self._host_cache = self.memory.labels("ram_tier")
        self._ngram_indexes = self.memory.labels("ngram_indexes")
        self.ready = gauge("ready", "1 when requests are computed")
        self._last = StepStats()
        self._counters = [(field, counter(*names)) for field, names in DECLARED["step_counters"].items()]
        self._gauges = [(field, gauge(*names)) for field, names in DECLARED["step_gauges"].items()]
        self.registry.register(TenantMetrics(self))
        self.replicas = ReplicaCollector()
        self.registry.register(self.replicas)
        self._llama = LlamaMetrics(self)
        self.registry.register(self._llama)

    def watch(self, queue: RequestQueue) -> None:
        """Show this queue; read when metrics are scraped."""
        self.tenants = queue.tenants
        self.queue.set_function(lambda: queue.without_slot[0])
        self.queue_tokens.set_function(lambda: queue.without_slot[1])

    def loaded(self, limits: Limits, memory: dict[str, int]) -> None:
        for part, size in memory.items():
            self.memory.labels(part).set(size)
        self.kv_cells_total.set(limits.cells)
        self.ready.set(1)

    def take_over(self, newer: EngineMetrics) -> None:
        """Another engine replaces this one: show its memory; counters go on."""
        for sample in next(iter(newer.memory.collect())).samples:
            self.memory.labels(sample.labels["part"]).set(sample.value)
        self.kv_cells_total.set(newer.registry.get_sample_value("cllm_kv_cells_total") or 0)
        self.ready.set(1)

    def step(self, stats: StepStats) -> None:
        """Count a step. Most fields have not changed and cost nothing."""
        last, self._last = self._last, stats
        for field, count in self._counters:
            if value := getattr(stats, field):
                count.inc(value)
        for field, show in self._gauges:
            if (value := getattr(stats, field)) != getattr(last, field):
                show.set(value)
        self._host_cache.set(stats.prefix_bytes + stats.swapped_bytes)
        self._ngram_indexes.set(stats.draft_bytes)

    def ended(self, state: RequestState, output: RequestOutput, now: float) -> None:
        """Account for a request that has ended: here, in the request log, and with a line in the log."""
        assert output.finish_reason is not None and output.usage is not None
        usage, reason = output.usage, output.finish_reason.value
        queue_s = (state.dispatched or now) - state.arrived
        self.finished.labels(reason).inc()
        if output.error is not None:
            self.failed.labels(output.error.code).inc()
        self.queue_time.observe(queue_s)
        self.request_time.observe(now - state.arrived)
        self.prompt_tokens.inc(usage.prompt_tokens)
        if usage.cached_tokens:
            self.cached_tokens.labels(usage.cached_from).inc(usage.cached_tokens)
        if usage.drafter:
            self.drafted_tokens.labels(usage.drafter).inc(usage.drafted_tokens)
            self.accepted_tokens.labels(usage.drafter).inc(usage.accepted_tokens)
        first = state.first_token or now  # one that never had a token took no time of either kind
        self._llama.prompt_s += first - (state.dispatched or first)
        self._llama.predicted_s += now - first
        self._llama.longest = max(self._llama.longest, usage.prompt_tokens + usage.completion_tokens)
        self.request_log.add(state, output, now)
        if log.isEnabledFor(logging.INFO):
            error = f" ({output.error.code})" if output.error else ""
            source = f" from {usage.cached_from}" if usage.cached_from else ""
            waited = f"{state.first_token - state.arrived:.3f} s" if state.first_token else "never"
            log.info(
                f"request {output.request_id}: {reason}{error}, "
                f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached{source}), "
                f"{usage.completion_tokens} generated, queued {queue_s:.3f} s, "
                f"first token {waited}, total {now - state.arrived:.3f} s"
            )

    def crashed(self) -> None:
        """The engine process is gone: nothing runs, nothing is held."""
        self._last = StepStats()
        for _, gauge in (*self._gauges, ("", self.ready)):
            gauge.set(0)
        for part in ("model", "kv", "buffers", "ram_tier", "ngram_indexes", "draft_model"):
            self.memory.labels(part).set(0)

    def read(self, names: Iterable[str]) -> dict[str, float]:
        """The values of these metrics now; of one with labels, the sum."""
        return {name: sum(self.read_labelled(name).values()) for name in names}

    def read_labelled(self, name: str) -> dict[str, float]:
        """The values of a metric by its label."""
        (family,) = self._by_name[name].collect()
        return {
            next(iter(sample.labels.values()), ""): sample.value
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    def read_buckets(self, name: str) -> list[float]:
        """The cumulative counts of a histogram, one for each of `bounds` and one beyond."""
        (family,) = self._by_name[name].collect()
        return [sample.value for sample in family.samples if sample.name.endswith("_bucket")]

    def render(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


def render_models(models: Mapping[str, EngineMetrics]) -> bytes:
    """The exposition format of several models: every metric once, its samples by `model`."""
    families: dict[str, Metric] = {}
    for model, metrics in models.items():
        for family in metrics.registry.collect():
            shown = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                shown.samples.append(sample._replace(labels={"model": model, **sample.labels}))
    return generate_latest(cast(Collector, SimpleNamespace(collect=families.values)))


class TenantMetrics(Collector):
    """Tokens and requests of each tenant, read when metrics are scraped."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        tokens = CounterMetricFamily("cllm_tenant_tokens", "Tokens, prompt and generated", labels=["tenant"])
        held = GaugeMetricFamily("cllm_tenant_requests", "Requests now", labels=["tenant", "place"])
        tenants = self._metrics.tenants
        surplus = tenants.count_surplus()
        for tenant in tuple(tenants.accounts.values()):
            tokens.add_metric([tenant.name], tenant.tokens)
            held.add_metric([tenant.name, "waiting"], tenant.waiting + surplus[tenant])
            held.add_metric([tenant.name, "engine"], tenant.running - surplus[tenant])
        return tokens, held


class ReplicaCollector(Collector):
    """The replicas of a cluster, each with its own label; nothing where the engine is of this machine."""

    report: ClusterReport | None = None

    def collect(self) -> Iterable[Metric]:
        if (report := self.report) is None:
            return
        moved = CounterMetricFamily("cllm_requests_moved", "Requests that went on at another replica")
        moved.add_metric([], report.moved)
        yield moved
        for field, text in DECLARED["replica_gauges"].items():
            family = GaugeMetricFamily(f"cllm_replica_{field}", text, labels=["replica"])
            for each in report.replicas:
                family.add_metric([each.name], float(getattr(each, field)))
            yield family


class LlamaMetrics(Collector):
    """Metrics of llama-server, under its names: for dashboards that were made for it."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self.prompt_s = self.predicted_s = 0.0
        self.longest = 0  # tokens of a request
        self._scraped = dict.fromkeys(("prompt", "predicted"), (0.0, 0.0))  # tokens and seconds until then

    def collect(self) -> Iterable[Metric]:
        """Speeds are those since the last scrape."""
        names = ("prompt_tokens", "cached_tokens", "generated_tokens", "drafted_tokens", "accepted_tokens")
        counts = self._metrics.read((*names, "steps", "running_requests", "queue_requests"))
        values = {
            "prompt_tokens_total": counts["prompt_tokens"] - counts["cached_tokens"],
            "prompt_tokens_cached_total": counts["cached_tokens"],
            "prompt_seconds_total": self.prompt_s,
            "tokens_predicted_seconds_total": self.predicted_s,
            "spec_decode_num_draft_tokens_total": counts["drafted_tokens"],
            "spec_decode_num_accepted_tokens_total": counts["accepted_tokens"],
            "n_decode_total": counts["steps"],
            "tokens_predicted_total": counts["generated_tokens"],
            "requests_processing": counts["running_requests"],
            "requests_deferred": counts["queue_requests"],
            "n_tokens_max": float(self.longest),
        }
        for kind, tokens, seconds in (
            ("prompt", "prompt_tokens_total", "prompt_seconds_total"),
            ("predicted", "tokens_predicted_total", "tokens_predicted_seconds_total"),
        ):
            before, self._scraped[kind] = self._scraped[kind], (values[tokens], values[seconds])
            spent = values[seconds] - before[1]
            values[f"{kind}_tokens_seconds"] = (values[tokens] - before[0]) / spent if spent > 0 else 0.0
        for name, value in values.items():
            own = f"llamacpp:{name}"
            counted = name.endswith("_total")
            family = Metric(own.removesuffix("_total"), "llama-server's", "counter" if counted else "gauge")
            family.add_sample(own, {}, value)
            yield family


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
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = [*zip(names, accumulate(tuple(self._counts)), strict=True)]
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class RequestRecord(msgspec.Struct, frozen=True, array_like=True):
    """An ended request: times and counts, never its text."""

    number: int  # in the order of their ends, from 1
    id: str
    tenant: str
    outcome: str
    ended: float  # seconds since 1970
    queue_ms: float
    first_ms: float | None  # from arrival to the first token; None: there was none
    gap_ms: float | None  # between two tokens, on average
    total_ms: float
    prompt: int
    cached: int
    generated: int


def _round(ms: float) -> float:
    return round(ms, 2 if ms < 100 else 0)


class LatencyPoint(msgspec.Struct):
    """Latency of requests with neighbouring numbers, in milliseconds: sums and maxima."""

    first_count: int
    first_sum: float
    first_max: float
    gap_count: int
    gap_sum: float
    gap_max: float

    def merge(self, other: LatencyPoint) -> None:
        self.first_count += other.first_count
        self.first_sum += other.first_sum
        self.first_max = max(self.first_max, other.first_max)
        self.gap_count += other.gap_count
        self.gap_sum += other.gap_sum
        self.gap_max = max(self.gap_max, other.gap_max)

    def figures(self) -> tuple[float, float, float | None, float | None]:
        """Mean and maximum in milliseconds: to the first token, then between two tokens."""
        gap = (
            (_round(self.gap_sum / self.gap_count), _round(self.gap_max)) if self.gap_count else (None, None)
        )
        return _round(self.first_sum / self.first_count), _round(self.first_max), *gap


class RequestLog:
    """The last `KEPT` requests, and the latency of all by their number.

    The latency curve has at most `MAX_POINTS` points: when these are full, each two become one.
    """

    KEPT = 100
    MAX_POINTS = 512

    def __init__(self) -> None:
        self.count = 0
        self.records: deque[RequestRecord] = deque(maxlen=self.KEPT)
        self.width = 1  # requests of a point
        self.measured = 0  # requests in the curve: those with a token
        self.points: list[LatencyPoint] = []

    def add(self, state: RequestState, output: RequestOutput, now: float) -> None:
        assert output.finish_reason is not None and output.usage is not None
        self.count += 1
        first_ms = gap_ms = None
        if state.first_token is not None and state.last_token is not None:
            first_ms, gaps = 1000 * (state.first_token - state.arrived), state.generated - 1
            gap = 1000 * (state.last_token - state.first_token) / gaps if gaps else 0.0
            gap_ms = gap if gaps else None
            if self.measured == self.width * self.MAX_POINTS:
                for left, right in zip(self.points[::2], self.points[1::2], strict=True):
                    left.merge(right)
                self.points = self.points[::2]
                self.width *= 2
            point = LatencyPoint(1, first_ms, first_ms, int(gaps > 0), gap, gap)
            if self.measured == self.width * len(self.points):
                self.points.append(point)
            else:
                self.points[-1].merge(point)
            self.measured += 1
        usage, ended_at = output.usage, time.time()
        record = RequestRecord(
            self.count,
            output.request_id[-8:],  # as much as finds it in the log
            state.tenant.name,
            output.error.code if output.error is not None else output.finish_reason.value,
            round(ended_at, 1),
            _round(1000 * ((state.dispatched or now) - state.arrived)),
            first_ms and _round(first_ms),
            gap_ms and _round(gap_ms),
            _round(1000 * (now - state.arrived)),
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
        )
        self.records.append(record)
