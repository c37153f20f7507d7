"""The overload bench: what it reads from the wire, and that each bar can be missed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.overload import GENERATED, Answer, Overload, Refusal, read, table
from bench.wire import CllmApi, Head, Packet, Response

GOOD = Overload(
    capacity_per_s=10.0,
    capacity_tokens_per_s=10.0 * GENERATED,
    sent=30,
    wall_s=1.0,
    answered=(Answer(0.5, GENERATED),) * 10,
    refusals=(Refusal(429, 0.004, True),) * 20,
    errors=(),
    parallel=8,
)


def response(head: bytes, body: bytes) -> Response:
    status = int(head.split()[1])
    data = head + b"\r\n\r\n" + body
    return Response(1.0, Head(status, len(body), False), (Packet(1.25, data),))


def test_a_good_run_has_no_faults() -> None:
    assert GOOD.faults() == []
    assert "goodput" in table(GOOD).markdown()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (replace(GOOD, wall_s=1.2), "goodput is 0.83"),
        (replace(GOOD, refusals=(Refusal(429, 0.06, True),)), "took over 50 ms"),
        (replace(GOOD, refusals=(Refusal(503, 0.01, True),)), "without 429"),
        (replace(GOOD, refusals=(Refusal(429, 0.01, False),)), "without 429"),
        (replace(GOOD, refusals=()), "no overload"),
        (replace(GOOD, answered=(Answer(60.0, GENERATED),) * 10), "first-token p99"),
        (replace(GOOD, errors=("reset",)), "went wrong: reset"),
    ],
)
def test_each_bar_can_be_missed(bad: Overload, words: str) -> None:
    (fault,) = bad.faults()
    assert words in fault


def test_what_is_read_from_the_wire() -> None:
    api = CllmApi()
    refused = response(b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3", b"{}")
    assert read(refused, api) == Refusal(429, 0.25, True)
    piece = b'data: {"id":"a","token":"x","done":false}\n\n'
    end = b'data: {"id":"a","token":"","done":true,"generated_tokens":%d,"finish_reason":"length"}\n\n'
    answered = response(b"HTTP/1.1 200 OK", piece + end % GENERATED)
    assert read(answered, api) == Answer(0.25, GENERATED)
    assert "1 tokens instead of" in str(read(response(b"HTTP/1.1 200 OK", piece + end % 1), api))
    assert "status 500" in str(read(response(b"HTTP/1.1 500 Oops", b"x"), api))
    assert read("reset", api) == "reset"
