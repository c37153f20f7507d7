"""The load generator: streaming clients in one event loop, in a closed loop or at times of their own.

While the clock runs it only sends bytes and stores what comes back; decoding follows afterwards, but for the
answers that a chat has to send back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace

from bench.figures import Completion, LoadResult
from bench.wire import Address, Api, Piece, Response, post
from bench.workloads import BenchRequest, GroupPlan, Plan, Session


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A request as it went over the wire: a response, or why there is none."""

    order: tuple[int, int, int]  # group, session, turn
    request: BenchRequest
    due_at: float
    ended_at: float
    outcome: Response | str


@dataclass(slots=True)
class _Running:
    """Tells late groups when each of `streams` others has received `chunks` packets, or all have ended."""

    streams: int
    chunks: int
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    def counter(self) -> Callable[[], None]:
        """To be called at each packet of one stream."""
        left = self.chunks

        def count() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self.streams -= 1
                if self.streams <= 0:
                    self.reached.set()

        return count


def run_load(address: Address, api: Api, plan: Plan, timeout_s: float = 300.0) -> LoadResult:
    """Run `plan` against a server and wait for the end. Never raises for what a server does."""
    return asyncio.run(generate_load(address, api, plan, timeout_s))


async def generate_load(address: Address, api: Api, plan: Plan, timeout_s: float = 300.0) -> LoadResult:
    """`run_load` inside an event loop that is already there. `timeout_s` is for each request."""
    generator = _Generator(address, api, timeout_s, plan)
    cpu_before, start = time.process_time(), time.perf_counter()
    await generator.run(start)
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_before
    exchanges = sorted(generator.exchanges, key=lambda each: each.order)
    completions = tuple(
        decode(each, api, start, index, plan.groups[each.order[0]]) for index, each in enumerate(exchanges)
    )
    return LoadResult(plan.workload, wall_s, cpu_s, completions)


class _Generator:
    """The clients of one load."""

    def __init__(self, address: Address, api: Api, timeout_s: float, plan: Plan) -> None:
        self.exchanges: list[_Exchange] = []
        self._address, self._api, self._timeout_s, self._plan = address, api, timeout_s, plan
        early = [group for group in plan.groups if not group.after_chunks]
        streams = sum(group.clients or len(group.sessions) for group in early)
        self._running = _Running(streams, max((group.after_chunks for group in plan.groups), default=0))

    async def run(self, start: float) -> None:
        early: list[Coroutine[None, None, None]] = []
        late: list[Coroutine[None, None, None]] = []
        for number, group in enumerate(self._plan.groups):
            (late if group.after_chunks else early).append(self._group(number, group, start))

        async def early_ones() -> None:
            await asyncio.gather(*early)
            self._running.reached.set()

        await asyncio.gather(early_ones(), *late)

    async def _group(self, number: int, group: GroupPlan, start: float) -> None:
        if group.after_chunks:
            await self._running.reached.wait()
            start = time.perf_counter()
        todo = iter(enumerate(group.sessions))

        async def client() -> None:
            for index, session in todo:
                await self._session(number, index, session, time.perf_counter())

        async def at_its_time(index: int, session: Session) -> None:
            due_at = start + session.at_s
            await asyncio.sleep(due_at - time.perf_counter())
            await self._session(number, index, session, due_at)

        if group.clients:
            await asyncio.gather(*(client() for _ in range(group.clients)))
        else:
            await asyncio.gather(*(at_its_time(index, session) for index, session in todo))

    async def _session(self, group: int, index: int, session: Session, due_at: float) -> None:
        """All turns; one that fails ends the session, and those after it fail for its sake."""
        history: list[str] = []
        failed = ""
        on_packet = self._running.counter() if self._running.chunks else None
        for turn, request in enumerate(session.turns):
            outcome: Response | str = failed
            if not failed:
                path, body = self._api.post(request, history if session.is_chat else None)
                outcome = await self._ask(path, body, on_packet)
            exchange = _Exchange((group, index, turn), request, due_at, time.perf_counter(), outcome)
            self.exchanges.append(exchange)
            if turn + 1 < len(session.turns):
                answer = decode(exchange, self._api, due_at, 0, self._plan.groups[group])
                failed = "an earlier turn failed" if answer.error else ""
                history += [request.prompt, answer.text]
            due_at = time.perf_counter()

    async def _ask(self, path: str, body: bytes, on_packet: Callable[[], None] | None) -> Response | str:
        try:
            return await post(self._address, path, body, self._timeout_s, on_packet)
        except TimeoutError:
            return f"no complete answer within {self._timeout_s:g} s"
        except OSError as error:
            return str(error)


def decode(exchange: _Exchange, api: Api, start: float, index: int, group: GroupPlan) -> Completion:
    """Read a recorded exchange; anything but a complete stream of the length asked for is an error."""

    whole = Completion(
        index=index,
        started_s=exchange.due_at - start,
        group=group.name,
        late=bool(group.after_chunks),
        turn=exchange.order[2],
        total_s=exchange.ended_at - exchange.due_at,
    )
    response = exchange.outcome
    if isinstance(response, str):
        return replace(whole, error=response)
    if response.head.status != 200:
        body = response.body()[:200].decode(errors="replace")
        return replace(whole, error=f"status {response.head.status}: {body}")
    try:
        timed = [(event.at, api.read(event.payload)) for event in response.events()]
    except ValueError as error:
        return replace(whole, error=f"cannot read the stream: {error}")
    pieces = [piece for _, piece in timed]
    chunks_s = tuple(at - start for at, piece in timed if piece.text)
    generated = _last(piece.generated_tokens for piece in pieces)
    generated = len(chunks_s) if generated is None else generated
    return replace(
        whole,
        total_s=response.ended_at - exchange.due_at,
        chunks_s=chunks_s,
        generated_tokens=generated,
        prompt_tokens=_last(piece.prompt_tokens for piece in pieces),
        cached_tokens=_last(piece.cached_tokens for piece in pieces),
        finish_reason=next((piece.finish_reason for piece in pieces if piece.finish_reason), None),
        text="".join(piece.text for piece in pieces),
        error=_fault(pieces, generated, exchange.request, api),
    )


def _fault(pieces: list[Piece], generated: int, request: BenchRequest, api: Api) -> str | None:
    errors = [piece.error for piece in pieces if piece.error is not None]
    if errors:
        return errors[0]
    if not any(piece.final for piece in pieces):
        return "the stream ended without its last event"
    if api.exact and request.ignore_eos and generated != request.max_tokens:
        return f"{generated} tokens instead of {request.max_tokens}"
    return None


def _last(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return known[-1] if known else None
