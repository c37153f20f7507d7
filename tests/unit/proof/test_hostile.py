"""Hostile requests are made of every field, stay within a body, and none is answered with a server error."""

from __future__ import annotations

import json
from collections import Counter

import httpx

from cllm.frontend.engine_client import EngineClient
from cllm.types import Request
from proof.hostile import COUNT, EXPECTED
from proof.shared.hostile import LARGE_EVERY, MAX_BYTES, ROUTES, HostileRequests
from tests.unit.server.test_scheduling_fields import with_server

SAMPLE = 150


def test_every_field_of_every_route_has_its_turn() -> None:
    assert len(ROUTES) >= 35
    for place, (route, fields) in enumerate(ROUTES):
        sent = [HostileRequests(1).make(place + 2 * turn * len(ROUTES)) for turn in range(len(fields))]
        assert {each.path.partition("/0")[0] for each in sent} == {route.path.partition("/{")[0]}
        assert 2 * len(fields) * len(ROUTES) < COUNT, "all fields have had their turn"


def test_the_same_number_gives_the_same_request_within_a_body() -> None:
    first, again = ([HostileRequests(seed).make(number) for number in range(60)] for seed in (3, 3))
    assert first == again != [HostileRequests(4).make(number) for number in range(60)]
    assert max(len(each.body) for each in first) <= MAX_BYTES
    assert any(b"\\u0" in each.body for each in first)


def test_a_sample_is_answered_without_a_server_error() -> None:
    """On a scripted model; what is large, and the streams beside it, are in `make proof ARGS=hostile`."""
    found: Counter[int] = Counter()

    async def ask(client: httpx.AsyncClient, _engine: EngineClient, _requests: list[Request]) -> None:
        for number in range(7, SAMPLE * 7, 7):
            method, path, body = HostileRequests(1).make(number + (number % LARGE_EVERY == 0))
            answer = await client.request(
                method, path, content=body, headers={"content-type": "application/json"}
            )
            found[answer.status_code] += 1
            assert answer.status_code in EXPECTED, (number, path, answer.text[:300])
            if answer.status_code == 400 and answer.headers["content-type"] == "application/json":
                assert json.loads(answer.text)

    with_server(ask)
    assert found[200] and found[400] > SAMPLE // 4
