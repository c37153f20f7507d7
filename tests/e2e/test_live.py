"""The live feed over HTTP: events, listeners, keys, the end of a request; and the board for Grafana."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.driver.server import PATIENCE_S, ROOT, Server, StartServer, wait_for

BOARD = (ROOT / "docs" / "grafana" / "cllm.json").read_text()
LONG = 4000


@contextmanager
def listen(server: Server, **headers: str) -> Iterator[Iterator[tuple[dict[str, Any], int]]]:
    """Events of /live as they come, each with its size; those of totals alone are left out."""
    with (
        httpx.Client(base_url=server.url, timeout=PATIENCE_S, trust_env=False) as client,
        client.stream("GET", "/live", headers=headers) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        read = ((json.loads(line.removeprefix("data: ")), len(line)) for line in lines)
        yield ((event, size) for event, size in read if isinstance(event, dict))


def test_events_show_a_request_from_its_slot_to_the_log(tiny: Server) -> None:
    wait_for(tiny.idle)
    with listen(tiny) as events, tiny.open_stream("watch me", LONG) as stream:
        first, _ = next(events)
        request_id = next(stream)["id"]
        for _ in range(5):
            event, size = next(events)
            assert size <= 4096 and len(event["row"]) == len(first["columns"])
            if lanes := [lane for lane in event.get("kv", {}).get("lanes", ()) if lane[-1] == request_id]:
                break
        (slot, computed, tokens, prompt, cached, _, _) = lanes[0]
        number = event["kv"]["snapshot"]
        kept = tiny.get(f"/debug/kv?snapshot={number}")
        (lease,) = kept["leases"]
        assert kept["snapshot"] == number and tiny.kv()["snapshot"] > number
        assert [lease[name] for name in ("seq_id", "position", "tokens")] == [slot, computed, tokens]
        assert [lease[name] for name in ("prompt_tokens", "cached_tokens")] == [prompt, cached]
        assert event["totals"][first["columns"].index("running") - 1] == 1
        assert tiny.post(f"/admin/requests/{request_id}/cancel", {}).json() == {"cancelled": request_id}
        assert list(stream)[-1]["finish_reason"] == "cancelled"
        ended = next(record for event, _ in events for record in event["requests"])
        assert (ended[1], ended[3]) == (request_id[-8:], "cancelled")
    assert tiny.client.get("/debug/kv?snapshot=999999").status_code == 404
    assert tiny.post(f"/admin/requests/{request_id}/cancel", {}).status_code == 404


def test_totals_come_twice_a_second_and_are_those_of_metrics(tiny: Server) -> None:
    tiny.post("/v1/completions", {"prompt": "count me", "max_tokens": 3})
    wait_for(tiny.idle)
    with tiny.client.stream("GET", "/live") as answer:
        lines = answer.iter_lines()
        first = next(json.loads(line[6:]) for line in lines if line.startswith("data: "))
        totals = next(json.loads(next(lines)[6:]) for line in lines if line == "event: totals")
    found = dict(zip(first["columns"][1:], totals, strict=False))
    metrics = tiny.metrics()
    finished = sum(
        value for name, value in metrics.items() if name.startswith("cllm_requests_finished_total")
    )
    assert found["finished"] == finished > 0
    assert found["generated"] == metrics["cllm_generated_tokens_total"]


def test_four_may_listen(tiny: Server) -> None:
    with ExitStack() as stack:
        for _ in range(4):
            next(stack.enter_context(listen(tiny)))
        refused = tiny.client.get("/live")
        assert refused.status_code == 503 and refused.json()["error"] == "too_many_listeners"
        assert "close another" in refused.json()["message"] and refused.headers["retry-after"]
    wait_for(lambda: _may_listen(tiny), 5)


def _may_listen(server: Server) -> bool:
    with server.client.stream("GET", "/live") as answer:
        return answer.status_code == 200


def test_it_needs_an_admins_key_and_ends_with_the_server(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--threads", "1", CLLM_API_KEY="open sesame")
    assert server.client.get("/live").status_code == 401
    assert server.client.get("/").status_code == 200
    with listen(server, authorization="Bearer open sesame") as events:
        next(events)
        server.stop(10)
        assert len(list(events)) <= 2


@pytest.mark.parametrize("panel", json.loads(BOARD)["panels"], ids=lambda panel: panel["title"])
def test_every_metric_of_the_board_is_there(panel: Any, tiny: Server) -> None:
    tiny.generate("a metric", 4)
    there = {name.partition("{")[0] for name in tiny.metrics()} | _described(tiny)
    named = {name for target in panel["targets"] for name in re.findall(r"\bcllm_\w+", target["expr"])}
    assert named and named <= there, named - there


def _described(server: Server) -> set[str]:
    """Counters with labels have no sample before the first one counts."""
    found = re.findall(r"^# TYPE (\w+) counter$", server.client.get("/metrics").text, re.MULTILINE)
    return {name if name.endswith("_total") else f"{name}_total" for name in found}
