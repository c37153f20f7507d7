"""100,000 mutated HTTP requests over bare sockets, to a real server.

Valid requests of every route are the seeds. They are mutated below HTTP: bytes, lengths, headers, chunks,
pipelining, truncation, numbers, NUL, line ends, the shapes of request smuggling, JSON and UTF-8 that are
none, and halves that come late. The same seed sends the same requests. After each 1,000 the server answers,
its workers are the same processes, and nothing was answered with a server error that is not documented.
"""

from __future__ import annotations

import re
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from proof.command import make_parser
from proof.evidence import Bar, Evidence, Series, record
from proof.shared.http_mutations import Pieces, make_request, make_seeds
from tests.driver.server import PATIENCE_S, Server, wait_for
from tests.e2e.golden.record import PROGRAM

COUNT = 100_000
ROUND = 1000
THREADS = 6
READ_S = 2.0  # for an answer; one that has not begun by then is counted, and the client leaves
LATE_S = 0.02
SETTINGS = ("--parallel", "8", "--ctx-size", "8192", "--queue-size", "64")
# Documented: 501 of POST /props, 503 when it is busy or has too many connections, 504 of a deadline.
EXPECTED = (501, 503, 504)


def send(port: int, pieces: Pieces, *, leaves: bool) -> str:
    """The worst status that came: a number; or `closed` without one, `silent`, `broken`, `left`."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
            connection.settimeout(READ_S)
            for place, piece in enumerate(pieces):
                if place:
                    time.sleep(LATE_S)
                connection.sendall(piece)
            if leaves:
                return "left"
            connection.shutdown(socket.SHUT_WR)
            answer = _read(connection)
    except OSError:
        return "broken"
    if answer is None:
        return "silent"
    statuses = re.findall(rb"HTTP/1\.[01] (\d{3}) ", answer)
    worst = max((int(status) for status in statuses), default=0)
    return str(worst) if statuses else ("closed" if not answer else "other")


def _read(connection: socket.socket) -> bytes | None:
    """All that comes until the server closes, for a bounded time; None: nothing did."""
    answer, end = b"", time.monotonic() + READ_S
    try:
        while time.monotonic() < end and (piece := connection.recv(65536)):
            answer += piece
    except TimeoutError:
        return answer or None
    except ConnectionResetError:
        pass
    return answer


class Findings:
    """What the requests came to."""

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.unexpected: list[tuple[int, str, str]] = []
        self.deaths: list[str] = []
        self.health_s: list[float] = []

    def add(self, number: int, kind: str, status: str) -> None:
        self.statuses[status] += 1
        self.kinds[kind] += 1
        if status == "other" or (status.isdigit() and int(status) >= 500 and int(status) not in EXPECTED):
            self.unexpected.append((number, kind, status))

    def check(self, server: Server, pids: dict[str, int], after: int) -> None:
        began = time.monotonic()
        answer = server.client.get("/health")
        self.health_s.append(time.monotonic() - began)
        if answer.status_code != 200:
            self.deaths.append(f"/health answers {answer.status_code} after {after}")
        now = {role: server.child(role) for role in pids}
        if now != pids:
            self.deaths.append(f"{[role for role in pids if now[role] != pids[role]]} died before {after}")
            pids.update(now)


def fuzz(server: Server, count: int, seed: int) -> Findings:
    """Send so many requests from several threads."""
    seeds = make_seeds(server.get("/openapi.json"))
    pids = {role: server.child(role) for role in ("engine", "tokenizer")}
    findings, port = Findings(), server.port

    def one(number: int) -> tuple[int, str, str]:
        kind, pieces = make_request(seeds, seed, number)
        return number, kind, send(port, pieces, leaves=kind == "truncate" and number % 2 == 0)

    with ThreadPoolExecutor(THREADS) as pool:
        for begin in range(0, count, ROUND):
            for found in pool.map(one, range(begin, min(count, begin + ROUND))):
                findings.add(*found)
            findings.check(server, pids, begin + ROUND)
            if begin // ROUND % 10 == 9:
                print(begin + ROUND, dict(findings.statuses.most_common(8)), flush=True)
    wait_for(server.idle, message="requests or KV cells are left")
    return findings


def make_evidence(findings: Findings, count: int, seconds: float, seed: int, tracebacks: int) -> Evidence:
    """The row of the proof."""
    sent = sum(findings.statuses.values())
    answered = ", ".join(f"{status} {times:,}" for status, times in findings.statuses.most_common())
    unexpected = "; ".join(map(str, findings.unexpected[:5])) or "0"
    deaths, slowest = "; ".join(findings.deaths) or "0", max(findings.health_s)
    return Evidence(
        name="fuzz-http",
        order=61,
        title="Mutated HTTP below the routes",
        about=(
            f"{count:,} requests over bare sockets from {THREADS} threads, seed {seed}, to a real server "
            "with the scripted model: valid requests of every route with changed bytes, lengths, headers, "
            "chunks, line ends and JSON, pipelined, smuggled, cut off and late. After each 1,000: /health, "
            f"and the worker processes. Documented server errors are {', '.join(map(str, EXPECTED))}."
        ),
        bars=(
            Bar("requests sent", f"{COUNT:,}", f"{sent:,}", sent >= COUNT),
            Bar("undocumented server errors", "0", unexpected, not findings.unexpected),
            Bar("deaths, or /health other than 200", "0", deaths, not findings.deaths),
            Bar("tracebacks in the log", "0", str(tracebacks), not tracebacks),
        ),
        mended=(
            "The first of pipelined requests did not hear that its client had left, and wrote to a closed "
            "connection (`test_the_first_of_pipelined_requests_hears_that_the_client_has_left`).",
            "Bytes that are no HTTP were answered with a 400 in the middle of the response before them "
            "(`test_what_is_no_http_is_not_answered_in_the_middle_of_a_response`).",
        ),
        figures={"answers": answered, "requests/s": sent / seconds, "slowest /health, ms": slowest * 1000},
        series=[Series("/health after each 1,000", "ms", [1000 * each for each in findings.health_s])],
    )


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__, count=(COUNT, "requests"), seed=(1, "of their mutations"))
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        log = Path(name, "log")
        with Server(log, *SETTINGS, program=PROGRAM, CLLM_LOG_LEVEL="warning") as server:
            began = time.monotonic()
            findings = fuzz(server, options.count, options.seed)
            seconds = time.monotonic() - began
            tracebacks = server.log_text.count("Traceback")
            if tracebacks or findings.unexpected or findings.deaths:
                print(findings.unexpected[:20], findings.deaths, server.log_text[-6000:])
    print(dict(findings.kinds), dict(findings.statuses), f"{seconds:.0f} s")
    if options.count < COUNT:
        return int(bool(tracebacks or findings.unexpected or findings.deaths))
    return record(make_evidence(findings, options.count, seconds, options.seed, tracebacks))
