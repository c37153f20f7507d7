"""The load generator: a closed loop of streaming clients in one event loop.

While the clock runs it only sends bytes and stores what comes back; decoding follows afterwards.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from itertools import pairwise

from cllm.bench.dialects import Dialect
from cllm.bench.wire import Address, Response, post
from cllm.bench.workloads import BenchRequest, Workload


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of one request. Times in seconds; `started_s` counts from the start of the load."""

    index: int
    started_s: float
    total_s: float = 0.0
    first_token_s: float | None = None
    gaps_s: tuple[float, ...] = ()  # between pieces of text
    generated_tokens: int = 0
    prompt_tokens: int | None = None  # None where the server does not tell
    finish_reason: str | None = None
    text: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One run of a workload. `completions` are in the order of the workload's requests."""

    workload: str
    wall_s: float
    client_cpu_s: float
    completions: tuple[Completion, ...]

    @property
    def generated_tokens(self) -> int:
        return sum(completion.generated_tokens for completion in self.completions)

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.wall_s

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(
            f"request {completion.index}: {completion.error}"
            for completion in self.completions
            if completion.error is not None
        )


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A request as it went over the wire: a response, or why there is none."""

    index: int
    started_at: float
    ended_at: float
    outcome: Response | str


def run_load(address: Address, dialect: Dialect, workload: Workload, timeout_s: float = 300.0) -> LoadResult:
    """Run `workload` against a server and wait for the end. Never raises for what a server does."""
    return asyncio.run(generate_load(address, dialect, workload, timeout_s))


async def generate_load(
    address: Address, dialect: Dialect, workload: Workload, timeout_s: float = 300.0
) -> LoadResult:
    """`run_load` inside an event loop that is already there. `timeout_s` is for each request."""
    todo = iter([(index, dialect.body(request)) for index, request in enumerate(workload.requests)])
    exchanges: list[_Exchange] = []

    async def client() -> None:
        for index, body in todo:
            started_at = time.perf_counter()
            outcome = await _ask(address, dialect.path, body, timeout_s)
            exchanges.append(_Exchange(index, started_at, time.perf_counter(), outcome))

    cpu_before, start = time.process_time(), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(workload.clients)))
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_before
    exchanges.sort(key=lambda each: each.index)
    completions = (
        replace(decode(each, dialect, workload.requests[each.index]), started_s=each.started_at - start)
        for each in exchanges
    )
    return LoadResult(workload.name, wall_s, cpu_s, tuple(completions))


async def _ask(address: Address, path: str, body: bytes, timeout_s: float) -> Response | str:
    try:
        return await post(address, path, body, timeout_s)
    except TimeoutError:
        return f"no complete answer within {timeout_s:g} s"
    except OSError as error:
        return str(error)


def decode(exchange: _Exchange, dialect: Dialect, request: BenchRequest) -> Completion:
    """Read a recorded exchange; anything but a complete stream of the length asked for is an error."""
    failed = Completion(exchange.index, 0.0, exchange.ended_at - exchange.started_at)
    response = exchange.outcome
    if isinstance(response, str):
        return replace(failed, error=response)
    if response.head.status != 200:
        body = response.body()[:200].decode(errors="replace")
        return replace(failed, error=f"status {response.head.status}: {body}")
    try:
        timed = [(event.at, dialect.read(event.payload)) for event in response.events()]
    except ValueError as error:
        return replace(failed, error=f"cannot read the stream: {error}")
    pieces = [piece for _, piece in timed]
    times = [at for at, piece in timed if piece.text]
    counts = [piece.generated_tokens for piece in pieces if piece.generated_tokens is not None]
    prompt_counts = [piece.prompt_tokens for piece in pieces if piece.prompt_tokens is not None]
    generated = counts[-1] if counts else len(times)
    errors = [piece.error for piece in pieces if piece.error is not None]
    if not errors and not any(piece.final for piece in pieces):
        errors = ["the stream ended without its last event"]
    if not errors and request.ignore_eos and generated != request.max_tokens:
        errors = [f"{generated} tokens instead of {request.max_tokens}"]
    return Completion(
        index=exchange.index,
        started_s=0.0,
        total_s=response.ended_at - response.sent_at,
        first_token_s=times[0] - response.sent_at if times else None,
        gaps_s=tuple(later - earlier for earlier, later in pairwise(times)),
        generated_tokens=generated,
        prompt_tokens=prompt_counts[-1] if prompt_counts else None,
        finish_reason=next((piece.finish_reason for piece in pieces if piece.finish_reason), None),
        text="".join(piece.text for piece in pieces),
        error=errors[0] if errors else None,
    )
