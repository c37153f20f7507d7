"""The rows of `proof.cluster` that measure: costs, idle, prefixes, autoscaling, many requests."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.footprint import descendants
from cllm.testing import say
from tests.driver.ray_cluster import TEXT, RayCluster, Stream, plain_servers, read_stream, read_streams

STREAMS = 16


@dataclass
class Row:
    """A bar, its figure, and whether it is kept."""

    what: str
    figure: str
    bar: str
    kept: bool


def judge(streams: Sequence[Stream], text: str = TEXT) -> tuple[int, float]:
    """How many are exact, and the longest pause of all."""
    exact = sum(each.text == text and each.ended and not each.error for each in streams)
    return exact, max(each.pause_s for each in streams)


def measure_costs(cluster: RayCluster) -> list[Row]:
    """Interleaved with two plain servers that share the streams evenly; medians of five rounds."""
    rows, counts, rounds = [], (1, 8, 32), 5
    bars = {1: 8.0, 8: 15.0, 32: 50.0}
    found: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    with plain_servers(cluster) as (ports, pids):
        trees = {
            "plain": [each for pid in pids for each in descendants(pid)],
            "cluster": [
                each
                for root in (cluster.gateway.pid if cluster.gateway else 0, *cluster.replicas)
                for each in descendants(root)
            ],
        }
        for number in range(rounds + 1):  # the first is to warm up
            for count in counts:
                for kind, where in (("plain", ports), ("cluster", [cluster.gateway_port])):
                    began = cluster.cpu_s(trees[kind])
                    streams = asyncio.run(read_streams(where, count))
                    tokens = len(TEXT) * count
                    spent = (cluster.cpu_s(trees[kind]) - began) / tokens
                    assert judge(streams)[0] == count
                    first = statistics.median(each.first_s for each in streams)
                    gap = statistics.median(gap for each in streams for gap in each.gaps_s)
                    if number:
                        found.setdefault((kind, count), []).append((first, gap, spent))
    for count in counts:
        plain, ours = (
            [statistics.median(values) for values in zip(*found[kind, count], strict=True)]
            for kind in ("plain", "cluster")
        )
        first, gap, spent = (1e3 * (b - a) for a, b in zip(plain, ours, strict=True))
        name = f"{count} stream{'s' * (count > 1)}"
        figure, bar = f"{first:+.1f} ms ({1e3 * plain[0]:.1f} → {1e3 * ours[0]:.1f})", bars[count]
        rows.append(Row(f"time to first token added, {name}", figure, f"≤ {bar:g} ms", first <= bar))
        rows.append(Row(f"gap p50 added, {name}", f"{gap:+.2f} ms", "≤ 1 ms", gap <= 1.0))
        if count == 32:
            micro = 1e3 * spent
            rows.append(Row(f"CPU added a token, {name}", f"{micro:+.0f} µs", "≤ 250 µs", micro <= 250))
    return rows


def measure_idle(cluster: RayCluster) -> list[Row]:
    time.sleep(3)
    own = {each for pid in cluster.replicas for each in descendants(pid)[1:]}  # engines
    pids = [pid for pid in cluster.processes if pid not in own]
    began, at = cluster.cpu_s(pids), time.monotonic()
    time.sleep(30)
    cores = (cluster.cpu_s(pids) - began) / (time.monotonic() - at)
    memory = sum(
        int(line.split()[1])
        for pid in pids
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        if line.startswith("Pss:")
    )
    figure = f"{cores:.2f} core, {memory >> 10} MiB"
    return [Row("Ray idle, replicas' actors included", figure, "≤ 0.2 core", cores <= 0.2)]


def share_prefixes(cluster: RayCluster) -> list[Row]:
    """12 texts of 1,200 tokens, four questions on each, eight at a time; the median of three rounds."""

    async def ask_all(round_name: str) -> float:
        limit = asyncio.Semaphore(8)

        async def ask(text: int, question: int) -> Stream:
            async with limit:
                head = f"{round_name} text {text}: " + f"word {text} " * 150
                return await read_stream(cluster.gateway_port, f"{head[:1200]} {question} {say('an answer')}")

        order = [(text, question) for question in range(4) for text in range(12)]
        streams = await asyncio.gather(*(ask(*each) for each in order))
        assert all(each.text == "an answer" for each in streams)
        cached = sum(each.usage.get("cached_tokens", 0) for each in streams)
        return float(cached / sum(each.usage["prompt_tokens"] for each in streams))

    reused = statistics.median(asyncio.run(ask_all(f"round {number}")) for number in range(3))
    return [Row("12 texts × 4 questions", f"{100 * reused:.0f} % reused", "≥ 66 %", reused >= 0.66)]


def autoscale(cluster: RayCluster) -> list[Row]:
    """KV of one replica filled to 60 %: a second is asked for; while the load stays, both stay."""
    cluster.deploy(1, "--max", "2", "--drain-s", "5", slots=8, step_ms=100)
    cluster.wait_replicas(1)
    asked: list[float] = []
    counts: list[int] = []

    def used() -> float:
        # By the step reports: what replicas say of themselves is seconds old.
        return cluster.metric("cllm_kv_cells_used") / max(1.0, cluster.metric("cllm_kv_cells_total"))

    async def load() -> None:
        async def ask(number: int) -> None:
            while True:
                prompt = f"{number} {'x' * 600} {say('a' * 500)}"
                assert (await read_stream(cluster.gateway_port, prompt, max_tokens=600)).ended

        tasks = [asyncio.create_task(ask(number)) for number in range(8)]
        began = time.monotonic()
        full: float | None = None
        while time.monotonic() - began < 150:
            await asyncio.sleep(0.25)
            share = await asyncio.to_thread(used)
            if full is None and share >= 0.6:
                full = time.monotonic()
            count = len(cluster.replicas)
            if full is not None and not asked and count == 2:
                asked.append(time.monotonic() - full)
            if asked and (not counts or counts[-1] != count):
                counts.append(count)
        failed = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        assert not failed

    asyncio.run(load())
    cluster.deploy(2)
    cluster.wait_replicas(2)
    figure = (
        f"a second replica's process {asked[0]:.1f} s after, counts {counts}"
        if asked
        else "none was asked for"
    )
    kept = bool(asked) and asked[0] <= 5.0 and counts == [2]
    return [Row("autoscaling 1 → 2 at KV ≥ 60 %", figure, "≤ 5 s, no flapping for 120 s", kept)]


def run_long(cluster: RayCluster, requests: int = 5000, every: int = 100) -> list[Row]:
    """Many short requests, with a kill among each hundred."""
    assert cluster.gateway is not None
    gateway, lost, sizes = cluster.gateway.pid, 0, []
    chance, text = random.Random(5), "a short answer"

    def memory() -> float:
        pids = descendants(gateway)
        statuses = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
        return sum(int(text.split("VmRSS:")[1].split()[0]) for text in statuses if "VmRSS:" in text) / 1024

    async def ask_hundred() -> list[Stream]:
        limit = asyncio.Semaphore(STREAMS)

        async def ask(number: int) -> Stream:
            async with limit:
                return await read_stream(cluster.gateway_port, f"{number} {time.monotonic()} {say(text)}")

        asking = asyncio.gather(*map(ask, range(every)))
        await asyncio.sleep(chance.uniform(0.2, 1.5))
        if victims := cluster.replicas:
            cluster.kill(chance.choice(victims))
        return await asyncio.wait_for(asking, 300)

    for number in range(requests // every):
        streams = asyncio.run(ask_hundred())
        lost += every - judge(streams, text)[0]
        sizes.append(memory())
        print(
            f"{(number + 1) * every} requests, {lost} lost, {sizes[-1]:.0f} MiB", file=sys.stderr, flush=True
        )
    early, late = sizes[len(sizes) // 5], sizes[-1]
    figure = f"{lost} lost; the gateway's processes {early:.0f} → {late:.0f} MiB"
    kept = lost == 0 and late <= 1.05 * early + 8
    return [Row(f"{requests} requests, a replica killed every {every}", figure, "0 lost, memory flat", kept)]
