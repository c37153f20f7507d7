"""What ten thousand requests leave behind in the server.

The tree of server processes is looked at after every tenth of the requests, when it is idle; the first of
these looks is the baseline. With `--evictions` the requests are turns of conversations, far more than the
tiers of the KV cache hold, and the integrity check must never have fired. Flags after `--` go to the server.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench import footprint
from bench.command import conclude, run_command, serving
from bench.footprint import Footprint
from bench.load import run_load
from bench.peers import RunningPeer, ServerSettings
from bench.report import Table
from bench.wire import OpenAIApi
from bench.workloads import Definition, Group, make_plan
from proof.command import make_parser
from proof.shared.answers import Client

TENTHS = 10
CLIENTS = 16
MAX_GROWTH = 1.02
SETTLE_S = 1.0
SHORT = Group(prompt_tokens=(1, 40), output_tokens=(1, 16), clients=CLIENTS)
TALKS = Group(prompt_tokens=(1, 20), output_tokens=(1, 16), prefix_tokens=20, turns=4, clients=CLIENTS)
SMALL_CACHE = (
    "--cache-ram-mb",
    "2",
    "--cache-disk-mb",
    "4",
    "--cache-dir",
)  # some forty conversations, eighty
EVICTIONS = ("cllm_slot_evictions_total", "cllm_prefix_evictions_total")


@dataclass(frozen=True, slots=True)
class Sample:
    """The server after `requests` requests; `seconds` and `errors` are of the last tenth."""

    requests: int
    seconds: float
    errors: tuple[str, ...]
    footprint: Footprint
    evictions: float = 0.0  # so far
    integrity_failures: float = 0.0


def run_soak(
    tiny: Path,
    requests: int = 10_000,
    evictions: bool = False,
    flags: Sequence[str] = (),
    out: Path | None = None,
    command: Sequence[str] | None = None,
    logs: Path | None = None,
) -> int:
    """Send `requests`, print a table; 0 if nothing grew and all were answered, else 1.

    Raises SetupError if the server does not start, or ends.
    """
    group = TALKS if evictions else SHORT
    group = msgspec.structs.replace(group, count=max(1, requests // TENTHS // group.turns))
    settings = ServerSettings(model=tiny, ctx_size=8192)
    with tempfile.TemporaryDirectory() as folder:
        flags = (*SMALL_CACHE, folder, *flags) if evictions else flags
        with serving("soak", settings, command, logs, flags) as server:
            samples = [_tenth(server, number, group) for number in range(TENTHS)]
    faults = find_faults(samples)
    if evictions and not samples[-1].evictions > samples[0].evictions:
        faults.append("FAIL: nothing was evicted: this proves nothing")
    text = "\n".join([_table(samples).markdown(), "", *(faults or [_verdict(samples)])])
    return conclude("soak", text, {"samples": samples, "faults": faults}, out, failed=bool(faults))


def find_faults(samples: Sequence[Sample]) -> list[str]:
    """What grew between the first sample and the last, and what was not answered."""
    first, last = samples[0].footprint, samples[-1].footprint
    faults = []
    errors = [error for sample in samples for error in sample.errors]
    if errors:
        faults.append(f"FAIL: {len(errors)} requests were not answered in full; {'; '.join(errors[:3])}")
    if failures := samples[-1].integrity_failures:
        faults.append(f"FAIL: the integrity check failed {failures:.0f} times")
    if last.rss_bytes > MAX_GROWTH * first.rss_bytes:
        growth = last.rss_bytes / first.rss_bytes - 1
        faults.append(f"FAIL: memory grew by {growth:.1%}, allowed are {MAX_GROWTH - 1:.0%}")
    if last.file_descriptors > first.file_descriptors:
        faults.append(f"FAIL: file descriptors grew: {first.file_descriptors} → {last.file_descriptors}")
    if last.threads > first.threads:
        faults.append(f"FAIL: threads grew: {first.threads} → {last.threads}")
    if last.processes != first.processes:
        faults.append(f"FAIL: processes changed: {first.processes} → {last.processes}")
    return faults


def _tenth(server: RunningPeer, number: int, group: Group) -> Sample:
    workload = Definition(name="soak", about="short requests of mixed sizes", groups=(group,))
    load = run_load(server.address, OpenAIApi(), make_plan(workload, number))
    time.sleep(SETTLE_S)
    count = len(load.completions)
    done = (number + 1) * count
    rate = count / load.wall_s
    print(f"{done} requests, {rate:.0f} a second, {len(load.errors)} errors", file=sys.stderr, flush=True)
    counters = Client(server.address).metrics()
    return Sample(
        done,
        load.wall_s,
        load.errors,
        footprint.measure(server.pid),
        sum(counters[name] for name in EVICTIONS),
        counters["cllm_integrity_failures"],
    )


def _table(samples: Sequence[Sample]) -> Table:
    columns = (
        "requests",
        "RSS, MiB",
        "against the first",
        "descriptors",
        "threads",
        "requests/s",
        "evictions",
        "errors",
    )
    base = samples[0].footprint.rss_bytes
    rows = [
        (
            f"{sample.requests}",
            f"{sample.footprint.rss_bytes / 2**20:.1f}",
            f"{sample.footprint.rss_bytes / base:.4f}",
            f"{sample.footprint.file_descriptors}",
            f"{sample.footprint.threads}",
            f"{samples[0].requests / sample.seconds:.0f}",
            f"{sample.evictions:.0f}",
            f"{len(sample.errors)}",
        )
        for sample in samples
    ]
    return Table(columns, rows)


def _verdict(samples: Sequence[Sample]) -> str:
    first, last = samples[0], samples[-1]
    ratio = last.footprint.rss_bytes / first.footprint.rss_bytes
    return (
        f"pass: RSS after {last.requests} requests is {ratio:.4f} × that after {first.requests}; "
        "file descriptors and threads did not grow"
    )


def main(arguments: Sequence[str]) -> int:
    shared = ("--tiny", "--out", "--logs", "--command")
    parser = make_parser(__name__, __doc__, *shared, requests=(10_000, "how many in all"))
    parser.add_argument("--evictions", action="store_true", help="conversations that push each other out")
    parser.add_argument("flags", nargs="*", help="more flags of the server, after --")
    return run_command(parser, arguments, run_soak)
