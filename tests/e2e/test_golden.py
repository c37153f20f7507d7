"""The answers of every route, against recordings; see `tests/e2e/golden`."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from tests.driver.server import Server
from tests.e2e.golden.cases import TEXT
from tests.e2e.golden.groups import GROUPS
from tests.e2e.golden.normal import normal, parse
from tests.e2e.golden.record import RECORDINGS, ask, ask_all, closed_server, compare, recorded


def check(server: Server, group: str) -> None:
    differences = list(compare(group, recorded(group), ask_all(server, group)))
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize("group", [group for group in GROUPS if group != "closed"])
def test_answers_are_as_recorded(scripted: Server, group: str) -> None:
    check(scripted, group)


def test_answers_of_a_server_with_keys_are_as_recorded(tmp_path: Path) -> None:
    with closed_server(tmp_path) as server:
        check(server, "closed")


def test_no_recording_is_left_over() -> None:
    assert {file.stem for file in RECORDINGS.glob("*.jsonl")} == set(GROUPS)


def test_an_error_in_a_stream_has_the_shape_that_whole_answers_have() -> None:
    apis = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "messages": "/v1/messages"}
    for group, path in (apis | {"llama": "/completion", "ollama": "/api/chat"}).items():
        whole, stream = (json.loads(recorded(group)[f"{path} error{way}"]) for way in ("", ", stream"))
        assert whole["status"] == 500 and stream["status"] == 200
        assert stream["events"][-1]["data"] == whole["body"]


def test_pieces_come_as_they_are_made_and_merging_changes_nothing(scripted: Server) -> None:
    response = ask(scripted.client, GROUPS["chat"]["/v1/chat/completions text, stream"])
    events = list(parse(response.iter_lines()))
    contents = [event["data"]["choices"][0]["delta"].get("content") for event in events[:-1]]
    assert len(contents) > 5 and "".join(content or "" for content in contents) == TEXT
    merged = copy.deepcopy(events)
    taken = merged.pop(3)["data"]["choices"][0]["delta"]["content"]
    merged[2]["data"]["choices"][0]["delta"]["content"] += taken
    assert normal(merged) == normal(events)
    spoiled = copy.deepcopy(events)
    spoiled[2]["data"]["choices"][0]["finish_reason"] = "stop"
    assert normal(spoiled) != normal(events), "the comparison must see an event that should not be there"
