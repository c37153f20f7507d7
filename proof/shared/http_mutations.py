"""Mutations of HTTP requests: valid ones of every route, changed below HTTP by a number alone."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

HOST = b"Host: 127.0.0.1\r\n"
ODD: tuple[bytes, ...] = (
    *(b"\0", b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\xff", b"\xc3", b"\x80", b" ", b"\t", b":", b"%00"),
    *(b"%2e%2e", b"\x0b", b"../", b"\\", b'"', b"{", b"[", b"}", b"\xe2\x80\xa8", b"\xed\xa0\x80"),
    *(b"%", b"#", b"?", b"1e999"),
)
NUMBERS = (
    *(b"-1", b"0", b"1", b"99999999", b"18446744073709551616", b"9" * 400),
    *(b"0x10", b"+5", b"5,5", b" 5", b""),
)
HEADERS = (
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding : chunked",
    b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding: chunked, identity",
    b"Transfer-Encoding:\x0bchunked",
    b"Content-Length: 0",
    b"Content-Length: 5\r\nContent-Length: 6",
    b"Content-Length: -5",
    b"Host: evil.example",
    b"Host:",
    b"Connection: close, keep-alive",
    b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x",
    b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
    b"Expect: 100-continue",
    b"Expect: nothing",
    b"Content-Encoding: gzip",
    b"Content-Type: text/plain",
    b"Content-Type: application/json; charset=utf-7",
    b"X-Folded: a\r\n b",
    b"Bad Name: x",
    b": x",
    b"X-Long: " + b"y" * 40_000,
    b"Range: bytes=0-",
    b"Origin: null",
    b"Authorization: Bearer \xff\xfe",
    b"Trailer: Content-Length",
)
METHODS = (
    *(b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"TRACE", b"CONNECT", b"PRI", b"get"),
    *(b"G\0T", b""),
)
VERSIONS = (
    *(b"HTTP/1.0", b"HTTP/1.1", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.10", b"HTTP/9", b"http/1.1"),
    *(b"HTTP/1.1 x", b""),
)


def make_seeds(described: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    """A valid request of every route, as its description shows it: head and body."""
    seeds = []
    for path, methods in described["paths"].items():
        if path == "/admin/reload" or path.startswith(("/api/pull", "/api/delete")):
            continue  # they replace the workers on purpose, ask a hub, delete
        for method, route in methods.items():
            target = re.sub(r"\{[^}]*\}", "x", path)
            body = b""
            if "requestBody" in route:
                reference = route["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                schema = described["components"]["schemas"][reference.rpartition("/")[2]]
                body = json.dumps(_make_example(schema)).encode()
            kind = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body) if body else b""
            seeds.append((f"{method.upper()} {target} HTTP/1.1\r\n".encode() + HOST + kind, body))
    return seeds


def _make_example(schema: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, field in schema.get("properties", {}).items():
        if name in schema.get("required", ()) and field.get("examples"):
            found[name] = field["examples"][0]
    short = {"max_tokens": 2, "max_output_tokens": 2, "n_predict": 2, "stream": False}
    return found | {name: value for name, value in short.items() if name in schema.get("properties", {})}


Pieces = list[bytes]  # sent one after the other, with a pause between them
Mutation = Callable[[random.Random, bytes, bytes], Pieces]


def _whole(head: bytes, body: bytes) -> bytes:
    return head + b"\r\n" + body


def change_bytes(draw: random.Random, head: bytes, body: bytes) -> Pieces:
    """Bytes are replaced, put in or taken out anywhere."""
    data = bytearray(_whole(head, body))
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        data[at : at + draw.choice((0, 0, 1, 2, 9))] = draw.choice(
            (*ODD, draw.randbytes(1), draw.randbytes(3))
        )
    return [bytes(data)]


def change_body(draw: random.Random, head: bytes, body: bytes) -> Pieces:
    """JSON that is none, or of other types and sizes; its length is right."""
    text = bytearray(body or b'{"prompt": "x"}')
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(text) + 1)
        values = (b"null", b"NaN", b"[" * 70, b'"\\ud800"', b"\\u0000", b'"a":', b"true", b"1" * 300)
        odd = (*ODD, *NUMBERS, *values)
        text[at : at + draw.choice((0, 0, 1, 3, 12))] = draw.choice(odd)
    line, _, rest = head.partition(b"\r\n")
    rest = re.sub(rb"Content-Length: \d+\r\n", b"", rest)
    return [_whole(line + b"\r\n" + rest + b"Content-Length: %d\r\n" % len(text), bytes(text))]


def change_length(draw: random.Random, head: bytes, body: bytes) -> Pieces:
    """A length that is wrong, huge or no number."""
    number = draw.choice((*NUMBERS, b"%d" % (len(body) + draw.randint(-3, 3))))
    rest = re.sub(rb"Content-Length: \d+\r\n", b"", head)
    return [_whole(rest + b"Content-Length: " + number + b"\r\n", body)]


def add_headers(draw: random.Random, head: bytes, body: bytes) -> Pieces:
    """Headers that contradict each other, as in request smuggling, or that are none."""
    lines = head.split(b"\r\n")[:-1]
    for _ in range(draw.randint(1, 3)):
        lines.insert(draw.randint(1, len(lines)), draw.choice(HEADERS))
    return [_whole(b"\r\n".join(lines) + b"\r\n", body)]


def change_line(draw: random.Random, head: bytes, body: bytes) -> Pieces:
    """Another method, target or version."""
    line, _, rest = head.partition(b"\r\n")
    method, target, version = line.split(b" ")
    which = draw.randrange(4)
    method = draw.choice(METHODS) if which == 0 else method
    version = draw.choice(VERSIONS) if which == 1 else version
    if which > 1:
        long = target + b"?" + b"a=" * 20_000
        tricks = (
            *(b"http://evil.example" + target, b"//" + target, target + b"/..", long),
            *(b"/..%2f..%2fetc/passwd", target + b"\0", b"*", b"", b"/%ff%fe", target + b";x"),
            b"/" + b"a" * 9000,
        )
        target = draw.choice(tricks)
    return [_whole(b" ".join((method, target, version)) + b"\r\n" + rest, body)]


def chunk_body(draw: random.Random, head: bytes, body: bytes) -> Pieces:
    """A body in chunks, often with wrong sizes, extensions, line ends or trailers."""
    rest = re.sub(rb"Content-Length: \d+\r\n", b"" if draw.random() < 0.7 else rb"\g<0>", head)
    parts = []
    for at in range(0, len(body), 7):
        piece = body[at : at + 7]
        size = (
            b"%x" % len(piece) if draw.random() < 0.8 else draw.choice((*NUMBERS, b"ffffffffffffffff", b"g"))
        )
        extension = draw.choice((b"", b"", b"", b";a=b", b";" + b"x" * 5000, b" "))
        parts.append(size + extension + draw.choice((b"\r\n",) * 6 + (b"\n", b"")) + piece + b"\r\n")
    ends = (
        *(b"0\r\n\r\n",) * 4,
        *(b"0\r\nX: y\r\n\r\n", b"0\r\n", b"", b"0\r\nContent-Length: 5\r\n\r\n", b"00000\r\n\r\n"),
    )
    whole = _whole(rest + b"Transfer-Encoding: chunked\r\n", b"".join(parts) + draw.choice(ends))
    return [whole]


def pipeline(draw: random.Random, head: bytes, body: bytes) -> Pieces:
    """Several requests at once, some of them hidden in the body of the one before."""
    inner = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
    smuggled = _whole(
        b"POST /generate HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\nContent-Length: 6\r\n"
        b"Transfer-Encoding: chunked\r\n",
        b"0\r\n\r\nG",
    )
    order = [_whole(head, body), inner, draw.choice((inner, smuggled, inner[: draw.randrange(20)]))]
    draw.shuffle(order)
    return [b"".join(order * draw.choice((1, 1, 3, 12)))]


def truncate(draw: random.Random, head: bytes, body: bytes) -> Pieces:
    """An end in the middle: the client leaves."""
    whole = _whole(head, body)
    return [whole[: draw.randrange(len(whole))]]


def come_late(draw: random.Random, head: bytes, body: bytes) -> Pieces:
    """Two parts with a pause between them, and sometimes never the second."""
    whole = _whole(head, body)
    at = draw.randrange(1, len(whole))
    return [whole[:at], whole[at:]] if draw.random() < 0.8 else [whole[:at], b""]


MUTATIONS: Sequence[Mutation] = (
    *(change_bytes, change_bytes, change_body, change_body, change_length, add_headers, add_headers),
    *(change_line, chunk_body, pipeline, truncate, come_late),
)


def make_request(seeds: Sequence[tuple[bytes, bytes]], seed: int, number: int) -> tuple[str, Pieces]:
    """The request of this number: the kind of its mutation, and what is sent."""
    draw = random.Random(seed * 1_000_003 + number)
    mutation = draw.choice(MUTATIONS)
    return mutation.__name__, mutation(draw, *draw.choice(seeds))
