"""A client whose connection is lost in mid-stream, and that reads the rest as EventSource-like clients do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import httpx

MESSAGES = [{"role": "user", "content": "Tell me a long story"}]
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES},
    "/v1/responses": {"input": MESSAGES},
}


class Event(NamedTuple):
    """A server-sent event."""

    id: str
    data: str

    @property
    def number(self) -> int:
        return int(self.id.rpartition(".")[2])

    @property
    def text(self) -> str:
        """What it adds to the answer's text, in any dialect."""
        found = json.loads(self.data) if self.data.startswith("{") else {}
        if "choices" in found:
            return "".join(choice["delta"].get("content") or "" for choice in found["choices"])
        delta = found.get("delta") or ""
        if isinstance(delta, dict):
            return str(delta.get("text") or "")
        return str(delta)


def make_body(path: str, tokens: int, **fields: Any) -> dict[str, Any]:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return {"model": "any", "stream": True, "temperature": 0, limit: tokens, **DIALECTS[path], **fields}


def parse(lines: Iterable[str]) -> Iterator[Event]:
    """Events of the lines of a stream; comments, and events without an id, are left out."""
    event_id = data = ""
    for line in lines:
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ")
        elif not line:
            if event_id and data:
                yield Event(event_id, data)
            event_id = data = ""


def read_with_cuts(
    client: httpx.Client, path: str, body: dict[str, Any], cuts: Iterable[int], *, post: bool = False
) -> list[Event]:
    """All events, with the connection cut after each number of events of `cuts`, one after the other.

    The rest is asked for with GET on the stream, or with the same POST again.
    """
    events: list[Event] = []
    for cut in (*cuts, None):
        headers = {"Last-Event-ID": events[-1].id} if events else {}
        again = f"/v1/streams/{events[-1].id.rpartition('.')[0]}" if events and not post else None
        request = {"method": "GET", "url": again} if again else {"method": "POST", "url": path, "json": body}
        with client.stream(**request, headers=headers) as answer:
            if answer.status_code != 200:
                raise AssertionError(answer.read().decode())
            for count, event in enumerate(parse(answer.iter_lines()), 1):
                events.append(event)
                if count == cut:
                    break
    return events
