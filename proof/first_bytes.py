"""How soon a stream begins while a long prompt is being read.

One client streams the answer to a prompt of `--tokens` tokens, again and again, so that the engine is always
reading one. Beside it others open streams on every route. Timed is each from the moment the request was sent
to the end of its head, and to the first byte of its body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from bench.command import run_command, serving
from bench.figures import percentile
from bench.peers import ServerSettings
from proof.command import make_parser
from proof.shared.mixed import Ask, connect, read_chunk, read_head, send

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


async def open_stream(port: int, route: str, text: str, done: asyncio.Event | None = None) -> Timed:
    """Open a stream, read its first bytes, stay until it is time for another or all is done, and leave."""
    body = {**ROUTES[route](text), "stream": True, "cache_prompt": False}
    clock = asyncio.get_running_loop().time
    reader, writer = connection = await connect(port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await send(connection, Ask(route, body, len))
            sent = clock()
            status, _ = await read_head(connection)
            assert status == 200, f"{route}: status {status}"
            head_s = clock() - sent
            assert await read_chunk(reader), f"{route}: nothing came"
            timed = Timed(head_s, clock() - sent)
        if done is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), READING_S)
        return timed
    finally:
        writer.transport.abort()


async def measure(port: int, tokens: int, rounds: int) -> dict[str, list[Timed]]:
    """The streams of each route, beside a long prompt; and those of the long prompts (the route "")."""
    timed: dict[str, list[Timed]] = {route: [] for route in ("", *ROUTES)}
    for route in ROUTES:
        await open_stream(port, route, "hello")  # the first is slower
    done = asyncio.Event()

    async def read_long(reader: int) -> None:
        while not done.is_set():
            text = f"{reader} {len(timed[''])} " + "hello " * (tokens - 40)
            timed[""].append(await open_stream(port, "/v1/chat/completions", text, done))

    # Two, so that one is being read while the other is replaced.
    readers = asyncio.gather(*map(read_long, range(2)))
    try:
        for number in range(rounds):
            for route in ROUTES:
                timed[route].append(await open_stream(port, route, f"hello {number}"))
    finally:
        done.set()
        await readers
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
        timed = asyncio.run(measure(server.address.port, tokens, rounds))
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
