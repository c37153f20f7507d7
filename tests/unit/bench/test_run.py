"""The measuring instruments measure: framing, medians, step times."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random

import pytest

from bench.client import BadAnswer, StepTime
from bench.figures import LoadResult
from bench.load import generate_load
from bench.report import Spread, Table
from bench.wire import Address, CllmApi
from bench.workloads import BenchRequest, single_requests

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

    async def run() -> LoadResult:
        answered = asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):  # the client may have had enough
                await reader.readuntil(b"\r\n\r\n")
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.0002)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            answered.set()

        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            address = Address(*server.sockets[0].getsockname()[:2])
            load = await generate_load(address, CllmApi(), PLAN, 5)
            await answered.wait()
            return load

    return asyncio.run(run())


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


def test_medians_carry_their_spread() -> None:
    assert Spread.of([1, 9, 2]).show(0) == "2 (1–9)"
    assert Table(("a", "b"), [("1", "x|y")]).markdown().count("\n") == 2


METRICS = """# TYPE cllm_steps_total counter
cllm_steps_total{kind="generate"} 6.0
cllm_steps_total{kind="embed"} 4.0
cllm_steps_interrupted_total 1.0
cllm_step_seconds_total 2.0
cllm_step_compute_seconds_total 1.5
cllm_step_sample_seconds_total 0.1
"""
TRANSFERS = "cllm_kv_transfer_seconds_total 0.3\n"


def test_kv_transfers_are_no_part_of_pythons_share() -> None:
    before, now = StepTime(2, 1.0, 0.9, 0.05), StepTime.read(METRICS + TRANSFERS)
    assert now == StepTime(10, 2.0, 1.5, 0.1, 0.3)
    passed = now.since(before)
    assert (passed.steps, passed.total_s) == (8, 1.0)
    assert passed.sample_share == pytest.approx(0.05)
    assert passed.transfer_share == pytest.approx(0.3) and passed.python_share == pytest.approx(0.1)


def test_a_server_without_a_counter_of_transfers_is_read_too() -> None:
    read = StepTime.read(METRICS)
    assert read.transfer_s == 0 and read.python_share == pytest.approx(0.25)
    with pytest.raises(BadAnswer, match="cllm_step_sample_seconds_total"):
        StepTime.read(METRICS.replace("sample", "other"))
