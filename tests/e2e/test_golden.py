"""The exact event sequences of streams, against recordings; see `tests/e2e/golden`."""

from __future__ import annotations

import copy

import pytest

from tests.driver.server import Server
from tests.e2e.golden.cases import CASES, TEXT
from tests.e2e.golden.normal import normal
from tests.e2e.golden.record import RECORDINGS, ask, recorded


@pytest.mark.parametrize("name", CASES)
def test_a_stream_is_as_recorded(scripted: Server, name: str) -> None:
    assert normal(ask(scripted, CASES[name])) == recorded(name)


def test_an_error_has_the_shape_that_whole_answers_of_the_route_have(scripted: Server) -> None:
    for name in ("llama-completion-error", "completions-error", "chat-error", "messages-error"):
        whole = scripted.post(CASES[name].path, CASES[name].body)
        assert whole.status_code == 500
        assert recorded(name)[-1]["data"] == whole.json()


def test_no_recording_is_left_over() -> None:
    assert {file.stem for file in RECORDINGS.glob("*.jsonl")} == set(CASES)


def test_pieces_come_as_they_are_made_and_merging_changes_nothing(scripted: Server) -> None:
    events = ask(scripted, CASES["chat"])
    contents = [event["data"]["choices"][0]["delta"].get("content") for event in events[:-1]]
    assert len(contents) > 5 and "".join(content or "" for content in contents) == TEXT
    merged = copy.deepcopy(events)
    taken = merged.pop(3)["data"]["choices"][0]["delta"]["content"]
    merged[2]["data"]["choices"][0]["delta"]["content"] += taken
    assert normal(merged) == normal(events)
    spoiled = copy.deepcopy(events)
    spoiled[2]["data"]["choices"][0]["finish_reason"] = "stop"
    assert normal(spoiled) != normal(events), "the comparison must see an event that should not be there"
