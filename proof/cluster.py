"""What a cluster on Ray promises, row by row.

A head, two replicas of the scripted model (20 ms a step) and a gateway on this machine. Each row disturbs
streams and compares their texts, or measures a cost beside two plain servers. `--only ROW` runs some; results
are kept in a file, so that a later run goes on; `--out FILE` writes the table. Ray is installed in an
environment of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers import free_port
from bench.report import Table
from proof.command import ROOT, make_parser
from proof.resume import EXACT
from proof.shared.cluster_costs import (
    STREAMS,
    Row,
    autoscale,
    judge,
    measure_costs,
    measure_idle,
    run_long,
    share_prefixes,
)
from proof.shared.kept import Kept
from tests.driver.ray_cluster import (
    CLLM,
    CONTROLLER,
    GCS,
    RAYLET,
    RayCluster,
    Stream,
    read_command,
    read_stream,
    read_streams,
)
from tests.driver.server import find_workers, wait_for
from tests.tiny_models import make_dense

KILLS = 20
NOT_RUN = Row("", "", "", False)
ENVIRONMENT = ROOT / ".venv-cluster"
HEAD = """# Cluster: what was measured

`make proof ARGS=cluster` ([several machines](scale.md)): Ray 2.60, a head, two replicas of the scripted model
with steps of 20 ms, and a gateway, on one machine of two shared cores. Times depend on how busy it is, counts
do not. “Exact”: the text, its one end, and no error. Costs are beside two plain servers that share the
streams evenly, interleaved, medians of five rounds. Each row is the latest run of it, not all are of one run.
"""


async def disturb(cluster: RayCluster, change: Callable[[], object], after_s: float = 0.8) -> list[Stream]:
    """Streams that run while something happens."""
    reading = asyncio.create_task(read_streams(cluster.gateway_port, STREAMS))
    await asyncio.sleep(after_s)
    await asyncio.to_thread(change)
    return await reading


def run_disturbed(cluster: RayCluster, what: str, change: Callable[[], object], limit_s: float) -> Row:
    streams = asyncio.run(disturb(cluster, change))
    exact, pause_s = judge(streams)
    figure = f"{exact} of {len(streams)} exact, longest pause {pause_s:.2f} s"
    kept = exact == len(streams) and pause_s <= limit_s
    bar = "all exact" if limit_s > 100 else f"all exact, ≤ {limit_s:g} s"
    return Row(what, figure, bar, kept)


# Failures -----------------------------------------------------------------------------------------------


def kill_replicas(cluster: RayCluster, times: int = KILLS) -> list[Row]:
    exact, pauses, total = 0, [], 0
    chance = random.Random(7)
    for number in range(times):
        cluster.wait_replicas(2)
        victim = cluster.replicas[number % 2]
        streams = asyncio.run(disturb(cluster, lambda v=victim: cluster.kill(v), chance.uniform(0.1, 2.0)))  # type: ignore[misc]
        found, pause_s = judge(streams)
        exact, total = exact + found, total + len(streams)
        pauses.append(pause_s)
        print(f"kill {number + 1}: {found} exact, {pause_s:.2f} s", file=sys.stderr, flush=True)
    usual_s = statistics.median(pauses)
    figure = f"{exact} of {total} exact, longest pause {max(pauses):.2f} s, median {usual_s:.2f} s"
    kept = exact == total and max(pauses) <= 1.0
    return [Row(f"{times} × kill −9 of a replica, {STREAMS} streams", figure, "all exact, ≤ 1 s", kept)]


def leave(cluster: RayCluster) -> list[Row]:
    """Clients that leave: when nothing of their requests is left at any replica."""
    cluster.wait_replicas(2)

    def count_leases() -> int:
        return int(json.loads(cluster.get("/debug/kv")[1])["sequences"]["leased"])

    async def begin_and_leave() -> None:
        reading = asyncio.create_task(read_streams(cluster.gateway_port, STREAMS))
        await asyncio.sleep(0.8)
        assert await asyncio.to_thread(count_leases) == STREAMS
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading

    asyncio.run(begin_and_leave())
    left = time.monotonic()
    wait_for(lambda: count_leases() == 0, 10)
    took_s = time.monotonic() - left
    what = f"{STREAMS} clients leave: no slot is leased"
    return [Row(what, f"after {took_s:.2f} s", "≤ 0.5 s", took_s <= 0.5)]


@dataclass(frozen=True)
class Disturbance:
    """What happens to a cluster of two replicas while streams run, and how long they may pause."""

    what: str
    change: Callable[[RayCluster], object]
    limit_s: float = 1e9

    def __call__(self, cluster: RayCluster) -> list[Row]:
        cluster.wait_replicas(2)
        row = run_disturbed(cluster, self.what, lambda: self.change(cluster), self.limit_s)
        cluster.kill(*cluster.replicas, number=signal.SIGCONT)
        return [row]


def kill_worker(cluster: RayCluster) -> None:
    assert cluster.gateway is not None
    cluster.kill(*find_workers(cluster.gateway.pid, "engine"))


def restart_gcs(cluster: RayCluster) -> list[Row]:
    """The same process again, on the same files: what a service manager would do."""
    cluster.wait_replicas(2)
    (pid,) = [each for each in cluster.find(GCS) if Path(f"/proc/{each}/exe").readlink().name == GCS]
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    variables = dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)

    def restart() -> None:
        cluster.kill(pid)
        time.sleep(3)
        subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    row = run_disturbed(cluster, "GCS on RocksDB, restarted after 3 s", restart, 1e9)
    streams = asyncio.run(read_streams(cluster.gateway_port, STREAMS))
    row.kept = row.kept and judge(streams)[0] == STREAMS
    time.sleep(5)
    cluster.kill(cluster.replicas[0])  # the control plane works again
    cluster.wait_replicas(1)
    cluster.wait_replicas(2)
    row.figure += "; a replica killed later is replaced"
    return [row]


def kill_raylet(cluster: RayCluster) -> list[Row]:
    """Of a second node, which has one of four replicas."""
    before = set(cluster.find(RAYLET))
    cluster.cllm("join", cluster.address, "--cpus", "2")
    cluster.deploy(4)
    cluster.wait_replicas(4)
    (raylet,) = set(cluster.find(RAYLET)) - before
    row = run_disturbed(cluster, "raylet of a machine with a replica", lambda: cluster.kill(raylet), 1e9)
    cluster.deploy(2)
    cluster.wait_replicas(2)
    return [row]


def lose_gcs(cluster: RayCluster) -> list[Row]:
    """Ray ends all its processes after a minute. The gateway stays, and serves with a new cluster."""
    cluster.wait_replicas(2)
    row = run_disturbed(
        cluster, "GCS gone for good: streams meanwhile", lambda: cluster.kill(*cluster.find(GCS)), 1e9
    )
    wait_for(lambda: cluster.status("/ready") == 503, 180, "the gateway is still ready")
    reason = json.loads(cluster.get("/ready")[1]).get("reason", "")
    cluster.kill(*cluster.processes)
    time.sleep(5)
    cluster.start_head()
    began = time.monotonic()
    cluster.deploy()
    deployed = time.monotonic()
    wait_for(lambda: cluster.status("/ready") == 200, 60)
    took_s = time.monotonic() - deployed
    streams = asyncio.run(read_streams(cluster.gateway_port, STREAMS))
    traces = cluster.log.read_text().count("Traceback")
    kept = took_s <= 10 and traces == 0 and judge(streams)[0] == STREAMS and "no replica" in reason
    figure = f"503 “{reason[:60]}…”, {traces} traces, serves {took_s:.1f} s after `deploy` has ended"
    figure += f", {deployed + took_s - began:.0f} s after it began"
    return [row, Row("GCS gone for good: the gateway", figure, "503, no trace, ≤ 10 s", kept)]


# Changes ------------------------------------------------------------------------------------------------


async def keep_busy(cluster: RayCluster, change: Callable[[], object]) -> list[Stream]:
    """Streams one after the other, 16 at a time, until a change is done."""
    changing = asyncio.create_task(asyncio.to_thread(change))
    streams: list[Stream] = []
    while not changing.done():
        streams += await read_streams(cluster.gateway_port, STREAMS)
    await changing
    return streams


def change(cluster: RayCluster, what: str, act: Callable[[], object]) -> list[Row]:
    cluster.wait_replicas(2)
    streams = asyncio.run(keep_busy(cluster, act))
    exact, pause_s = judge(streams)
    figure = f"{exact} of {len(streams)} exact, longest pause {pause_s:.2f} s"
    cluster.deploy(2)
    cluster.wait_replicas(2)
    return [Row(what, figure, "all exact, ≤ 1.5 s", exact == len(streams) and pause_s <= 1.5)]


def scale(cluster: RayCluster) -> list[Row]:
    def act() -> None:
        for count in (1, 3):
            cluster.deploy(count)
            cluster.wait_replicas(count)

    return change(cluster, "scale 2 → 1 → 3", act)


def roll(cluster: RayCluster) -> list[Row]:
    def act() -> None:
        before = set(cluster.replicas)
        cluster.deploy(2, "--batch-tokens", "256")
        wait_for(lambda: not before & set(cluster.replicas), 90, "old replicas are still there")
        cluster.wait_replicas(2)

    return change(cluster, "rolling update of two replicas", act)


def kill_tiny(cluster: RayCluster) -> list[Row]:
    """A second model of the cluster, computed by llama.cpp: its texts with a replica killed, and without."""
    model = make_dense(cluster.folder / "tiny.gguf")
    size = ("--parallel", "8", "--ctx-size", "16384", "--threads", "1", "--draft-tokens", "0", *EXACT)
    real = {**cluster.environment}
    del real["CLLM_CLUSTER_WORKER"]
    command = [cluster.python, *CLLM, "cluster", "deploy", str(model), "--replicas", "2", *size]
    subprocess.run([*command, "--cluster", cluster.address], env=real, check=True, timeout=180)
    port = free_port()
    serve = [cluster.python, *CLLM, "serve", str(model), "--cluster", cluster.address, "--port", str(port)]
    log = (cluster.folder / "tiny.log").open("wb")
    gateway = subprocess.Popen(serve, env=real, stdout=log, stderr=log)
    fields: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True, "cache_prompt": False}

    async def ask_all(kill: bool) -> list[Stream]:
        tasks = [asyncio.create_task(read_stream(port, f"{n} é東🙂 once", **fields)) for n in range(8)]
        await asyncio.sleep(0.7)
        victims = [pid for pid in cluster.replicas if ":tiny:" in read_command(pid)]
        early = sum(task.done() for task in tasks)
        if kill:
            assert len(victims) == 2 and not early, f"{len(victims)} replicas, {early} ended before the kill"
            cluster.kill(victims[0])
        return await asyncio.wait_for(asyncio.gather(*tasks), 120)

    try:
        wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, 60)
        expected = asyncio.run(ask_all(False))
        rounds = []
        for _ in range(5):
            wait_for(lambda: len([p for p in cluster.replicas if ":tiny:" in read_command(p)]) == 2, 60)
            time.sleep(4)
            rounds.append(asyncio.run(ask_all(True)))
    finally:
        gateway.terminate()
        gateway.wait(30)
        cluster.cllm("down", "tiny", "--cluster", cluster.address)
    pairs = [
        (each, undisturbed) for found in rounds for each, undisturbed in zip(found, expected, strict=True)
    ]
    exact = sum(
        each.ended and not each.error and each.text == undisturbed.text for each, undisturbed in pairs
    )
    pause_s = max(each.pause_s for each, _ in pairs)
    figure = f"{exact} of {len(pairs)} as undisturbed, longest pause {pause_s:.2f} s"
    return [Row("tiny F32 model, 5 kills, 8 streams", figure, "all exact", exact == len(pairs))]


ROWS: dict[str, Callable[[RayCluster], list[Row]]] = {
    "costs": measure_costs,
    "idle": measure_idle,
    "kills": kill_replicas,
    "all": Disturbance("all replicas at once", lambda cluster: cluster.kill(*cluster.replicas)),
    "frozen": Disturbance(
        "replica frozen (SIGSTOP)",
        lambda cluster: cluster.kill(cluster.replicas[0], number=signal.SIGSTOP),
        6.0,
    ),
    "leave": leave,
    "controller": Disturbance("Serve's controller", lambda cluster: cluster.kill(*cluster.find(CONTROLLER))),
    "worker": Disturbance("the cluster worker", kill_worker),
    "gcs": restart_gcs,
    "scale": scale,
    "rolling": roll,
    "prefixes": share_prefixes,
    "tiny": kill_tiny,
    "raylet": kill_raylet,
    "autoscaling": autoscale,
    "gone": lose_gcs,
}


def run(names: Sequence[str], python: str, kept: Kept[list[Row]]) -> None:
    """Run the rows, on one cluster; one that cannot be measured is a failed row."""
    with tempfile.TemporaryDirectory(prefix="cllm-cluster-") as folder:
        cluster: RayCluster | None = None
        try:
            for name in names:
                began = time.monotonic()
                try:
                    if cluster is None:
                        cluster = RayCluster(Path(folder, "cluster"), python).__enter__()
                    rows = (run_long if name == "long" else ROWS[name])(cluster)
                except Exception as error:
                    why = f"{type(error).__name__}: {str(error)[:300]}"
                    rows = [Row(name, why, "it can be measured", False)]
                    if cluster is not None:  # what it left may spoil the others
                        print(cluster.log.read_text()[-3000:], file=sys.stderr)
                        cluster.close()
                        cluster = None
                kept.add(name, rows)
                for row in rows:
                    state = "" if row.kept else "FAIL "
                    took = f"{time.monotonic() - began:.0f} s"
                    print(f"{state}{row.what}: {row.figure} (bar: {row.bar}; {took})", flush=True)
        finally:
            if cluster is not None:
                cluster.close()


def make_environment() -> Path:
    """Install Ray beside cllm in `.venv-cluster`: it is an extra, and large. The interpreter there."""
    python, made = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "ready"
    project = ROOT / "pyproject.toml"
    if not made.exists() or made.stat().st_mtime < project.stat().st_mtime:
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
        subprocess.run([*pip, "-e", f"{ROOT}[cluster]"], check=True)
        made.touch()
    return python


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__,
        __doc__,
        "--out",
        long=(False, "also 5,000 requests with 50 kills (half an hour)"),
        python=("", "of an environment with cllm[cluster]; none: .venv-cluster, made the first time"),
        resume=(False, "leave out rows that were kept before"),
    )
    parser.add_argument(
        "--only", action="append", choices=[*ROWS, "long"], help="rows; default: all but long"
    )
    options = parser.parse_args(arguments)
    fresh = not options.resume and not options.only
    kept = Kept(ROOT / "build" / "cluster.jsonl", list[Row], fresh=fresh)
    names = options.only or [*ROWS, *(["long"] if options.long else [])]
    if options.resume:
        names = [name for name in names if not all(row.kept for row in kept.found.get(name, [NOT_RUN]))]
    run(names, options.python or str(make_environment()), kept)
    done = [row for name in (*ROWS, "long") for row in kept.found.get(name, ())]
    rows = [(row.what, row.figure, row.bar, "yes" if row.kept else "**no**") for row in done]
    table = Table(("what", "found", "bar", "kept"), rows).markdown()
    print(table)
    if options.out is not None:
        options.out.write_text(f"{HEAD}\n{table}\n")
    return 0 if all(row.kept for row in done) else 1
