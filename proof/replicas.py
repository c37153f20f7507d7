"""Two replicas beside one, on a machine with cores for both: tokens/s of the workload `distinct`.

    make proof ARGS="replicas [--model FILE] [--threads N] [--rounds N]"

Without Ray, which only places replicas: they are processes that the gateway finds in a folder. Each has its
own threads, slots and clients. Both servers run all the time and take turns.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from bench.command import conclude, run_command
from bench.load import run_load
from bench.peers import ServerSettings, cllm_peer, log_folder, running
from bench.report import Table
from bench.workloads import BenchRequest, single_requests
from bench.workloads.definition import find
from bench.workloads.text import words
from proof.command import make_parser

CELLS = 512  # of a slot
BAR = 1.9


def compare(
    model: Path | None, threads: int, rounds: int, requests: int, out: Path | None, logs: Path | None
) -> int:
    (group,) = find(["distinct"])[0].groups
    clients = group.clients
    # The gateway, its HTTP process and the clients need a core or two.
    threads = threads or max(1, ((os.cpu_count() or 2) - 2) // 2)
    rates: dict[int, list[float]] = {1: [], 2: []}
    errors: list[str] = []
    with ExitStack() as stack:
        folder = stack.enter_context(log_folder(logs))
        servers = {}
        for replicas in rates:
            slots = replicas * clients
            code = f"from tests.driver.cluster import replace_engines; replace_engines({replicas});"
            command = (sys.executable, "-c", f"{code} from cllm.cli.main import main; main()")
            flags = ("--draft-tokens", "0", "--gpu-layers", "0")
            settings = ServerSettings(model, slots, slots * CELLS, threads)
            peer = cllm_peer(settings, command, flags=flags)
            servers[replicas] = stack.enter_context(running(peer, folder / f"{replicas}.log"))
        for number in range(-1, rounds):  # the first is a warm-up
            for replicas, server in servers.items():
                texts = [words(f"{number} {replicas} {each}", 48) for each in range(replicas * requests)]
                asked = [BenchRequest(text, 64) for text in texts]
                plan = single_requests("distinct", asked, replicas * clients)
                load = run_load(server.address, server.peer.api, plan)
                errors += load.errors
                if number >= 0:
                    rates[replicas].append(load.tokens_per_second)
    ratios = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    rows = [
        (f"{replicas}", f"{median(found):.1f}", ", ".join(f"{each:.1f}" for each in found))
        for replicas, found in rates.items()
    ]
    text = Table(("replicas", "tokens/s, median", "rounds"), rows).markdown()
    text += f"\n\n{threads} threads, {clients} slots and clients each, {os.cpu_count()} cores; two of one: "
    text += f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), the bar is {BAR}\n"
    text += f"errors: {errors[:1]}\n" if errors else ""
    failed = bool(errors) or median(ratios) < BAR
    return conclude("replicas", text, {"rates": rates, "ratios": ratios}, out, failed=failed)


def main(arguments: Sequence[str]) -> int:
    numbers = {"rounds": (5, "of each"), "requests": (16, "of a replica in a round")}
    parser = make_parser(__name__, __doc__, "--model", "--threads", "--out", "--logs", **numbers)
    return run_command(parser, arguments, compare)
