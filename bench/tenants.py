"""`python -m bench.tenants`: two tenants, one of which sends ten times what the other sends.

The small tenant's time to the first token is compared with what it is when it has half the machine for
itself: half the sequences, half the threads. (With a single thread there is no such half: then with a second
tenant that sends as much as itself.) The engine runs in its child process, as under the server; requests
are handed to it directly, each with its tenant.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.command import conclude, make_parser, run_command
from bench.figures import percentile
from bench.peers import ServerSettings, embedded_model
from bench.report import Table
from cllm.config import EngineConfig
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.types import Prompt, Request, SamplingParams
from cllm.workers.executor import ProcessExecutor

MAX_SLOWER = 1.5
FACTOR = 10
PROMPT_TOKENS, GENERATED = 64, 48
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Share:
    """What one tenant had; times in seconds."""

    tenant: str
    clients: int
    answered: int
    tokens_per_s: float
    first_token_p50_s: float
    first_token_p99_s: float


async def measure(config: EngineConfig, clients: dict[str, int], seconds: float) -> list[Share]:
    """Each tenant's clients ask, and ask again when they are answered, for so long."""
    engine = EngineClient(ProcessExecutor(config, log_level="warning"))
    engine.start(asyncio.get_running_loop())
    try:
        await asyncio.wrap_future(engine.loaded)
        assert engine.info is not None
        vocabulary = engine.info.vocabulary_size
        settled = time.monotonic() + max(2.0, seconds / 6)
        end = settled + seconds
        first: dict[str, list[float]] = {name: [] for name in clients}
        tokens = dict.fromkeys(clients, 0)
        numbers = itertools.count()

        async def client(tenant: str) -> None:
            while (started := time.monotonic()) < end:  # in the end it is cancelled
                number = next(numbers)
                source = random.Random(number)
                prompt = tuple(source.randrange(300, vocabulary) for _ in range(PROMPT_TOKENS))
                request = Request(
                    id=str(number),
                    prompt=Prompt(prompt),
                    max_tokens=GENERATED,
                    sampling=GREEDY,
                    tenant=tenant,
                )
                begun = False
                async for delta in engine.submit(request, AsyncOutputStream):
                    now = time.monotonic()
                    if delta.tokens and settled < now < end:
                        tokens[tenant] += len(delta.tokens) + (0 if begun else PROMPT_TOKENS)
                        if not begun and started > settled:
                            first[tenant].append(now - started)
                    begun = begun or bool(delta.tokens)

        asking = [
            asyncio.ensure_future(client(name)) for name, count in clients.items() for _ in range(count)
        ]
        done, late = await asyncio.wait(asking, timeout=end - time.monotonic())
        for task in late:
            task.cancel()
        for task in done:
            task.result()  # raises what went wrong
        return [
            Share(
                tenant=name,
                clients=clients[name],
                answered=len(first[name]),
                tokens_per_s=tokens[name] / seconds,
                first_token_p50_s=percentile(first[name], 50),
                first_token_p99_s=percentile(first[name], 99),
            )
            for name in clients
        ]
    finally:
        await asyncio.get_running_loop().run_in_executor(None, engine.stop)


def run_tenants(
    model: Path, parallel: int, threads: int, seconds: float
) -> tuple[str, float, list[list[Share]]]:
    """(what it is compared with, ratio of the small tenant's first-token p50, both measurements)."""
    few = max(1, parallel // 2)
    whole = EngineConfig(model=str(model), parallel=parallel, ctx_size=512 * parallel, threads=threads)
    half = EngineConfig(model=str(model), parallel=few, ctx_size=512 * few, threads=max(1, threads // 2))
    if threads > 1:
        basis, alone = "alone with half the machine", (half, {"small": few})
    else:
        basis, alone = "beside an equal", (whole, {"small": few, "equal": few})
    before = asyncio.run(measure(*alone, seconds))
    beside = asyncio.run(measure(whole, {"small": few, "big": FACTOR * few}, seconds))
    return basis, beside[0].first_token_p50_s / before[0].first_token_p50_s, [before, beside]


def run(model: Path | None, threads: int, parallel: int, seconds: float, out: Path | None) -> int:
    """0 if the bar is met, else 1."""
    threads = ServerSettings(threads=threads).thread_count
    basis, ratio, measured = run_tenants(model or embedded_model(), parallel, threads, seconds)
    text, data = show(basis, ratio, measured), {"ratio": ratio, "measured": measured}
    return conclude("tenants", text, data, out, failed=not ratio <= MAX_SLOWER)


def main(arguments: Sequence[str] | None = None) -> int:
    shared = ("--model", "--threads", "--parallel", "--out")
    parser = make_parser("bench.tenants", __doc__, *shared, seconds=(30.0, "how long each part takes"))
    return run_command(parser, arguments, run)


def show(basis: str, ratio: float, measured: Sequence[Sequence[Share]]) -> str:
    """A table, and the verdict."""
    rows = []
    for setting, shares in zip((basis, f"beside {FACTOR} times as much"), measured, strict=True):
        for share in shares:
            counts = (share.clients, share.answered, round(share.tokens_per_s))
            times = (f"{each:.3f}" for each in (share.first_token_p50_s, share.first_token_p99_s))
            rows.append((setting, share.tenant, *map(str, counts), *times))
    columns = ("setting", "tenant", "clients", "answered", "tokens/s", "first token p50, s", "p99, s")
    verdict = "pass" if ratio <= MAX_SLOWER else "FAIL"
    found = f"the small tenant's first-token p50 is {ratio:.2f} × what it is {basis}"
    return f"{Table(columns, rows).markdown()}\n\n{verdict}: {found}; the bar is {MAX_SLOWER} ×"


if __name__ == "__main__":
    sys.exit(main())
