"""The earlier server's failing cases, against `cllm serve`.

Two servers are started at debug level, one on the embedded model and one on a tiny one. What must hold is
printed as a table; the exit code is 0 only if all of it does.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.client import Answer, BadAnswer, CllmClient
from bench.command import conclude, run_command
from bench.decode_bench import DecodeBench
from bench.peers import ServerSettings, cllm_peer, embedded_model, log_folder, running
from bench.report import Table
from proof.command import make_parser
from tests.driver.slot_log import SlotLog


@dataclass(frozen=True, slots=True)
class Drift:
    """Requests and probes, one probe taken just before each request; seconds."""

    requests_s: tuple[float, ...]
    probes_s: tuple[float, ...]

    @property
    def costs(self) -> tuple[float, ...]:
        """Each request in units of the probe before it: the machine's own pace divided out."""
        return tuple(request / probe for request, probe in zip(self.requests_s, self.probes_s, strict=True))


def drift_ratio(series: Sequence[Drift]) -> float:
    """Cost at the end of a series over that at its beginning; several series are pooled.

    The end is the last tenth, but at least three requests: of one short series a hiccup would decide.
    """
    return _last_over_first([drift.costs for drift in series])


def raw_ratio(series: Sequence[Drift]) -> float:
    """The same in plain seconds, the machine's own drift included."""
    return _last_over_first([drift.requests_s for drift in series])


def _last_over_first(series: Sequence[Sequence[float]]) -> float:
    first: list[float] = []
    last: list[float] = []
    for values in series:
        window = min(max(len(values) // 10, 3), max(len(values) // 2, 1))
        first += values[:window]
        last += values[-window:]
    return median(last) / median(first)


SUMS = ("1+1=", "2+2=", "3+3=")
QUESTIONS = ("Hello, how are you?", "What is AI?", "Tell me a joke.")
FIVE = (*SUMS, *QUESTIONS[:2])
MAX_DRIFT_TEN = 1.10
MAX_DRIFT_THOUSAND = 1.03
IDLE_GRACE_S = 0.5  # an answer may overtake the bookkeeping of its own end, by a step at most


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold."""

    case: str
    what: str
    detail: str
    passed: bool


@dataclass(slots=True)
class Seeds:
    """Cases against one server: collects their checks and the ids of all requests it sent."""

    model: str
    path: Path
    client: CllmClient
    checks: list[Check] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    drifts: dict[str, list[Drift]] = field(default_factory=dict)

    def in_a_row(self, prompts: Sequence[str]) -> None:
        """Case a: one after another, all valid."""

        def run() -> tuple[bool, str]:
            answers = [self._generate(prompt, 16) for prompt in prompts]
            return True, _quoted(answers)

        self._check("a", f"{len(prompts)} requests in a row: {', '.join(prompts)}", run)
        self.idle()

    def concurrent(self, prompts: Sequence[str]) -> None:
        """Case b: all at the same time, all valid."""

        def run() -> tuple[bool, str]:
            with ThreadPoolExecutor(len(prompts)) as pool:
                answers = list(pool.map(lambda prompt: self._generate(prompt, 16), prompts))
            return True, _quoted(answers)

        self._check("b", f"{len(prompts)} concurrent requests", run)
        self.idle()

    def identical(self, count: int, max_tokens: int, series: int, max_drift: float) -> None:
        """Case c: the same request again and again: no slower, no more work, the same words.

        Where a series is short it is run several times, and their beginnings and ends are pooled.
        """
        what = f"{count} identical requests, max_tokens {max_tokens}"
        answers: list[Answer] = []
        drifts = self.drifts.setdefault(what, [])

        def run() -> tuple[bool, str]:
            self._generate(QUESTIONS[0], max_tokens)  # warm-up
            with DecodeBench(self.path) as probe:
                probe(1, 6, max_tokens)  # warm-up
                for _ in range(series):
                    drift, more = self._series(probe, count, max_tokens)
                    drifts.append(drift)
                    answers.extend(more)
            ratio, raw = drift_ratio(drifts), raw_ratio(drifts)
            took = 1000 * median(drifts[-1].requests_s)
            detail = f"{ratio:.3f} ({raw:.3f} with the machine's own), {took:.1f} ms a request"
            return ratio <= max_drift, detail + (f", {series} series pooled" if series > 1 else "")

        self._check("c", f"{what}: drift ≤ {max_drift:.2f}", run)
        self._check("c", f"{what}: work counters exactly flat", lambda: _flat(answers))
        self.idle()

    def idle(self) -> None:
        """Case e: nothing is left behind."""
        self._check("e", "/debug/kv: nothing in use", self._idle)

    def audit(self, log: Path) -> None:
        """Case d, after the server has ended: its log."""

        def run() -> tuple[bool, str]:
            with log.open(errors="replace") as lines:
                faults = SlotLog(lines).find_faults(self.request_ids)
            if faults:
                return False, f"{len(faults)} faults: {'; '.join(faults[:3])}"
            return True, f"{len(self.request_ids)} requests"

        self._check("d", "log: one lease and one release per request, no cell astray, no position error", run)

    def _generate(self, prompt: str, max_tokens: int, ignore_eos: bool = False) -> Answer:
        answer = self.client.generate(prompt, max_tokens, ignore_eos=ignore_eos)
        self.request_ids.append(answer.id)
        return answer

    def _series(self, probe: DecodeBench, count: int, max_tokens: int) -> tuple[Drift, list[Answer]]:
        probes, answers = [], []
        for _ in range(count):
            probes.append(probe(1, 6, max_tokens).total_s)
            answers.append(self._generate(QUESTIONS[0], max_tokens, ignore_eos=True))
        return Drift(tuple(answer.elapsed_s for answer in answers), tuple(probes)), answers

    def _idle(self) -> tuple[bool, str]:
        deadline = time.monotonic() + IDLE_GRACE_S
        while True:
            kv = self.client.kv()
            counters = kv["counters"]
            balance = counters["leased_total"] - counters["released_total"]
            left = (kv["sequences"]["leased"], kv["cells"]["used"], len(kv["leases"]), balance)
            if not any(left):
                return True, f"{counters['released_total']} leases so far"
            if time.monotonic() > deadline:
                return False, "leased {}, cells {}, leases {}, leased less released {}".format(*left)
            time.sleep(0.01)

    def _check(self, case: str, what: str, run: Callable[[], tuple[bool, str]]) -> None:
        try:
            passed, detail = run()
        except (BadAnswer, KeyError, OSError) as error:
            passed, detail = False, f"{type(error).__name__}: {error}"
        self.checks.append(Check(case, f"{self.model}: {what}", detail, passed))
        print(f"{'pass' if passed else 'FAIL'}  {case}  {self.model}: {what}", file=sys.stderr, flush=True)


def run_seeds(
    tiny: Path,
    out: Path | None = None,
    command: Sequence[str] | None = None,
    logs: Path | None = None,
) -> int:
    """Run all cases, print the table and a summary line; 0 if everything passed, else 1.

    Raises SetupError if a server does not start.
    """
    load_average = os.getloadavg()[0]
    with log_folder(logs) as folder:
        with _server(None, folder / "embedded.log", command) as embedded:
            for prompts in (SUMS, QUESTIONS, FIVE):
                embedded.in_a_row(prompts)
            embedded.concurrent(FIVE)
            embedded.identical(10, 16, series=20, max_drift=MAX_DRIFT_TEN)
            embedded.identical(10, 1, series=20, max_drift=MAX_DRIFT_TEN)
        with _server(tiny, folder / "tiny.log", command) as small:
            small.in_a_row(SUMS)
            small.concurrent(FIVE)
            small.identical(1000, 16, series=1, max_drift=MAX_DRIFT_THOUSAND)
    checks = [*embedded.checks, *small.checks]
    table = Table(
        ("case", "what must hold", "", "measured"),
        [(check.case, check.what, "pass" if check.passed else "FAIL", check.detail) for check in checks],
    )
    failed = sum(not check.passed for check in checks)
    busy = f"load average at the start {load_average:.2f}; drift means little on a busy machine"
    text = f"{table.markdown()}\n\n{busy}\n{len(checks) - failed} passed, {failed} failed"
    data = {"checks": checks, "embedded": embedded.drifts, "tiny": small.drifts}
    return conclude("seeds", text, data, out, failed=bool(failed))


@contextmanager
def _server(model: Path | None, log: Path, command: Sequence[str] | None) -> Iterator[Seeds]:
    """A server at debug level and the cases against it; its log is audited when it has ended."""
    settings = ServerSettings(model=model, log_level="debug")
    with running(cllm_peer(settings, command), log) as server, CllmClient(server.address) as client:
        seeds = Seeds("tiny" if model else "embedded", model or embedded_model(), client)
        yield seeds
    seeds.audit(log)


def _flat(answers: Sequence[Answer]) -> tuple[bool, str]:
    """Whether all of them cost the same, counter by counter, and say the same."""
    if not answers or not answers[0].usage:
        return False, "no counters"
    found = {tuple(sorted(answer.usage.items())) for answer in answers}
    texts = {answer.text for answer in answers}
    if len(found) == 1 and len(texts) == 1:
        names = ("decoded_tokens", "steps", "ubatches", "cells")
        return True, ", ".join(f"{name} {answers[0].usage[name]}" for name in names)
    return False, f"{len(found)} different costs, {len(texts)} different texts: {sorted(found)[:2]}"


def _quoted(answers: Sequence[Answer]) -> str:
    return ", ".join(repr(answer.text[:14]) for answer in answers)


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__, "--tiny", "--out", "--logs", "--command")
    return run_command(parser, arguments, run_seeds)
