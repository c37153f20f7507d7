"""Mixed requests: every route that computes, with grammars, `n`, stop strings, embeddings, streamed or not.

An `Ask` knows how its answer must end; `exchange` sends it over HTTP/1.1 and reads the answer to its end.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench.workloads.text import words

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
REFUSALS = (429, 503)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. `sequences` is how many the server counts for it; `ends` counts the ends: one is right."""

    route: str
    body: Mapping[str, Any]
    ends: Callable[[bytes], int]
    sequences: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)


class Reply(NamedTuple):
    """What came back."""

    status: int
    body: bytes
    first_s: float  # from sending to the first byte
    total_s: float


class Closed(Exception):
    """The connection ended before the answer did."""


async def connect(port: int) -> Connection:
    return await asyncio.open_connection("127.0.0.1", port)


async def send(connection: Connection, ask: Ask) -> None:
    body = json.dumps(ask.body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in ask.headers.items())
    head = f"POST {ask.route} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{more}"
    connection[1].write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await connection[1].drain()


async def read_head(connection: Connection) -> tuple[int, dict[str, str]]:
    """Status and headers. Raises `Closed`."""
    try:
        head = await connection[0].readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        raise Closed("before the answer began") from None
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split(" ")[1]), headers


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    """The next chunk of a chunked body; empty at its end. Raises `Closed`."""
    try:
        size = int((await reader.readline()).strip() or b"-1", 16)
        if size < 0:
            raise Closed("inside of a streamed answer")
        return (await reader.readexactly(size + 2))[:-2]
    except (asyncio.IncompleteReadError, ConnectionError, ValueError):
        raise Closed("inside of a streamed answer") from None


async def exchange(connection: Connection, ask: Ask) -> Reply:
    """Send and read to the end. Raises `Closed`."""
    clock = asyncio.get_running_loop().time
    began = clock()
    await send(connection, ask)
    status, headers = await read_head(connection)
    first_s = clock() - began
    if headers.get("transfer-encoding") == "chunked":
        parts: list[bytes] = []
        while chunk := await read_chunk(connection[0]):
            if not parts:
                first_s = clock() - began
            parts.append(chunk)
        body = b"".join(parts)
    else:
        body = await connection[0].readexactly(int(headers.get("content-length", 0)))
    return Reply(status, body, first_s, clock() - began)


# Ends ----------------------------------------------------------------------------------------------


def _whole(body: bytes) -> int:
    """An answer that is not streamed is one JSON document."""
    return int(isinstance(json.loads(body), dict | list))


def _events(body: bytes) -> list[str]:
    return [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]


def _openai(choices: int) -> Callable[[bytes], int]:
    def count(body: bytes) -> int:
        """One finish reason for each choice, then [DONE], then nothing."""
        events = _events(body)
        ends = [
            choice["index"]
            for event in events[:-1]
            for choice in json.loads(event).get("choices", ())
            if choice.get("finish_reason")
        ]
        return int(events[-1] == "[DONE]" and sorted(ends) == list(range(choices)))

    return count


def _typed(*types: str) -> Callable[[bytes], int]:
    """Events with a type: one of these, at the end."""

    def count(body: bytes) -> int:
        found = [json.loads(event).get("type") for event in _events(body) if event != "[DONE]"]
        return sum(kind in types for kind in found) if found and found[-1] in types else 0

    return count


def _flagged(flag: str, *, lines: bool = False) -> Callable[[bytes], int]:
    """Events, or lines of JSON, of which the last is flagged."""

    def count(body: bytes) -> int:
        found = [line for line in body.decode().split("\n") if line] if lines else _events(body)
        flags = [bool(json.loads(each).get(flag)) for each in found if each != "[DONE]"]
        return sum(flags) if flags and flags[-1] else 0

    return count


# Requests ------------------------------------------------------------------------------------------


class MixedRequests:
    """Draws requests of all kinds, of random lengths, by a seed."""

    def __init__(
        self, seed: int, max_tokens: int = 24, prompt_words: int = 40, *, model: str = "any"
    ) -> None:
        """`model` is named where a route wants one; a server of one model takes any name."""
        self._random, self._model = random.Random(seed), model
        self._max_tokens, self._prompt_words = max_tokens, prompt_words
        self._number = 0
        self.kinds: tuple[Callable[[str, dict[str, Any]], Ask], ...] = (
            self._completion,
            self._chat,
            self._messages,
            self._responses,
            self._native,
            self._llama_server,
            self._ollama,
            self._embeddings,
            self._constrained,
            self._several,
        )

    def draw(self) -> Ask:
        source = self._random
        self._number += 1
        shared = source.random() < 0.3  # begins as others do
        start = words(f"shared {source.randrange(4)}", 20) + " " if shared else ""
        text = start + words(f"{self._number}", source.randint(1, self._prompt_words))
        fields: dict[str, Any] = {"temperature": source.choice((0.0, 0.8)), "seed": self._number}
        if source.random() < 0.1:
            fields["cache_prompt"] = False
        return source.choice(self.kinds)(text, fields)

    @property
    def _tokens(self) -> int:
        return self._random.randint(1, self._max_tokens)

    @property
    def _streams(self) -> bool:
        return self._random.random() < 0.6

    def _completion(self, text: str, fields: dict[str, Any]) -> Ask:
        stream = self._streams
        body = {"prompt": text, "max_tokens": self._tokens, "stream": stream, **fields}
        if self._random.random() < 0.2:
            body["stop"] = [" the", "ing"]
        return Ask("/v1/completions", body, _openai(1) if stream else _whole)

    def _chat(self, text: str, fields: dict[str, Any]) -> Ask:
        stream = self._streams
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages, "max_tokens": self._tokens, "stream": stream, **fields}
        return Ask("/v1/chat/completions", body, _openai(1) if stream else _whole)

    def _messages(self, text: str, fields: dict[str, Any]) -> Ask:
        stream, temperature = self._streams, min(1.0, fields["temperature"])
        messages = [{"role": "user", "content": text}]
        body = {"model": self._model, "messages": messages, "max_tokens": self._tokens, "stream": stream}
        ends = _typed("message_stop") if stream else _whole
        return Ask("/v1/messages", {**body, "temperature": temperature}, ends)

    def _responses(self, text: str, fields: dict[str, Any]) -> Ask:
        stream = self._streams
        body = {"input": text, "max_output_tokens": self._tokens, "stream": stream, "store": False}
        ends = _typed("response.completed", "response.incomplete") if stream else _whole
        return Ask("/v1/responses", {**body, "temperature": fields["temperature"]}, ends)

    def _native(self, text: str, fields: dict[str, Any]) -> Ask:
        if self._streams:
            body = {"prompt": text, "max_tokens": self._tokens, **fields}
            return Ask("/generate_stream", body, _flagged("finish_reason"))
        return Ask("/generate", {"prompt": text, "max_tokens": self._tokens, **fields}, _whole)

    def _llama_server(self, text: str, fields: dict[str, Any]) -> Ask:
        stream = self._streams
        body = {"prompt": text, "n_predict": self._tokens, "stream": stream, **fields}
        return Ask("/completion", body, _flagged("stop") if stream else _whole)

    def _ollama(self, text: str, fields: dict[str, Any]) -> Ask:
        stream = self._streams
        options = {"num_predict": self._tokens, "temperature": fields["temperature"]}
        body = {"model": self._model, "prompt": text, "stream": stream, "options": options}
        return Ask("/api/generate", body, _flagged("done", lines=True) if stream else _whole)

    def _embeddings(self, text: str, fields: dict[str, Any]) -> Ask:
        count = self._random.randint(1, 3)
        texts = [f"{text} {number}" for number in range(count)]
        return Ask("/v1/embeddings", {"input": texts}, _whole)

    def _constrained(self, text: str, fields: dict[str, Any]) -> Ask:
        kind = self._random.choice(("schema", "regex"))
        body = {"prompt": text, "max_tokens": 40, "stream": True, **fields}
        if kind == "schema":
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
            body["response_format"] = form
        else:
            body["regex"] = "[a-f]{1,8}-[0-9]{2}"
        return Ask("/v1/completions", body, _openai(1))

    def _several(self, text: str, fields: dict[str, Any]) -> Ask:
        count = self._random.randint(2, 3)
        fields = {**fields, "temperature": 0.8}
        body = {"prompt": text, "max_tokens": self._tokens, "n": count, "stream": True, **fields}
        return Ask("/v1/completions", body, _openai(count), sequences=count)
