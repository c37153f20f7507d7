"""Batches: requests in a file, one JSON object a line, and what becomes of them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cllm.errors import CllmError, InvalidRequest
from cllm.limits import MAX_BATCH_LINES
from cllm.server.body import describe
from cllm.server.job_store import BatchLine, LineCounts, LineTokens

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MAX_SHOWN_ERRORS = 100  # of lines, in a batch that is refused
OPENING_BYTES = 1024  # of a line, by which it is ordered: half of a long system prompt
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
_encode = msgspec.json.Encoder().encode


class FileObject(msgspec.Struct, kw_only=True):
    """A file as clients see it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | UnsetType = UNSET
    filename: str
    purpose: str
    status: str = "processed"


class LineError(msgspec.Struct):
    """What is wrong with a line of the input file; the first line is 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class LineErrors(msgspec.Struct):
    data: list[LineError]
    object: Literal["list"] = "list"


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch as clients see it. Times are seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: LineErrors | None = None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: LineCounts = LineCounts(0, 0, 0)
    usage: LineTokens = LineTokens()
    metadata: dict[str, str] = {}

    def enter(self, status: str) -> None:
        """Change the status, and note when."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))


class RequestLine(msgspec.Struct):
    """A line of the input file."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


_decode_line = msgspec.json.Decoder(RequestLine).decode
_decode_body = msgspec.json.Decoder(dict[str, Any]).decode


def read_request(file: BinaryIO, line: BatchLine) -> RequestLine:
    """Read a line that was checked."""
    file.seek(line.begin)
    return _decode_line(file.read(line.size))


def read_lines(path: Path, endpoint: str, max_line: int) -> tuple[list[BatchLine], list[LineError]]:
    """Where the requests of a file are, and what is wrong with lines. Empty lines count for nothing."""
    lines: list[BatchLine] = []
    errors: list[LineError] = []
    seen: set[str] = set()
    for number, begin, data in _split(path, max_line):
        try:
            lines.append(BatchLine(number, begin, len(data), _check_line(data, endpoint, seen, max_line)))
        except CllmError as error:
            errors.append(LineError(error.code, error.message, number, getattr(error, "field", None)))
        if len(lines) > MAX_BATCH_LINES:
            message = f"the file has too many lines, the limit is {MAX_BATCH_LINES}: split it"
            errors.append(LineError("too_many_lines", message, number))
        if len(errors) >= MAX_SHOWN_ERRORS or len(lines) > MAX_BATCH_LINES:
            break
    if not lines and not errors:
        errors.append(LineError("empty_file", "the input file has no line"))
    return lines, errors


def _split(path: Path, max_line: int) -> Iterator[tuple[int, int, bytes]]:
    """The number, the place and the bytes of each line; of one that is too long, more than may be."""
    with path.open("rb") as file:
        number = begin = 0
        while data := file.readline(max_line + 2):
            number += 1
            if len(data) > max_line and not data.endswith(b"\n"):
                while (more := file.readline(1 << 20)) and not more.endswith(b"\n"):
                    pass
            if data.strip():
                yield number, begin, data.rstrip(b"\r\n")
            begin = file.tell()


def _check_line(data: bytes, endpoint: str, seen: set[str], max_line: int) -> bytes:
    """The opening of a line's prompt. Raises InvalidRequest."""
    if len(data) > max_line:
        raise InvalidRequest(f"the line is over the limit of {max_line} bytes (--max-body-mb)")
    try:
        line = _decode_line(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise describe(error) from None
    try:
        body = _decode_body(line.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("body: expected an object", "body") from None
    if line.url != endpoint:
        raise InvalidRequest(f"url: the endpoint of this batch is {endpoint}", "url")
    for field in ("stream", "background"):
        if body.get(field):
            raise InvalidRequest(f"{field}: not in a batch: its answers are whole", field)
    if line.custom_id in seen:
        raise InvalidRequest("custom_id: another line has the same", "custom_id")
    seen.add(line.custom_id)
    return make_opening(body)


def make_opening(body: Mapping[str, Any]) -> bytes:
    """How the prompt of a request begins: lines with a common prefix are neighbours by this order."""
    parts = [body.get(name) for name in ("model", "tools", "instructions")]
    content = next((body[name] for name in ("messages", "input", "prompt") if body.get(name)), "")
    if isinstance(content, list):  # templates put system messages first
        roles = ("system", "developer")
        content = sorted(content, key=lambda each: not (isinstance(each, dict) and each.get("role") in roles))
    return _encode([*parts, content])[:OPENING_BYTES]


def make_answer(custom_id: str, status: int, body: bytes) -> bytes:
    """A line of the output file, or of the error file."""
    request_id = f"batch_req_{secrets.token_hex(12)}"
    answer = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _encode({"id": request_id, "custom_id": custom_id, "response": answer, "error": None})


def make_refusal(custom_id: str, code: str, message: str) -> bytes:
    """A line of the error file for a request that was not computed."""
    request_id, error = f"batch_req_{secrets.token_hex(12)}", {"code": code, "message": message}
    return _encode({"id": request_id, "custom_id": custom_id, "response": None, "error": error})
