"""Streams that can be reconnected to, of every dialect."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.server.answer_log import NO_STREAM
from cllm.server.dialects.openai import openai
from cllm.server.dialects.openai.chat import EXAMPLE_EVENTS
from cllm.server.dialects.operation import CancelledResponse
from cllm.server.sse import resume_stream

_NOT_FOUND = {404: ("not_found", NO_STREAM, "No such stream, or none any more")}


@openai.get("/v1/streams/{stream_id}", None, events=EXAMPLE_EVENTS, errors=_NOT_FOUND)
async def follow_stream(stream_id: str, http: HttpRequest) -> Response:
    """Return the events of a stream after the one of `Last-Event-ID`, or all, then those to come.

    The id of a stream is in the header `X-Stream-Id` of its response, and in the ids of its events.
    """
    return resume_stream(http, stream_id)


@openai.delete("/v1/streams/{stream_id}", CancelledResponse("chatcmpl-1"), errors=_NOT_FOUND)
async def cancel_stream(stream_id: str, http: HttpRequest) -> CancelledResponse:
    """Cancel the answer of a stream."""
    http.app.state.logs.find(http.scope["state"]["tenant"].name, stream_id)[0].cancel()
    return CancelledResponse(stream_id)
