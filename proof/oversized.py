"""Prompts of 7.8 MB at once are refused at once, and a `hello` beside them.

Each big prompt is timed from the moment its body was sent to its answer, a 400. Meanwhile one client asks
`hello` again and again; its time is compared with what it takes alone.
"""

from __future__ import annotations

import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from bench.command import run_command, serving
from bench.peers import ServerSettings
from cllm.errors import SetupError
from proof.command import make_parser

HELLO = {"prompt": "hello", "max_tokens": 1, "temperature": 0}
ROUTES: dict[str, Callable[[str], object]] = {
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 1},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
}
ALONE = 10  # times that `hello` is asked alone
PATIENCE_S = 120.0


class Timed(NamedTuple):
    status: int
    seconds: float  # from the end of sending
    message: str


def ask(address: tuple[str, int], route: str, body: bytes) -> Timed:
    """Send a request whole, on a connection of its own."""
    head = f"POST {route} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    with socket.create_connection(address, PATIENCE_S) as connection:
        connection.sendall(head.encode() + body)
        sent = time.perf_counter()
        answer = bytearray()
        while chunk := connection.recv(1 << 16):
            answer += chunk
        seconds = time.perf_counter() - sent
    text = answer.partition(b"\r\n\r\n")[2].decode()
    return Timed(int(answer.split(b" ", 2)[1]), seconds, text)


def measure(
    address: tuple[str, int], route: str, clients: int, size: int
) -> tuple[list[Timed], list[Timed], list[Timed]]:
    """The big prompts, `hello` beside them, and `hello` alone."""
    body = json.dumps(ROUTES[route]("word " * (size // 5))).encode()
    hello = json.dumps(HELLO).encode()
    alone = [ask(address, "/v1/completions", hello) for _ in range(ALONE)]
    beside: list[Timed] = []
    done = threading.Event()

    def greet() -> None:
        while not done.is_set():
            beside.append(ask(address, "/v1/completions", hello))

    with ThreadPoolExecutor(clients + 1) as pool:
        greeting = pool.submit(greet)
        try:
            big = list(pool.map(lambda _: ask(address, route, body), range(clients)))
        finally:
            done.set()
        greeting.result()
    return big, beside, alone


def run_oversized(
    clients: int = 16,
    megabytes: float = 7.8,
    command: Sequence[str] | None = None,
    logs: Path | None = None,
    model: Path | None = None,
) -> int:
    """Measure each route, print; 0 if every big prompt is refused and every `hello` answered."""
    faults = 0
    with serving("oversized", ServerSettings(model=model), command, logs) as server:
        address = (server.address.host, server.address.port)
        ask(address, "/v1/completions", json.dumps(HELLO).encode())
        for route in ROUTES:
            big, beside, alone = measure(address, route, clients, int(megabytes * 1e6))
            if not beside:
                raise SetupError("no hello was asked meanwhile")
            refused = [one.status == 400 and "has at least" in one.message for one in big]
            answered = [one.status == 200 for one in beside]
            times = sorted(one.seconds for one in big)
            usual = statistics.median(one.seconds for one in alone)
            greeted = [one.seconds for one in beside]
            faults += refused.count(False) + answered.count(False)
            print(
                f"{route}: {clients} prompts of {megabytes:g} MB: {sum(refused)} refused by bytes after "
                f"{statistics.median(times):.3f} s (at most {times[-1]:.3f} s); hello {usual:.3f} s alone, "
                f"{statistics.median(greeted):.3f} s beside them (at most {max(greeted):.3f} s, "
                f"{len(greeted)} times, {answered.count(False)} failed)"
            )
    return 1 if faults else 0


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__,
        __doc__,
        *("--model", "--logs", "--command"),
        clients=(16, "prompts at once"),
        megabytes=(7.8, "of each prompt"),
    )
    return run_command(parser, arguments, run_oversized)
