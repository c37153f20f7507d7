"""OpenAI's files and batches: upload requests, run them in idle time, read the answers.

Also the streams of every dialect that can be reconnected to: answers that outlive their connection, too.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections import Counter
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

import msgspec
from msgspec import Meta
from starlette.datastructures import UploadFile
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response

from cllm.errors import InvalidRequest, RateLimited
from cllm.limits import MAX_FILE_BYTES, MAX_UPLOADS, check
from cllm.server.batches import BatchObject, Endpoint, FileObject, LineErrors, read_lines
from cllm.server.body import Body, Metadata, Name
from cllm.server.dialects.openai import openai
from cllm.server.dialects.openai.chat import EXAMPLE_EVENTS
from cllm.server.dialects.operation import CancelledResponse
from cllm.server.examples import make_example
from cllm.server.job_store import JobDatabase, JobStore, StoredObject
from cllm.server.sse import resume_stream

MAX_LISTED = 10_000
WINDOW = re.compile(r"(\d{1,4})([mhd])")
SECONDS = {"m": 60, "h": 3600, "d": 86400}
_encode, _replace = msgspec.json.Encoder().encode, msgspec.structs.replace
NUMBER = r"[0-9]{1,10}"  # Python refuses to read one of thousands of digits
_decode_batch = msgspec.json.Decoder(BatchObject).decode
_decode_file = msgspec.json.Decoder(FileObject).decode
Listed = TypeVar("Listed", FileObject, BatchObject)


class Expiry(msgspec.Struct, Body, kw_only=True):
    """When a file is deleted."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Meta(ge=1, le=10**9)]


class BatchBody(msgspec.Struct, Body, kw_only=True):
    """`POST /v1/batches`."""

    input_file_id: Name
    endpoint: Endpoint
    completion_window: Annotated[str, Meta(max_length=8)] = "24h"
    output_expires_after: Expiry | None = None
    metadata: Metadata = {}

    def __post_init__(self) -> None:
        if not self.window_s:
            raise ValueError("completion_window: must be a number of minutes, hours or days, as 30m, 24h, 7d")

    @property
    def window_s(self) -> int:
        """Seconds to the end of the window; 0 where it is none."""
        found = WINDOW.fullmatch(self.completion_window)
        return int(found[1]) * SECONDS[found[2]] if found else 0


class ObjectList(msgspec.Struct, Generic[Listed]):
    """A page of a list."""

    data: list[Listed]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"

    @classmethod
    def make(cls, data: list[Listed], *, more: bool = False) -> Self:
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data, first, last, more)


class FileList(ObjectList[FileObject]):
    pass


class BatchList(ObjectList[BatchObject]):
    pass


class DeletedObject(msgspec.Struct):
    id: str
    object: str
    deleted: bool = True


def get_jobs(http: HttpRequest) -> tuple[JobStore, str]:
    """The store of the app, and the tenant that asks."""
    return http.app.state.jobs, http.scope["state"]["tenant"].name


def read_page(http: HttpRequest, most: int) -> tuple[int, str | None, bool]:
    """`limit`, `after` and `order` of a list. Raises InvalidRequest."""
    given, order = http.query_params.get("limit", ""), http.query_params.get("order", "desc")
    if given and not (re.fullmatch(NUMBER, given) and 1 <= int(given) <= MAX_LISTED):
        raise InvalidRequest(f"limit: must be a number from 1 to {MAX_LISTED}", "limit")
    return int(given or most), http.query_params.get("after"), order == "asc"


# Files ------------------------------------------------------------------------------------------------


@openai.post("/v1/files")
async def upload_file(http: HttpRequest) -> FileObject:
    """Upload a file of requests: multipart, with the fields `file` and `purpose`."""
    store, tenant = get_jobs(http)
    length = http.headers.get("content-length", "0")
    await store.run(JobDatabase.check, int(length) if re.fullmatch(NUMBER, length) else 0, tenant)
    uploads: Counter[str] = http.app.state.uploads  # whose bodies are being received
    if uploads[tenant] >= MAX_UPLOADS:
        raise RateLimited(f"{MAX_UPLOADS} uploads at the same time", 1.0)
    uploads[tenant] += 1
    try:
        return await _receive_file(http, store, tenant)
    finally:
        uploads[tenant] -= 1


async def _receive_file(http: HttpRequest, store: JobStore, tenant: str) -> FileObject:
    async with http.form(max_files=1, max_fields=8) as form:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise InvalidRequest("file: this field is required, as a part of multipart/form-data", "file")
        if not isinstance(purpose, str) or not re.fullmatch(r"[a-z_-]{1,32}", purpose):
            raise InvalidRequest("purpose: this field is required; of requests it is batch", "purpose")
        size, now = file.size or 0, time.time()
        check(size, MAX_FILE_BYTES, "bytes", "file", "split it")
        seconds = form.get("expires_after[seconds]")
        expires = None
        if seconds is not None:
            text = str(seconds)
            after = Expiry.parse({"seconds": int(text) if re.fullmatch(NUMBER, text) else text})
            expires = now + after.seconds
        new = FileObject(
            id=f"file-{uuid.uuid4().hex}",
            bytes=size,
            created_at=int(now),
            expires_at=msgspec.UNSET if expires is None else int(expires),
            filename=(file.filename or "file")[:256],
            purpose=purpose,
        )
        await store.add_file(StoredObject(new.id, tenant, now, expires, record=_encode(new)), file.file, size)
    return new


@openai.get("/v1/files", FileList.make([make_example(FileObject)]))
async def list_files(http: HttpRequest) -> FileList:
    """List the files, the newest first."""
    store, tenant = get_jobs(http)
    (limit, after, oldest), purpose = read_page(http, MAX_LISTED), http.query_params.get("purpose")
    more: Any = {"oldest": oldest, "purpose": purpose}
    found = await store.run(JobDatabase.list_objects, "file", tenant, limit + 1, after, **more)
    return FileList.make([_decode_file(each.record) for each in found[:limit]], more=len(found) > limit)


@openai.get("/v1/files/{file_id}")
async def retrieve_file(file_id: str, http: HttpRequest) -> FileObject:
    """Return what is known of a file."""
    store, tenant = get_jobs(http)
    return _decode_file((await store.run(JobDatabase.get, "file", tenant, file_id)).record)


@openai.get("/v1/files/{file_id}/content", '{"custom_id": "1", …}')
async def get_content(file_id: str, http: HttpRequest) -> Response:
    """Return the content of a file."""
    store, tenant = get_jobs(http)
    await store.run(JobDatabase.get, "file", tenant, file_id)
    return FileResponse(store.get_path(file_id), media_type="application/octet-stream")


@openai.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, http: HttpRequest) -> DeletedObject:
    """Delete a file, unless a batch that runs reads it."""
    store, tenant = get_jobs(http)

    def delete(database: JobDatabase) -> None:
        for each in database.list_active("batch"):
            if _decode_batch(each.record).input_file_id == file_id and each.tenant == tenant:
                raise InvalidRequest(f"file_id: {each.id} reads this file: cancel it first", "file_id")
        database.delete("file", tenant, file_id)

    await store.run(delete)
    return DeletedObject(file_id, "file")


# Batches ----------------------------------------------------------------------------------------------


@openai.post("/v1/batches")
async def create_batch(body: BatchBody, http: HttpRequest) -> BatchObject:
    """Run the requests of a file in idle time.

    A file with wrong lines makes a batch that has failed; its `errors` name the lines.
    """
    store, tenant = get_jobs(http)
    file = await store.run(JobDatabase.get, "file", tenant, body.input_file_id)
    path, max_line = store.get_path(file.id), http.app.state.max_line
    lines, errors = await asyncio.to_thread(read_lines, path, body.endpoint, max_line)
    now = int(time.time())
    batch = BatchObject(
        id=f"batch_{uuid.uuid4().hex}",
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        status="in_progress",
        created_at=now,
        expires_at=now + body.window_s,
        metadata=body.metadata,
    )
    batch.enter("failed" if errors else "in_progress")
    if errors:
        batch.errors, lines = LineErrors(errors), []
    stored = StoredObject(
        batch.id,
        tenant,
        time.time(),
        time.time() + http.app.state.response_ttl,
        active=not errors,
        record=_encode(batch),
        more=b"" if body.output_expires_after is None else b"%d" % body.output_expires_after.seconds,
    )

    def add(database: JobDatabase) -> None:
        until = batch.expires_at + http.app.state.response_ttl
        keep = file.expires is not None and file.expires < until and not errors
        database.change("file", tenant, file.id, lambda each: _replace(each, expires=until) if keep else each)
        database.add("batch", stored, 0, lines)

    await store.run(add)
    http.app.state.batches.wake()
    return await _describe(store, stored)


async def _describe(store: JobStore, stored: StoredObject) -> BatchObject:
    """A batch with the counts of its lines."""
    batch = _decode_batch(stored.record)
    if stored.active:
        batch.request_counts, batch.usage = await store.run(JobDatabase.count_lines, stored.id)
    return batch


@openai.get("/v1/batches", BatchList.make([make_example(BatchObject)]))
async def list_batches(http: HttpRequest) -> BatchList:
    """List the batches, the newest first."""
    store, tenant = get_jobs(http)
    limit, after, oldest = read_page(http, 20)
    found = await store.run(JobDatabase.list_objects, "batch", tenant, limit + 1, after, oldest=oldest)
    return BatchList.make([await _describe(store, each) for each in found[:limit]], more=len(found) > limit)


@openai.get("/v1/batches/{batch_id}")
async def retrieve_batch(batch_id: str, http: HttpRequest) -> BatchObject:
    """Return a batch, with the counts of its lines."""
    store, tenant = get_jobs(http)
    return await _describe(store, await store.run(JobDatabase.get, "batch", tenant, batch_id))


@openai.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, http: HttpRequest) -> BatchObject:
    """Cancel a batch: lines that run end, and the answers so far become its files."""
    store, tenant = get_jobs(http)

    def cancel(stored: StoredObject) -> StoredObject:
        batch = _decode_batch(stored.record)
        if batch.status == "in_progress":
            batch.enter("cancelling")
        return _replace(stored, record=_encode(batch))

    stored = await store.run(JobDatabase.change, "batch", tenant, batch_id, cancel)
    http.app.state.batches.wake()
    return await _describe(store, stored)


# Streams ------------------------------------------------------------------------------------------------


@openai.get("/v1/streams/{stream_id}", events=EXAMPLE_EVENTS)
async def follow_stream(stream_id: str, http: HttpRequest) -> Response:
    """Return the events of a stream after the one of `Last-Event-ID`, or all, then those to come.

    The id of a stream is in the header `X-Stream-Id` of its response, and in the ids of its events.
    """
    return resume_stream(http, stream_id)


@openai.delete("/v1/streams/{stream_id}")
async def cancel_stream(stream_id: str, http: HttpRequest) -> CancelledResponse:
    """Cancel the answer of a stream."""
    http.app.state.logs.find(http.scope["state"]["tenant"].name, stream_id)[0].cancel()
    return CancelledResponse(stream_id)
