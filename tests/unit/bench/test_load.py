"""The load generator against a small server: framing, chats, open loops, late arrivals, wide chunks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from bench.figures import LoadResult
from bench.load import generate_load
from bench.wire import Address, Api, CllmApi, OpenAIApi
from bench.workloads import BenchRequest, GroupPlan, Plan, Session, single_requests


@dataclass
class Endless:
    """Answers as asked, two tokens to a chunk, and remembers what it was asked and when."""

    chunk_s: float = 0.002
    fails: Callable[[str], bool] = lambda path: False
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    running: int = 0
    max_running: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(next(line for line in head.splitlines() if "Length" in line).split()[1])
        body = json.loads(await reader.readexactly(length))
        path = head.split()[1]
        self.asked.append((path, body))
        self.at.append(asyncio.get_running_loop().time())
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        if self.fails(json.dumps(body)):
            writer.write(b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nno")
        else:
            await self._answer(path, body, writer)
        self.running -= 1
        await writer.drain()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for number in range(body["max_tokens"] // 2):
            text = f" a{number}"
            choice = {"delta": {"content": text}} if "chat" in path else {"text": text}
            _send(writer, {"choices": [choice]})
            await asyncio.sleep(self.chunk_s)
        usage = {"completion_tokens": body["max_tokens"], "prompt_tokens": 7}
        _send(writer, {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 3}}})
        writer.write(b"data: [DONE]\n\n")


def _send(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def serve(handle: Callable[..., Coroutine[None, None, None]], api: Api, plan: Plan) -> LoadResult:
    """A server that answers with `handle`, under a load; every connection is closed before it ends."""
    answering: list[asyncio.Future[None]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.append(done := asyncio.get_running_loop().create_future())
        try:
            await handle(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            done.set_result(None)

    async def main() -> LoadResult:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
            address = Address(*listening.sockets[0].getsockname()[:2])
            load = await generate_load(address, api, plan, 20)
            await asyncio.wait_for(asyncio.gather(*answering), 20)
            return load

    return asyncio.run(main())


def run(server: Endless, *groups: GroupPlan) -> LoadResult:
    return serve(server.handle, OpenAIApi(), Plan("w", groups))


def ask(*prompts: str, tokens: int = 8, at_s: float = 0.0) -> Session:
    return Session(tuple(BenchRequest(prompt, tokens) for prompt in prompts), at_s)


def test_a_chat_sends_the_whole_history() -> None:
    server = Endless()
    load = run(server, GroupPlan("users", 1, (ask("one", "two", "three", tokens=4),)))
    assert load.errors == () and [each.turn for each in load.completions] == [0, 1, 2]
    assert {path for path, _ in server.asked} == {"/v1/chat/completions"}
    said = [[message["content"] for message in body["messages"]] for _, body in server.asked]
    assert said == [["one"], ["one", " a0 a1", "two"], ["one", " a0 a1", "two", " a0 a1", "three"]]
    assert [message["role"] for message in server.asked[-1][1]["messages"]] == ["user", "assistant"] * 2 + [
        "user"
    ]


def test_the_turns_after_a_failed_one_fail_and_are_not_sent() -> None:
    server = Endless(fails=lambda body: "two" in body)
    load = run(server, GroupPlan("users", 1, (ask("one", "two", "three"), ask("four", "five"))))
    assert len(server.asked) == 4 and len(load.completions) == 5
    assert [each.error is None for each in load.completions] == [True, False, False, True, True]


def test_clients_are_as_many_as_asked_for_and_results_in_order() -> None:
    server = Endless()
    load = run(server, GroupPlan("g", 3, tuple(ask(str(number)) for number in range(9))))
    assert server.max_running == 3 and load.errors == ()
    assert [each.index for each in load.completions] == list(range(9))


def test_chunks_and_tokens_are_counted_apart() -> None:
    (one,) = run(Endless(), GroupPlan("g", 1, (ask("p", tokens=8),))).completions
    assert len(one.chunks_s) == 4 and one.generated_tokens == 8 and one.tokens_per_chunk == 2
    assert (one.prompt_tokens, one.cached_tokens) == (7, 3)
    assert one.first_token_s is not None and 0 < one.first_token_s <= one.total_s


def test_an_open_loop_does_not_wait_for_answers_and_counts_from_when_it_was_due() -> None:
    server = Endless(chunk_s=0.05)
    sessions = tuple(ask("p", tokens=8, at_s=0.02 * number) for number in range(5))
    load = run(server, GroupPlan("g", 0, sessions))
    assert server.max_running == 5
    assert [each.started_s for each in load.completions] == pytest.approx(
        [0.02 * n for n in range(5)], abs=1e-6
    )
    for number, sent in enumerate(server.at):
        assert sent - server.at[0] >= 0.02 * number - 0.019


def test_a_late_group_waits_until_all_others_run() -> None:
    server = Endless(chunk_s=0.005)
    streams = GroupPlan("streams", 3, tuple(ask(str(number), tokens=80) for number in range(3)))
    late = GroupPlan("late", 1, (ask("late", tokens=2),), after_chunks=6)
    load = run(server, streams, late)
    assert load.errors == ()
    *others, last = load.completions
    assert last.late and not any(each.late for each in others)
    for each in others:
        assert len([at for at in each.chunks_s if at < last.started_s]) >= 3  # the head is a packet too
        assert each.chunks_s[-1] > last.started_s


def test_a_late_group_is_not_forgotten_when_the_others_fail() -> None:
    server = Endless(fails=lambda body: "bad" in body)
    late = GroupPlan("late", 1, (ask("late"),), after_chunks=6)
    load = run(server, GroupPlan("streams", 2, (ask("bad"), ask("bad"))), late)
    assert [each.error is None for each in load.completions] == [False, False, True]


def test_an_answer_of_the_wrong_length_is_an_error_unless_the_peer_cannot_know() -> None:
    plan = Plan("w", (GroupPlan("g", 1, (ask("p", tokens=8),)),))

    async def short(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n')
        await writer.drain()

    assert "1 tokens instead of 8" in serve(short, OpenAIApi(exact=True), plan).errors[0]
    assert serve(short, OpenAIApi(exact=False), plan).errors == ()


TOKENS = 10
PLAN = single_requests("w", [BenchRequest("p", TOKENS)])


def events() -> list[bytes]:
    pieces = [{"id": "a", "token": f" w{number}\r\n\r\n", "done": False} for number in range(TOKENS)]
    last = {"id": "a", "token": "", "done": True, "generated_tokens": TOKENS, "finish_reason": "length"}
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in [*pieces, last]]


def response(kind: str, parts: list[bytes]) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    if kind == "chunked":
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    body = b"".join(parts)
    return head + (b"Content-Length: %d\r\n" % len(body) if kind == "length" else b"") + b"\r\n" + body


def load_from(pieces: list[bytes]) -> LoadResult:
    """What the load generator makes of a server that sends exactly these packets, then closes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # the client may have had enough
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.0002)

    return serve(handle, CllmApi(), PLAN)


@pytest.mark.parametrize("kind", ["chunked", "length", "until closed"])
@pytest.mark.parametrize("seed", range(4))
def test_a_stream_is_read_right_wherever_the_packets_are_cut(kind: str, seed: int) -> None:
    raw = response(kind, events())
    cuts = sorted(random.Random(seed).sample(range(1, len(raw)), 40))
    load = load_from([raw[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)])
    assert load.errors == () and load.generated_tokens == TOKENS
    assert len(load.completions[0].gaps_s) == TOKENS - 1


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nda", "mid-answer"),
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 2\r\n\r\n{}", "429"),
        (b"", "mid-answer"),
        (response("length", [b'data: {"id": "a", "error": "engine died", "done": true}\n\n']), "engine died"),
        (response("length", events()[:3]), ""),
    ],
)
def test_what_went_wrong_is_an_error_and_not_a_figure(raw: bytes, words: str) -> None:
    load = load_from([raw])
    assert len(load.errors) == 1 and words in load.errors[0]
