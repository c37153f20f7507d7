"""Answers as server-sent events: their shape, their text, what is held back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cllm import LLM, SamplingParams
from tests.driver.runner import decode_pieces
from tests.driver.server import Server, parse_events, stream_text

EURO_HEAD, EURO_TAIL = 273, 0xAC  # the tokens of € in the tiny vocabulary
TEXT_SO_LONG = 40  # tokens


def stream(server: Server, prompt: str, max_tokens: int = 16, **fields: Any) -> list[Any]:
    with server.open_stream(prompt, max_tokens, **fields) as events:
        return list(events)


def test_events_have_the_documented_shape(tiny: Server) -> None:
    *tokens, last = stream(tiny, "What is AI?", 8)
    request_id = last["id"]
    assert tokens
    assert all(event == {"id": request_id, "token": event["token"], "done": False} for event in tokens)
    assert all(event["token"] for event in tokens)
    usage = last.pop("usage")
    assert last == {
        "id": request_id,
        "token": "",
        "done": True,
        "generated_tokens": 8,
        "finish_reason": "length",
    }
    assert usage["completion_tokens"] == 8


@pytest.mark.parametrize("prompt", ["Tell me a joke.", "What is AI?", "1+1="])
def test_pieces_joined_are_the_text_of_generate(tiny: Server, prompt: str) -> None:
    assert stream_text(stream(tiny, prompt, 24)) == tiny.generate(prompt, 24)["text"] != ""


def test_generate_with_stream_true_is_generate_stream(tiny: Server) -> None:
    body = {"prompt": "streamed", "max_tokens": 12, "temperature": 0, "stream": True}
    with tiny.client.stream("POST", "/generate", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = list(parse_events(response.iter_lines()))
    assert (
        stream_text(events)
        == stream_text(stream(tiny, "streamed", 12))
        == tiny.generate("streamed", 12)["text"]
    )
    assert {key for event in events for key in event} == {
        "id",
        "token",
        "done",
        "generated_tokens",
        "finish_reason",
        "usage",
    }


@pytest.mark.parametrize("length", [1, 2, 5, 9])
@pytest.mark.parametrize("place", [0, 11, 30])
def test_a_stop_string_cuts_and_never_leaks(tiny: Server, length: int, place: int) -> None:
    text = tiny.generate("stop here", TEXT_SO_LONG)["text"]
    stop = text[place : place + length]
    assert len(stop) == length
    expected = text[: text.index(stop)]

    data = tiny.generate("stop here", TEXT_SO_LONG, stop=stop)
    assert (data["text"], data["finish_reason"]) == (expected, "stop")
    events = stream(tiny, "stop here", TEXT_SO_LONG, stop=["never in there", stop])
    assert stream_text(events) == expected
    assert events[-1]["finish_reason"] == "stop"


def test_what_only_looks_like_a_stop_string_is_given_out_in_the_end(tiny: Server) -> None:
    text = tiny.generate("stop here", TEXT_SO_LONG)["text"]
    events = stream(tiny, "stop here", TEXT_SO_LONG, stop=[text[-6:] + "and more"])
    assert stream_text(events) == text
    assert events[-1]["finish_reason"] == "length"


def test_characters_split_over_tokens_arrive_whole(tiny: Server, tiny_model: Path) -> None:
    """Made to say the two tokens of € in any order: what is valid arrives whole, what is not, as U+FFFD."""
    bias = {str(EURO_HEAD): 100.0, str(EURO_TAIL): 100.0}
    fields = {"temperature": 1.0, "seed": 7, "logit_bias": bias}
    sampling = SamplingParams(
        temperature=1.0, seed=7, logit_bias=tuple((int(token), value) for token, value in bias.items())
    )
    with LLM(tiny_model, parallel=1, ctx_size=512, threads=1) as llm:
        (alone,) = llm.generate("euros", sampling, max_tokens=48)
    pieces = [b"\xe2\x82" if token == EURO_HEAD else b"\xac" for token in alone.tokens]
    expected = decode_pieces(pieces)
    assert alone.tokens.count(EURO_HEAD) and "€" in expected and "\ufffd" in expected

    for _ in range(3):
        events = stream(tiny, "euros", 48, **fields)
        assert stream_text(events) == expected
        assert all(set(event["token"]) <= {"€", "\ufffd"} for event in events)


def test_emoji_of_a_real_vocabulary_arrive_whole(embedded: Server) -> None:
    """A regex makes it answer in emoji, each of which is several tokens."""
    emoji = "😀🎉🐱"
    assert embedded.post("/encode", {"text": emoji}).json()["length"] > len(emoji)
    events = stream(embedded, "1. 😀 🎉 🐱\n2.", 200, regex=f"[{emoji}]{{12}}")
    text = stream_text(events)
    assert len(text) == 12 and set(text) <= set(emoji) and events[-1]["finish_reason"] == "stop"
