"""Streams that are reconnected to: what was missed, then the rest, on every dialect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cllm.limits import MAX_RECONNECT_S
from tests.driver.reconnects import DIALECTS, make_body, parse, read_with_cuts
from tests.driver.server import Server, StartServer, make_client, wait_for


@pytest.fixture
def client(tiny: Server) -> Iterator[httpx.Client]:
    with make_client(base_url=tiny.url) as client:
        yield client


@pytest.mark.parametrize("post", [False, True], ids=["GET", "POST"])
@pytest.mark.parametrize("path", DIALECTS)
def test_a_reconnected_stream_loses_and_doubles_nothing(
    client: httpx.Client, tiny: Server, path: str, post: bool
) -> None:
    body = make_body(path, 300, reconnect_s=60)
    whole = read_with_cuts(client, path, body, ())
    events = read_with_cuts(client, path, body, (1, 5, 1, 100), post=post)
    assert [event.number for event in events] == list(range(len(events)))
    assert len({event.id.rpartition(".")[0] for event in events}) == 1
    assert "".join(event.text for event in events) == "".join(event.text for event in whole) != ""
    wait_for(tiny.idle)


def test_two_readers_follow_one_stream(client: httpx.Client) -> None:
    body = make_body("/v1/chat/completions", 200, reconnect_s=60)
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        stream_id = answer.headers["X-Stream-Id"]
        other = list(parse(client.get(f"/v1/streams/{stream_id}").text.splitlines()))
        events = list(parse(answer.iter_lines()))
    assert events == other and events[-1].data == "[DONE]"


def test_an_answer_without_a_reader_ends(client: httpx.Client, tiny: Server) -> None:
    body = make_body("/v1/messages", 2000, reconnect_s=0.2)
    with tiny.freed_on_leaving(), client.stream("POST", "/v1/messages", json=body) as answer:
        stream_id = answer.headers["X-Stream-Id"]
        next(answer.iter_bytes())
    wait_for(lambda: client.delete(f"/v1/streams/{stream_id}").status_code == 404)


def test_a_stream_is_cancelled_by_its_id(client: httpx.Client, tiny: Server) -> None:
    body = make_body("/v1/chat/completions", 2000, reconnect_s=60)
    with tiny.freed_on_leaving(), client.stream("POST", "/v1/chat/completions", json=body) as answer:
        stream_id = answer.headers["X-Stream-Id"]
        assert client.delete(f"/v1/streams/{stream_id}").json() == {"cancelled": stream_id}
        assert list(parse(answer.iter_lines()))


def test_plain_streams_have_no_ids(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json=make_body("/v1/chat/completions", 4))
    assert not list(parse(answer.text.splitlines())) and "X-Stream-Id" not in answer.headers


@pytest.mark.parametrize(
    ("last", "status", "text"), [("1", 400, "Last-Event-ID"), ("chatcmpl-1.4", 404, "no such stream")]
)
def test_unknown_events_are_refused(client: httpx.Client, last: str, status: int, text: str) -> None:
    """Also on the paths of llama-server, which the documentation does not show."""
    body = make_body("/v1/chat/completions", 4)
    for path in ("/v1/chat/completions", "/chat/completions"):
        answer = client.post(path, json=body, headers={"Last-Event-ID": last})
        assert answer.status_code == status and text in answer.text


def test_the_time_to_reconnect_is_bounded(client: httpx.Client) -> None:
    body = make_body("/v1/chat/completions", 4, reconnect_s=MAX_RECONNECT_S + 1)
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "reconnect_s"


def test_a_server_keeps_streams_of_all_clients(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--reconnect-s", "30", "--api-key", "one,two")
    path = "/v1/chat/completions"
    with make_client(base_url=server.url, headers={"Authorization": "Bearer one"}) as one:
        events = read_with_cuts(one, path, make_body(path, 50), (3,))
        assert [event.number for event in events] == list(range(len(events)))
        other = {"Authorization": "Bearer two", "Last-Event-ID": events[0].id}
        assert one.post(path, json=make_body(path, 50), headers=other).status_code == 404
