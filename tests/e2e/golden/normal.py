"""Answers in a normal form: what may differ between two runs of one request is taken out, nothing else.

What may differ: ids (numbered by first appearance), times, versions, cache counters, and where the text of a
stream is cut. A reader that falls behind gets merged pieces, so pieces of one text are joined, text that came
with an ending stands before it, and the choices of one call stand one after another.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

Event = dict[str, Any]  # "data", and "event" where it has a name

_ID = re.compile(r"\b([a-z]+)[-_]([0-9a-f]{8,})(-\d+)?\b|\b[0-9a-f]{32}\b")
_WORDS = (
    (re.compile(r"(cllm[- ])\d+\.\d+\.\d+\w*"), r"\1<version>"),
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z"), "<time>"),
    (re.compile(r"(try again in) \d+ s"), r"\1 <seconds>"),
    (re.compile(r"(127\.0\.0\.1):\d+"), r"\1:<port>"),
)
_NUMBERS = frozenset(
    {"created", "created_at", "completed_at", "prompt_ms", "predicted_ms", "predicted_per_second", "seed"}
    | {"prompt_per_token_ms", "prompt_per_second", "predicted_per_token_ms", "last_used", "loaded_at"}
    | {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration", "time_ms", "save_ms"}
    | {"restore_ms", "response_time", "tokens_per_second"}
    | {"snapshot", "leased_total", "released_total", "cleared_cells_total", "n_erased"}
    | {
        "cached_tokens",
        "cache_n",
        "tokens_cached",
        "prompt_n",
        "decoded_tokens",
        "steps",
        "ubatches",
        "cells",
    }
    # a delta that holds the end of thoughts and the first words counts as one or the other
    | {"cache_read_input_tokens", "reasoning_tokens"}
)
# Where pieces of text are, and what comes in pieces beside them.
_TEXTS = (
    ("choices", 0, "text"),
    ("choices", 0, "delta", "content"),
    ("choices", 0, "delta", "reasoning_content"),
    ("choices", 0, "delta", "tool_calls", 0, "function", "arguments"),
    ("delta",),
    ("delta", "text"),
    ("delta", "thinking"),
    ("delta", "partial_json"),
    ("token",),
    ("content",),
    ("response",),
    ("message", "content"),
    ("message", "thinking"),
)
_LISTS = (
    ("choices", 0, "logprobs", "content"),
    ("choices", 0, "logprobs", "tokens"),
    ("choices", 0, "logprobs", "token_logprobs"),
    ("choices", 0, "logprobs", "top_logprobs"),
    ("choices", 0, "logprobs", "text_offset"),
    ("logprobs",),
    ("tokens",),
    ("completion_probabilities",),
)


def parse(lines: Iterable[str]) -> Iterator[Event]:
    """Server-sent events without comments; anything else is an error."""
    event: Event = {}
    for line in lines:
        if not line:
            if event:
                yield event
            event = {}
        elif line == ":":
            assert not event, "a comment within an event"
        elif line.startswith("event: "):
            event["event"] = line.removeprefix("event: ")
        else:
            assert line.startswith("data: "), line
            text = line.removeprefix("data: ")
            event["data"] = text if text == "[DONE]" else json.loads(text)
    assert not event, "the stream ended within an event"


def normal(events: Iterable[Event]) -> list[Event]:
    """The normal form of a stream."""
    numbered = _in_sequence(list(events))
    names: dict[str, str] = {}
    apart = [part for event in numbered for part in _apart(plain(event, names))]
    joined: list[Event] = []
    for event in sorted_choices(apart):
        if joined and (both := _joined(joined[-1], event)) is not None:
            joined[-1] = both
        else:
            joined.append(event)
    return joined


def _in_sequence(events: list[Event]) -> list[Event]:
    """Sequence numbers must count; then they are 0, because joining pieces leaves gaps."""
    events = copy.deepcopy(events)
    numbered = [event["data"] for event in events if "sequence_number" in event["data"]]
    assert [each["sequence_number"] - index for index, each in enumerate(numbered)] == [0] * len(numbered)
    for each in numbered:
        each["sequence_number"] = 0
    return events


def plain(value: Any, names: dict[str, str] | None = None, *, key: str = "", loose: bool = False) -> Any:
    """The normal form of a value; a `loose` one has no numbers but 0."""
    names = {} if names is None else names
    if isinstance(value, int | float) and (loose or key in _NUMBERS) and not isinstance(value, bool):
        return type(value)(0)
    if key in ("cached_from", "retry-after", "process-start-time-unix"):
        return ""
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if not key.startswith("draft_n")}
        if cached := value.get("cache_read_input_tokens"):  # Anthropic's input tokens are those not cached
            value = {**value, "input_tokens": value["input_tokens"] + cached}
        if value.get("stop") is False and "tokens_predicted" in value:  # so far
            value = {**value, "tokens_predicted": 0}
        return {inner: plain(item, names, key=inner, loose=loose) for inner, item in value.items()}
    if isinstance(value, list):
        return [plain(item, names, loose=loose) for item in value]
    if isinstance(value, str):
        for pattern, word in _WORDS:
            value = pattern.sub(word, value)
        return _ID.sub(lambda found: _name(found, names), value)
    return value


def _name(found: re.Match[str], names: dict[str, str]) -> str:
    kind = found.group(1) or "id"
    count = sum(name.startswith(f"<{kind} ") for name in names.values())
    return names.setdefault(found.group(), f"<{kind} {count + 1}>")


def _apart(event: Event) -> list[Event]:
    """Text that came together with an ending, before the ending."""
    data = event["data"]
    if not isinstance(data, dict):
        return [event]
    words, ending = copy.deepcopy(event), copy.deepcopy(event)
    choices = data.get("choices") or [{}]
    if choices[0].get("finish_reason") and (choices[0].get("text") or choices[0].get("delta")):
        words["data"].pop("timings", None)
        words["data"]["choices"][0]["finish_reason"] = None
        last = ending["data"]["choices"][0]
        last["logprobs"] = None
        last |= dict[str, Any](delta={}) if "delta" in last else dict[str, Any](text="")
        return [words, ending]
    if data.get("stop") is True and data.get("content"):
        kept = ("content", "tokens", "completion_probabilities")
        words["data"] = {key: data[key] for key in kept if key in data} | {"stop": False}
        ending["data"].update({"content": "", "tokens": []})
        ending["data"].pop("completion_probabilities", None)
        return [words, ending]
    return [event]


def sorted_choices(events: list[Event]) -> list[Event]:
    """The events of one choice together, in their order; those of no choice stay at the end of all."""

    def place(event: Event) -> tuple[bool, int]:
        data = event["data"] if isinstance(event["data"], dict) else {}
        if "id_slot" in data:  # llama-server's
            return False, data["index"]
        return (False, data["choices"][0]["index"]) if data.get("choices") else (True, 0)

    if not any(place(event) == (False, 1) for event in events):
        return events
    return sorted(events, key=place)


def _joined(first: Event, second: Event) -> Event | None:
    """Both as one event, if they are pieces of one text."""
    texts = [path for path in _TEXTS if isinstance(_at(first, path), str)]
    if not texts or json.dumps(_emptied(first)) != json.dumps(_emptied(second)):
        return None
    both = copy.deepcopy(first)
    for path in (*texts, *_LISTS):
        if (more := _at(second, path)) is not None and _at(both, path) is not None:
            _put(both, path, _at(both, path) + more)
    return both


def _emptied(event: Event) -> Event:
    emptied = copy.deepcopy(event)
    for path in (*_TEXTS, *_LISTS):
        if isinstance(value := _at(event, path), (str, list)):
            _put(emptied, path, type(value)())
    return emptied


def _at(event: Event, path: tuple[str | int, ...]) -> Any:
    value: Any = event["data"]
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _put(event: Event, path: tuple[str | int, ...], value: Any) -> None:
    place: Any = event["data"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
