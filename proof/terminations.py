"""100 times SIGTERM under load, and kill -9 while the disk cache is written.

After each SIGTERM the server must end with 0 in time and leave no process behind. After each end, the next
server must find the disk cache readable: a prompt that it knew before is answered from there, with the same
text.
"""

from __future__ import annotations

import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench.figures import percentile
from bench.workloads.text import words
from proof.command import make_parser
from proof.evidence import Bar, Evidence, Series, record
from proof.resume import EXACT
from tests.driver.server import Server, alive, get_children, wait_for

STREAMS, SLOTS = 12, 8
DRAIN_S, MARGIN_S = 2.0, 2.0
KNOWN_WORDS = 120
KILL_EVERY = 5  # one end in so many is a kill
STATE_S = 20.0  # until something is on disk


class Terminations:
    """A server after the other on one cache folder."""

    def __init__(self, tiny: Path, folder: Path, seed: int = 11) -> None:
        self._folder, self._cache = folder, folder / "cache"
        self._random = random.Random(seed)
        flags = ("--parallel", str(SLOTS), "--ctx-size", str(SLOTS * 1024), "--drain-s", str(DRAIN_S))
        disk = ("--cache-disk-mb", "64", "--cache-dir", str(self._cache))
        self._flags = (str(tiny), *flags, *disk, *EXACT)
        self._known = words("a text that every server is asked about", KNOWN_WORDS)
        self._expected = ""
        self.ended_s: list[float] = []
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []

    def run_one(self, number: int) -> None:
        """Start, ask, put under load, end."""
        log = self._folder / "server.log"
        log.unlink(missing_ok=True)
        server = Server(log, *self._flags, CLLM_LOG_LEVEL="info")
        try:
            server.__enter__()
            self._ask_known(server, first=number == 0)
            if number == 0:  # the first one writes it down
                wait_for(lambda: [*self._cache.glob("kv/*/*.kv")], STATE_S, "nothing was written to disk")
            kills = number % KILL_EVERY == KILL_EVERY - 1
            load = [] if kills else self._load(server)
            children = get_children(server.process.pid)
            if kills:  # idle states are written behind, at some moment of these
                server.generate(words(f"new {number}", 200), 4)
                time.sleep(self._random.uniform(0.0, 2.0))
                self._kill(server, children)
            else:
                time.sleep(self._random.uniform(0.05, 0.8))
                self._terminate(server, children)
            for connection in load:
                connection.close()
        finally:
            server.kill()

    def _ask_known(self, server: Server, *, first: bool) -> None:
        body = {"prompt": self._known, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = server.post("/v1/completions", body).json()
        text, cached = answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        if first:
            self._expected = text
        elif text != self._expected:
            self.faults.append(f"another text: {text!r}, not {self._expected!r}")
        elif not cached:
            self.outcomes["known prompt was computed anew"] += 1
        else:
            self.outcomes["known prompt came from disk"] += 1
        if "damaged" in server.log_text:
            self.outcomes["damaged file ignored"] += 1

    def _load(self, server: Server) -> list[socket.socket]:
        lengths = [self._random.choice((8, 64, 700)) for _ in range(STREAMS)]
        bodies = [
            {"prompt": words(f"{place}", 10), "max_tokens": length, "ignore_eos": True}
            for place, length in enumerate(lengths)
        ]
        return [server.connect(body, "/generate_stream") for body in bodies]

    def _terminate(self, server: Server, children: dict[int, str]) -> None:
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        try:
            code: int | str = server.process.wait(60.0)
        except Exception:
            code = "still running after 60 s"
        self.ended_s.append(time.monotonic() - began)
        orphans = [line for pid, line in children.items() if alive(pid)]
        self.outcomes["SIGTERM"] += 1
        if code != 0 or orphans:
            self.faults.append(f"exit {code}, left behind {orphans}: {server.log_tail[-300:]}")

    def _kill(self, server: Server, children: dict[int, str]) -> None:
        server.process.kill()
        self.outcomes["kill -9"] += 1
        wait_for(lambda: not any(map(alive, children)), 10.0, "children outlived their parent")


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__, "--tiny", count=(125, "servers; one in five is killed"))
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp())
    found = Terminations(options.tiny, folder)
    for number in range(options.count):
        found.run_one(number)
        if number % 10 == 9:
            print(f"{number + 1}: {dict(found.outcomes)}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    for fault in found.faults[:5]:
        print(fault, file=sys.stderr)
    terms, kills = found.outcomes["SIGTERM"], found.outcomes["kill -9"]
    limit_s, longest_s = DRAIN_S + MARGIN_S, max(found.ended_s)
    readable = found.outcomes["known prompt came from disk"]
    known = f"starts after an end ({kills} of them kill -9) that found the known prompt on disk"
    bars = [
        Bar("SIGTERM: exit 0, no process left", f"{terms}", f"{terms - len(found.faults)}", not found.faults),
        Bar(
            "longest end", f"≤ drain limit + 2 s = {limit_s:g} s", f"{longest_s:.2f} s", longest_s <= limit_s
        ),
        Bar(known, f"{options.count - 1}", f"{readable}", readable == options.count - 1),
    ]
    return record(
        Evidence(
            name="terminations",
            order=40,
            title="Ends",
            about=(
                "A server after the other on one cache folder: each is asked a prompt that the first one "
                f"knew, gets {STREAMS} streams, and SIGTERM within 0.8 s; or, idle, kill -9 within 2 s."
            ),
            bars=bars,
            figures={"median end, s": percentile(found.ended_s, 50), **found.outcomes},
            series=[Series("from SIGTERM to the end", "servers", found.ended_s, "seconds")],
        )
    )
