"""Work that outlives its connection: batches and streams under kills, lost connections and live load.

kills: every line is answered exactly once, with the text of an undisturbed server, while the server, its
engine or its tokenizer is killed at random. A killed server is started again on the same folder.
reconnects: streams of three dialects whose connections are lost at random; no event is lost or doubled.
prefixes: lines that share a prefix, shuffled among others; prefix tokens computed, at most 1.2 times once.
beside: tokens/s (at least 0.95) and the worst gap of live streams beside a batch against alone.
throughput: lines/s of a batch against a closed loop of the same parallelism, at least 0.97.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from proof.command import make_parser
from tests.driver.reconnects import DIALECTS, read_with_cuts
from tests.driver.reconnects import make_body as make_stream
from tests.driver.same_text import EXACT
from tests.driver.server import Server, make_client, wait_for
from tests.tiny_models import VOCABULARY, make_dense

ROUTE = "/v1/completions"
ROLES = ("server", "engine", "tokenizer")
SAMPLE = 50  # answers that are compared with an undisturbed server's
LIMIT_S, LOOK_S = 3600.0, 0.2
PARALLEL = 8
CONTEXT = 2048  # of one request
OWN = 20  # tokens of a line after the prefix
LIVE_STREAMS, LIVE_TOKENS = 4, 1500
MIN_LIVE, MIN_BATCH, MAX_PREFIX = 0.95, 0.97, 1.2


def make_body(number: int) -> dict[str, Any]:
    return {"prompt": f"Item {number} of a long night", "max_tokens": 24, "temperature": 0}


def make_file(bodies: Iterable[dict[str, Any]]) -> bytes:
    lines = (
        {"custom_id": str(number), "method": "POST", "url": ROUTE, "body": body}
        for number, body in enumerate(bodies)
    )
    return "\n".join(map(json.dumps, lines)).encode()


class Night:
    """A batch, and a server that is started again whenever it was killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        model = make_dense(folder / "dense.gguf", context=CONTEXT)
        size = ("--parallel", str(PARALLEL), "--ctx-size", str(PARALLEL * CONTEXT))
        self._arguments = (str(model), *size, *EXACT, "--state-dir", str(folder / "state"))
        self._starts = 0
        self.batch = ""
        self.server = self._start()

    def _start(self) -> Server:
        self._starts += 1
        return Server(self._folder / f"log {self._starts}", *self._arguments).__enter__()

    def begin(self, bodies: Iterable[dict[str, Any]]) -> None:
        files = {"file": ("night.jsonl", make_file(bodies))}
        file = self.server.client.post("/v1/files", data={"purpose": "batch"}, files=files).json()
        answer = self.server.post("/v1/batches", {"input_file_id": file["id"], "endpoint": ROUTE})
        self.batch = answer.json()["id"]

    def look(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.get(f"/v1/batches/{self.batch}")
        return found

    def has_come_to(self, place: int) -> bool:
        counts = self.look()["request_counts"]
        return bool(counts["completed"] + counts["failed"] >= place)

    def wait(self) -> dict[str, Any]:
        def has_ended() -> bool:
            time.sleep(LOOK_S)  # looking takes time from what is measured
            return self.look()["status"] in ("completed", "cancelled")

        wait_for(has_ended, LIMIT_S)
        return self.look()

    def kill(self, role: str) -> None:
        if role == "server":
            self.server.kill()
            self.server = self._start()
        else:
            wait_for(lambda: self.server.client.get("/ready").is_success)
            self.server.kill_worker(role)

    def read(self, file: str | None) -> list[dict[str, Any]]:
        if file is None:
            return []
        text = self.server.client.get(f"/v1/files/{file}/content", timeout=LIMIT_S).text
        return [json.loads(line) for line in text.splitlines()]


def try_kills(night: Night, given: Any, source: random.Random) -> bool:
    lines: int = given.lines
    night.begin(map(make_body, range(lines)))
    for place in sorted(source.sample(range(1, lines), given.kills)):
        wait_for(partial(night.has_come_to, place), LIMIT_S)
        night.kill(source.choice(ROLES))
    batch = night.wait()
    answers, failed = night.read(batch["output_file_id"]), night.read(batch["error_file_id"])
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in answers}
    doubled, missing = len(answers) - len(texts), lines - len(texts)
    with httpx.Client(base_url=night.server.url, trust_env=False, timeout=60) as client:
        sample = source.sample(range(lines), min(SAMPLE, lines))
        undisturbed = {number: client.post(ROUTE, json=make_body(number)).json() for number in sample}
    other = sum(texts.get(str(number)) != said["choices"][0]["text"] for number, said in undisturbed.items())
    said = f"{doubled} doubled, {missing} missing, {len(failed)} failed, {other} other texts"
    print(f"kills: {lines} lines, {given.kills} kills: {said}")
    return not (doubled or missing or failed or other)


def try_reconnects(night: Night, given: Any, source: random.Random) -> bool:
    """A stream is right if its events have each number once, and its text is that of a whole one."""
    cuts: list[list[int]] = [[] for _ in range(given.streams)]
    for _ in range(given.reconnects):
        source.choice(cuts).append(source.randrange(1, 2 * given.tokens * given.streams // given.reconnects))
    with make_client(base_url=night.server.url, limits=httpx.Limits(max_connections=None)) as client:
        bodies = {path: make_stream(path, given.tokens, reconnect_s=60) for path in DIALECTS}
        whole = {path: read_with_cuts(client, path, body, ()) for path, body in bodies.items()}

        def read(number: int) -> tuple[int, int]:
            path = [*DIALECTS][number % len(DIALECTS)]
            found = read_with_cuts(client, path, bodies[path], cuts[number], post=number % 2 == 0)
            same = "".join(one.text for one in found) == "".join(one.text for one in whole[path])
            numbers = [one.number for one in found]
            return int(numbers != list(range(len(numbers)))), int(not same)

        with ThreadPoolExecutor(given.streams) as pool:
            results = list(pool.map(read, range(given.streams)))
    wrong, other = (sum(column) for column in zip(*results, strict=True))
    said = f"{wrong} with lost or doubled events, {other} with another text"
    print(f"reconnects: {given.reconnects} of {given.streams} streams: {said}")
    return not (wrong or other)


def try_prefixes(night: Night, given: Any, source: random.Random) -> bool:
    def draw(count: int) -> list[int]:
        return [source.randrange(3, VOCABULARY) for _ in range(count)]

    prefix, count = draw(given.prefix), given.shared
    prompts = [(True, prefix + draw(OWN)) for _ in range(count)]
    prompts += [(False, draw(given.prefix + OWN)) for _ in range(count)]
    source.shuffle(prompts)
    night.begin({"prompt": prompt, "max_tokens": 4, "temperature": 0} for _, prompt in prompts)
    answers = night.read(night.wait()["output_file_id"])
    shared = [one for one in answers if prompts[int(one["custom_id"])][0]]
    details = [one["response"]["body"]["usage"]["prompt_tokens_details"] for one in shared]
    missed = [max(0, given.prefix - each["cached_tokens"]) for each in details]
    times, by = sum(missed) / given.prefix, sum(map(bool, missed))
    print(f"prefixes: {count} of {2 * count} lines share {given.prefix} tokens: {times:.2f} times, by {by}")
    return bool(len(answers) == 2 * count and times <= MAX_PREFIX)


def try_beside(night: Night, given: Any, source: random.Random) -> bool:
    def read(number: int) -> tuple[float, float]:
        body = {"prompt": f"Live {number}", "max_tokens": LIVE_TOKENS, "temperature": 0, "stream": True}
        times: list[float] = []
        with (
            make_client(base_url=night.server.url) as client,
            client.stream("POST", ROUTE, json=body) as answer,
        ):
            times += [time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return (len(times) - 1) / (times[-1] - times[0]), max(gaps)

    def measure() -> tuple[float, float]:
        with ThreadPoolExecutor(LIVE_STREAMS) as pool:
            speeds, gaps = zip(*pool.map(read, range(LIVE_STREAMS)), strict=True)
        return sum(speeds), max(gaps)

    measure()  # warms up
    alone = measure()
    night.begin(map(make_body, range(given.lines)))
    wait_for(partial(night.has_come_to, PARALLEL), LIMIT_S)
    beside = measure()
    unfinished = not night.has_come_to(given.lines)
    night.server.post(f"/v1/batches/{night.batch}/cancel", {})
    night.wait()
    ratio = beside[0] / alone[0]
    gaps = f"worst gap {1000 * beside[1]:.0f} ms, alone {1000 * alone[1]:.0f} ms"
    print(f"beside: {LIVE_STREAMS} live streams at {ratio:.3f} of their tokens/s alone; {gaps}")
    return unfinished and ratio >= MIN_LIVE


def try_throughput(night: Night, given: Any, source: random.Random) -> bool:
    def ask(client: httpx.Client, number: int) -> None:
        client.post(ROUTE, json=make_body(number)).raise_for_status()

    with make_client(base_url=night.server.url) as client, ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(partial(ask, client), range(PARALLEL)))  # warms up
        began = time.perf_counter()
        list(pool.map(partial(ask, client), range(given.lines)))
        loop_s = time.perf_counter() - began
    began = time.perf_counter()
    night.begin(map(make_body, range(given.lines, 2 * given.lines)))
    night.wait()
    ratio = loop_s / (time.perf_counter() - began)
    print(f"throughput: a batch of {given.lines} lines at {ratio:.3f} of a closed loop of {PARALLEL}")
    return ratio >= MIN_BATCH


PARTS: dict[str, Callable[[Night, Any, random.Random], bool]] = {
    "kills": try_kills,
    "reconnects": try_reconnects,
    "prefixes": try_prefixes,
    "beside": try_beside,
    "throughput": try_throughput,
}


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__,
        __doc__,
        part=([], f"only this part ({', '.join(PARTS)})"),
        lines=(10_000, "lines of a batch"),
        kills=(50, "kills"),
        streams=(50, "streams that are reconnected to"),
        reconnects=(200, "lost connections"),
        tokens=(400, "tokens of such a stream"),
        shared=(1000, "lines with a common prefix, and as many without"),
        prefix=(1000, "tokens of the prefix"),
        seed=(1, "of what is random"),
    )
    given = parser.parse_args(arguments)
    if unknown := set(given.part) - set(PARTS):
        parser.error(f"there is no part {', '.join(unknown)}")
    source, failed = random.Random(given.seed), []
    for name in given.part or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            night = Night(Path(folder))
            try:
                if not PARTS[name](night, given, source):
                    failed.append(name)
            finally:
                night.server.kill()
    print(f"failed: {', '.join(failed)}" if failed else "all parts passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
