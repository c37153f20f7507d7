"""How soon a stream begins while a long prompt is being read.

One client streams the answer to a prompt of `--tokens` tokens, again and again, so that the engine is always
reading one. Beside it others open streams on every route. Timed is each from the moment the request was sent
to the end of its head, and to the first byte of its body.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.command import run_command, serving
from bench.figures import percentile
from bench.peers import ServerSettings
from proof.command import make_parser

MAX_MEDIAN_S = 0.1
MAX_P99_S = 0.3
PATIENCE_S = 120.0
READING_S = 2.0  # after which a long prompt is replaced by another
ROUTES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
    "/v1/responses": lambda text: {"input": text, "store": False},
    "/generate_stream": lambda text: {"prompt": text},
    "/completion": lambda text: {"prompt": text},
}


class Timed(NamedTuple):
    head_s: float
    first_s: float  # the first byte of the body


def open_stream(
    address: tuple[str, int], route: str, text: str, stay: Callable[[], object] = lambda: None
) -> Timed:
    """Open a stream, read its first bytes, `stay`, and disconnect."""
    body = json.dumps({**ROUTES[route](text), "stream": True, "cache_prompt": False}).encode()
    head = f"POST {route} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(address, PATIENCE_S) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        sent, data, head_s = time.perf_counter(), b"", 0.0
        while True:
            piece = connection.recv(1 << 16)
            assert piece, f"{route}: the connection was closed: {data!r}"
            data += piece
            answer, end, content = data.partition(b"\r\n\r\n")
            if end and not head_s:
                assert answer.startswith(b"HTTP/1.1 200 "), data
                head_s = time.perf_counter() - sent
            if content:
                first_s = time.perf_counter() - sent
                stay()
                return Timed(head_s, first_s)


def measure(address: tuple[str, int], tokens: int, rounds: int) -> dict[str, list[Timed]]:
    """The streams of each route, beside a long prompt; and those of the long prompts (the route "")."""
    timed: dict[str, list[Timed]] = {route: [] for route in ("", *ROUTES)}
    for route in ROUTES:
        open_stream(address, route, "hello")  # the first is slower
    done = threading.Event()

    def read_long() -> None:
        number = 0
        while not done.is_set():
            number += 1
            text = f"{number} " + "hello " * (tokens - 40)
            stay = partial(done.wait, READING_S)
            timed[""].append(open_stream(address, "/v1/chat/completions", text, stay))

    # Two, so that one is being read while the other is replaced.
    readers = [threading.Thread(target=read_long) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for number in range(rounds):
            for route in ROUTES:
                timed[route].append(open_stream(address, route, f"hello {number}"))
    finally:
        done.set()
        for reader in readers:
            reader.join(PATIENCE_S)
    return timed


def run_first_bytes(
    tokens: int = 4000,
    rounds: int = 50,
    command: Sequence[str] | None = None,
    logs: Path | None = None,
    model: Path | None = None,
) -> int:
    """Print each route; 0 if all begin in time, else 1."""
    late = 0
    settings = ServerSettings(model=model, parallel=8, ctx_size=8 * (tokens + 200))
    with serving("first bytes", settings, command, logs) as server:
        address = (server.address.host, server.address.port)
        timed = measure(address, tokens, rounds)
    for route, streams in timed.items():
        heads = [one.head_s for one in streams]
        firsts = [one.first_s for one in streams]
        good = percentile(heads, 50) <= MAX_MEDIAN_S and percentile(heads, 99) <= MAX_P99_S
        late += not good
        print(
            f"{route or f'prompts of {tokens} tokens'}: head after {1000 * percentile(heads, 50):.0f} ms "
            f"(p99 {1000 * percentile(heads, 99):.0f} ms), first byte after "
            f"{1000 * percentile(firsts, 50):.0f} ms (p99 {1000 * percentile(firsts, 99):.0f} ms), "
            f"{len(streams)} streams{'' if good else ': FAIL'}"
        )
    return 1 if late else 0


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__,
        __doc__,
        *("--model", "--logs", "--command"),
        tokens=(4000, "of the long prompts"),
        rounds=(50, "of each route"),
    )
    return run_command(parser, arguments, run_first_bytes)
