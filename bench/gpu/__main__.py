"""`python -m bench.gpu OUT`: the table of a GPU machine, row by row; what is in OUT is not measured again.

Each row is a model, a server and a number of streams: tokens per second while all streams generate, and end
to end. Servers and bare decode run side by side and take turns: the cores of a shared machine may be half as
fast for seconds at a time, so each part of bare decode is the median of those of single rounds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from bench import adapters
from bench import mtp as heads
from bench.figures import LoadResult, decode_rate, first_tokens, percentile
from bench.gpu import models
from bench.load import run_load
from bench.peers import Peer, RunningPeer, ServerSettings, cllm_peer, llama_server_peer, running
from bench.wire import OpenAIApi
from bench.workloads import BenchRequest, single_requests
from bench.workloads.text import words

VOCABULARY = "ggml-vocab-qwen2.gguf"  # of the sdist of the bindings
PROMPT, OUTPUT, SLOTS, CELLS = 64, 512, 64, 1024
STREAMS = {"0.6B": (1, 8, 32, 64), "8B": (1, 8, 64)}
WARM_UP = 16  # tokens
TOP_P = 0.95  # of what is sampled


class Table:
    """The rows that are measured, in a file that grows."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.rows: list[dict[str, Any]] = []
        if file.exists():
            self.rows = [json.loads(line) for line in file.read_text().splitlines()]

    def has(self, **key: Any) -> bool:
        return any(row.items() >= key.items() for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with self._file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def make_peers(model: Path, llama_server: Path | None, only: list[str] | None = None) -> dict[str, Peer]:
    settings = ServerSettings(model, SLOTS, SLOTS * CELLS, prompt_cache=True)
    api = OpenAIApi()
    peers = {
        "cllm, drafts off": cllm_peer(settings, None, api, ("--draft-tokens", "0")),
        "cllm": cllm_peer(settings, None, api),
        # The same process: two of them differ by up to 5 % in a round, where both do the same.
        "cllm, asked for no drafts": cllm_peer(settings, None, OpenAIApi(speculate=False)),
    }
    if llama_server is not None:
        peers["llama-server"] = llama_server_peer(settings, llama_server)
    return {label: peer for label, peer in peers.items() if not only or label in only}


def measure(server: RunningPeer, streams: int, output: int, temperature: float, salt: str) -> LoadResult:
    requests = [
        BenchRequest(
            words(f"{salt} {number}", PROMPT * 3 // 4),
            output,
            temperature,
            top_p=TOP_P if temperature else 1.0,
        )
        for number in range(streams)
    ]
    return run_load(server.address, server.peer.api, single_requests("gpu", requests, streams))


class BareDecode:
    """`bench.gpu.bare` as a process that waits for its turns."""

    def __init__(self, model: Path, output: int, log: Path) -> None:
        numbers = map(str, (PROMPT, output, SLOTS))
        command = [sys.executable, "-m", "bench.gpu.bare", str(model), *numbers]
        self._log = log.open("w")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._log, text=True)

    def __enter__(self) -> BareDecode:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def measure(self, streams: int) -> float:
        """Tokens per second."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{streams}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


def measure_model(
    table: Table,
    name: str,
    model: Path,
    peers: dict[str, Peer],
    counts: Sequence[int],
    logs: Path,
    rounds: int,
    output: int,
    deadline: float,
) -> None:
    """Rows of bare decode and of all servers of one model."""
    wanted = [
        (streams, temperature, label)
        for streams in counts
        for temperature in ((0.0, 0.8) if streams == SLOTS else (0.0,))
        for label in peers
        if not table.has(model=name, server=label, streams=streams, temperature=temperature)
    ]
    if not wanted:
        return
    with ExitStack() as stack:
        servers: dict[str, RunningPeer] = {}
        for label in dict.fromkeys(each[2] for each in wanted):
            peer, log = peers[label], logs / f"{name} {label}.log".replace(", ", " ").replace(" ", "-")
            same = next((each for each in servers.values() if each.peer.command == peer.command), None)
            servers[label] = replace(same, peer=peer) if same else stack.enter_context(running(peer, log))
        bare = stack.enter_context(BareDecode(model, output, logs / f"{name}-bare.log"))
        for server in {each.address: each for each in servers.values()}.values():
            measure(server, SLOTS, WARM_UP, 0.0, "warm-up")
        bare.measure(1)
        for streams, temperature in dict.fromkeys(each[:2] for each in wanted):
            if time.monotonic() > deadline:
                print("out of time: the rest next time", flush=True)
                return
            labels = [label for *key, label in wanted if tuple(key) == (streams, temperature)]
            loads: dict[str, list[LoadResult]] = {label: [] for label in labels}
            bare_rates = []
            for number in range(rounds):
                bare_rates.append(bare.measure(streams))
                for label in labels[:: -1 if number % 2 else 1]:
                    if label == "llama-server" and number and streams == SLOTS:
                        continue  # it takes a minute; once is enough
                    salt = f"{label} {streams} {temperature} {number}"
                    loads[label].append(measure(servers[label], streams, output, temperature, salt))
            if not table.has(model=name, server="bare", streams=streams):
                rate = median(bare_rates)
                row = {"model": name, "server": "bare", "streams": streams, "temperature": 0.0}
                table.add({**row, "tokens_per_second": rate})
            for label, found in loads.items():
                parts = [decode_rate([load]) / rate for load, rate in zip(found, bare_rates, strict=False)]
                errors = [error for load in found for error in load.errors]
                table.add(
                    {
                        "model": name,
                        "server": label,
                        "streams": streams,
                        "temperature": temperature,
                        "tokens_per_second": decode_rate(found),
                        "of_bare": median(parts),
                        "parts": [round(part, 3) for part in parts],
                        "end_to_end": median(load.tokens_per_second for load in found),
                        "first_token_ms": 1e3
                        * percentile([each for load in found for each in first_tokens([load])], 50),
                        "errors": len(errors),
                        "error": errors[0] if errors else "",
                    }
                )


def main(
    out: Path,
    vocabulary: Annotated[Path, typer.Option(help="GGUF file with the tokenizer")],
    llama_server: Annotated[Path | None, typer.Option()] = None,
    model: Annotated[list[str] | None, typer.Option(help="0.6B or 8B; none: both")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Servers to measure, by their labels")] = None,
    streams: Annotated[list[int] | None, typer.Option(help="How many, in this order; none: all")] = None,
    rounds: Annotated[int, typer.Option()] = 3,
    output: Annotated[int, typer.Option(help="Tokens of an answer")] = OUTPUT,
    budget_s: Annotated[float, typer.Option(help="No row is begun after this")] = 480.0,
    folder: Annotated[Path, typer.Option(help="Where the models are made")] = Path("/tmp"),
    mtp: Annotated[list[str] | None, typer.Option(help="Run `bench.mtp` instead: LAYERSxWIDTH")] = None,
    lora: Annotated[bool, typer.Option("--adapters", help="Run `bench.adapters` instead")] = False,
) -> None:
    """Measure what is not yet in OUT/rows.jsonl."""
    deadline = time.monotonic() + budget_s
    out.mkdir(parents=True, exist_ok=True)
    table = Table(out / "rows.jsonl")
    if mtp:
        heads.run(vocabulary, mtp, folder, rounds, output, llama_server=llama_server)
        return
    for name in model or list(STREAMS):
        path = folder / f"random-{name}.gguf"
        if not path.exists():
            started = time.monotonic()
            models.make(path, name, vocabulary)
            print(f"made {path.name} in {time.monotonic() - started:.0f} s", flush=True)
        if lora:
            adapters.run(path, out=out / name, llama_server=llama_server, rounds=rounds, output=output)
            continue
        peers = make_peers(path, llama_server, only)
        counts = streams or STREAMS[name]
        measure_model(table, name, path, peers, counts, out / "logs", rounds, output, deadline)


if __name__ == "__main__":
    typer.run(main)
