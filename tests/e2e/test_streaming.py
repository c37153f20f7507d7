"""Answers as server-sent events: their text is that of whole answers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.driver.server import Server, stream_text


def stream(server: Server, prompt: str, max_tokens: int = 16, **fields: Any) -> list[Any]:
    with server.open_stream(prompt, max_tokens, **fields) as events:
        return list(events)


@pytest.mark.parametrize("prompt", ["Tell me a joke.", "What is AI?", "1+1="])
def test_pieces_joined_are_the_text_of_generate(tiny: Server, prompt: str) -> None:
    assert stream_text(stream(tiny, prompt, 24)) == tiny.generate(prompt, 24)["text"] != ""


def test_emoji_of_a_real_vocabulary_arrive_whole(embedded: Server) -> None:
    """A regex makes it answer in emoji, each of which is several tokens."""
    emoji = "😀🎉🐱"
    assert embedded.post("/encode", {"text": emoji}).json()["length"] > len(emoji)
    events = stream(embedded, "1. 😀 🎉 🐱\n2.", 200, regex=f"[{emoji}]{{12}}")
    text = stream_text(events)
    assert len(text) == 12 and set(text) <= set(emoji) and events[-1]["finish_reason"] == "stop"
