"""What a plain stream notices of costly requests beside it.

For each kind of costly request (every sampler at its limits, grammars, log-probabilities, long prompts,
embeddings), seven of them beside one greedy stream. Its longest gap between two tokens must stay within 1.5
times the inter-token target, the first use of each kind included. Beside samplers its speed must be at least
0.8 of what it is beside seven greedy streams. Paired rounds, medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

import httpx

from bench.command import conclude, run_command, serving
from bench.peers import ServerSettings
from bench.report import Table
from proof.command import make_parser
from tests.driver.server import wait_for

TARGET_S = 0.25  # the default of --target-itl-ms
MAX_GAP, MIN_SPEED = 1.5, 0.8
NEIGHBOURS = 7
WARM_UP, COUNTED = 12, 48  # tokens
PATIENCE_S = 120.0
# One for all threads: making one takes the cores of the server under test for a tenth of a second.
CLIENT = httpx.Client(timeout=PATIENCE_S, trust_env=False, limits=httpx.Limits(max_connections=None))
PROSE = (
    "The harbour town had kept its market for three hundred years, and every Thursday the farmers came down "
    "from the hills with apples, cheese and stories. This autumn, however, one of the stalls stayed empty. "
)
Clock = Callable[[], float]  # seconds
_ALL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.5}
_ANY = {"type": "string", "maxLength": 400}
KINDS: dict[str, dict[str, Any]] = {
    "every token": _ALL,
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 1.0, "penalty_last_n": -1},
    "penalties, every token": {**_ALL, "repetition_penalty": 1.3, "presence_penalty": 2.0},
    "logit bias": {"logit_bias": {str(token): 1.0 for token in range(1024)}},
    "typical": {**_ALL, "typical_p": 0.5},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 100.0},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 100.0},
    "top-n-sigma": {**_ALL, "top_n_sigma": 100.0},
    "xtc": {**_ALL, "xtc_probability": 1.0, "xtc_threshold": 0.0},
    "dynamic temperature": {**_ALL, "dynatemp_range": 1.0},
    "log-probabilities": {"logprobs": 20},
    "stop texts": {"stop": [f"{number}" + "never " * 42 for number in range(16)]},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "schema": {
                    "type": "object",
                    "properties": {f"field {number}": _ANY for number in range(60)},
                    "required": [f"field {number}" for number in range(60)],
                }
            },
        }
    },
    "regex": {"regex": "((a|b|ab|ba)[a-z ]{1,200}[.!?]){1,50}"},
}
PREFILL: dict[str, dict[str, Any]] = {
    "long prompts": {"prompt": PROSE * 20},
    "embeddings": {"input": [PROSE]},
}


def kinds(number: int) -> Mapping[str, Mapping[str, Any]]:
    """The costly requests; those with texts of their own have others at each call: no cache helps."""
    breakers = [f"{number:x}-{place}{'xyzw' * 3}"[:16] for place in range(8)]
    dry = {"dry_multiplier": 1.0, "dry_penalty_last_n": -1, "dry_sequence_breakers": breakers}
    return {"DRY": dry, **KINDS, **PREFILL}


class PlainStream:
    """Greedy answers of `/v1/completions`, one after another, and when each token came, by a clock."""

    def __init__(self, url: str, clock: Clock = time.perf_counter) -> None:
        self.url = url
        self._clock = clock
        self.times: list[float] = []

    def read(self, tokens: int, stopped: Event | None = None) -> None:
        """Read one answer, or answers until it is stopped: costly requests take as long as they take."""
        body = {"prompt": PROSE, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        while True:
            with CLIENT.stream("POST", f"{self.url}/v1/completions", json=body) as response:
                assert response.status_code == 200, response.read()
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self.times.append(self._clock())
                    if stopped is not None and stopped.is_set():
                        return
            if stopped is None:
                return

    @property
    def tokens_per_s(self) -> float:
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])


def ask(url: str, fields: Mapping[str, Any], tokens: int, stopped: Event) -> None:
    """One costly request; a stream, so that it ends when it is no longer needed."""
    if "input" in fields:
        assert CLIENT.post(f"{url}/v1/embeddings", json=fields).status_code == 200
        return
    body = {"prompt": PROSE, "max_tokens": tokens, "seed": 7, "stream": True, **fields}
    with CLIENT.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.status_code == 200, (fields, response.read())
        for _ in response.iter_lines():
            if stopped.is_set():
                return


def gaps_of_all(
    url: str, number: int, neighbours: int, clock: Clock = time.perf_counter, **shorter: Any
) -> dict[str, float]:
    """The longest gap of one plain stream during each kind of costly request, one kind after another.

    `shorter` are fields that make a request of any kind less work.
    """
    stream, stopped = PlainStream(url, clock), Event()
    begun: dict[str, float] = {}
    with ThreadPoolExecutor(1 + neighbours) as pool:
        reading = pool.submit(stream.read, 4000, stopped=stopped)
        try:
            while len(stream.times) < WARM_UP:
                assert not reading.done(), reading.exception()
                time.sleep(0.01)
            for name, fields in kinds(number).items():
                begun[name] = clock()
                asked = [pool.submit(ask, url, {**fields, **shorter}, 3, stopped) for _ in range(neighbours)]
                for each in asked:
                    each.result(PATIENCE_S)
            end = clock()
        finally:
            stopped.set()
        reading.result(PATIENCE_S)
    starts = [*begun.values(), end]
    return {
        name: max(
            after - before for before, after in pairwise(stream.times) if after > start and before < until
        )
        for name, (start, until) in zip(begun, pairwise(starts), strict=True)
    }


def speed(url: str, fields: Mapping[str, Any]) -> float:
    """Tokens a second of a plain stream while all neighbours generate."""
    stream, stopped = PlainStream(url), Event()
    with ThreadPoolExecutor(NEIGHBOURS) as pool:
        endless = {"ignore_eos": True, **fields}
        running = [pool.submit(ask, url, endless, 4096, stopped) for _ in range(NEIGHBOURS)]
        try:
            wait_for(lambda: count_running(url) == NEIGHBOURS, PATIENCE_S)
            stream.read(COUNTED)
        finally:
            stopped.set()
        for each in running:
            each.result(PATIENCE_S)
    wait_for(lambda: not count_running(url), PATIENCE_S)
    return stream.tokens_per_s


def count_running(url: str) -> int:
    return len(CLIENT.get(f"{url}/debug/kv").json()["leases"])


def run_neighbours(
    rounds: int = 5,
    model: Path | None = None,
    command: Sequence[str] | None = None,
    out: Path | None = None,
    logs: Path | None = None,
) -> int:
    settings = ServerSettings(model=model, parallel=NEIGHBOURS + 1, ctx_size=1024 * (NEIGHBOURS + 1))
    # Without drafts: greedy neighbours would draft, and the comparison be with that.
    with serving("neighbours", settings, command, logs, ("--draft-tokens", "0")) as server:
        url = f"http://{server.address.host}:{server.address.port}"
        CLIENT.post(f"{url}/v1/completions", json={"prompt": PROSE, "max_tokens": 8})
        gaps: dict[str, list[float]] = {}
        speeds: dict[str, list[float]] = {}
        for number in range(rounds):
            for name, gap_s in gaps_of_all(url, number, NEIGHBOURS).items():
                gaps.setdefault(name, []).append(gap_s)
            wait_for(lambda: not count_running(url), PATIENCE_S)
            for name, fields in kinds(number).items():
                if name not in PREFILL:
                    pair = (speed(url, fields), speed(url, {"temperature": 0}))
                    speeds.setdefault(name, []).append(pair[0] / pair[1])
                    print(f"{name}: {gaps[name][-1]:.3f} s, {pair[0]:.1f} against {pair[1]:.1f}", flush=True)
    rows, failed = [], False
    for name, found in gaps.items():
        gap = median(found)
        ratio = median(speeds[name]) if name in speeds else 1.0
        held = gap <= MAX_GAP * TARGET_S and ratio >= MIN_SPEED
        failed |= not held
        rows.append((name, f"{gap:.3f} (to {max(found):.3f})", f"{ratio:.2f}", "met" if held else "missed"))
    columns = ("seven of", f"longest gap, s (≤ {MAX_GAP * TARGET_S:g})", f"speed (≥ {MIN_SPEED})", "bars")
    text = f"{Table(columns, rows).markdown()}\n\n{rounds} rounds, medians; one greedy stream, no drafts"
    return conclude("neighbours", text, {"gaps": gaps, "speeds": speeds}, out, failed=failed)


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__, "--model", "--command", "--out", "--logs", rounds=(5, "rounds"))
    return run_command(parser, arguments, run_neighbours)
