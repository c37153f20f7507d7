"""Errors over HTTP: the status of each error type, and the shape of each API's error body."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Match, Route

from cllm.errors import (
    CapacityError,
    ClientError,
    ClientGone,
    CllmError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineError,
    Forbidden,
    InvalidRequest,
    ModelBusy,
    ModelDoesNotFit,
    NotEnoughMemory,
    NotFound,
    NotSupported,
    QueueFull,
    RateLimited,
    ReloadFailed,
    SlowReader,
    StorageFailed,
    Unauthorized,
    from_code,
)
from cllm.types import Failure

log = logging.getLogger(__name__)

STATUS: dict[type[Exception], int] = {
    ClientError: 400,
    Unauthorized: 401,
    Forbidden: 403,
    NotFound: 404,
    NotSupported: 501,
    CapacityError: 503,
    QueueFull: 429,
    RateLimited: 429,
    DeadlineExceeded: 504,
    SlowReader: 408,
    ClientGone: 499,
    ReloadFailed: 409,
    ModelBusy: 409,
    EngineError: 500,
    StorageFailed: 507,
    ModelDoesNotFit: 507,
    NotEnoughMemory: 503,  # of embeddings, whose memory is allocated by the first call
    CllmError: 500,
}
_TYPES = {400: "invalid_request_error", 404: "invalid_request_error", 429: "rate_limit_error"}
# Errors of a union's branch for a value of another kind.
_OTHER_KIND = (
    "string_type",
    "list_type",
    "dict_type",
    "model_type",
    "model_attributes_type",
    "literal_error",
)
# Code and message for errors of the framework; an empty message keeps its own.
_HTTP = {
    404: ("not_found", "this route does not exist: GET /docs lists the routes"),
    405: ("method_not_allowed", "this route does not support this method: GET /docs lists the methods"),
    413: ("payload_too_large", ""),
}
# llama-server's own routes, and its error types by status.
_LLAMA = re.compile(
    "/(completions?|infill|tokenize|detokenize|apply-template|props|slots|lora-adapters|embeddings?|rerank"
    "|reranking|models|chat/completions|responses)(/.*)?"
)
_LLAMA_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
# Anthropic's error types by status.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_status(error: Exception) -> int:
    """The HTTP status of an error: that of its nearest ancestor in the table."""
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


def error_body(path: str, status: int, code: str, message: str, field: str | None = None) -> dict[str, Any]:
    """An error in the shape of the route's API: Anthropic's, OpenAI's, Ollama's, llama-server's or cllm's."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    if path.startswith("/v1/"):
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"message": message, "type": kind, "param": field, "code": code}}
    if path.startswith("/api/"):
        return {"error": message}
    if _LLAMA.fullmatch(path):
        kind = _LLAMA_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        if code != ContextLengthExceeded.code:
            return {"error": {"code": status, "message": message, "type": kind}}
        found = re.search(r"(\d+) tokens, but .*?(\d+)", message)  # all that crosses processes is the message
        numbers = {"n_prompt_tokens": int(found[1]), "n_ctx": int(found[2])} if found else {}
        error = {"code": status, "message": message, "type": "exceed_context_size_error", **numbers}
        return {"error": error}
    return {"success": False, "error": code, "message": message}


def failure_body(path: str, failure: Failure) -> dict[str, Any]:
    """An error inside a stream, in the shape that the route's error responses have."""
    status = error_status(from_code(failure.code, failure.message))
    return error_body(path, status, failure.code, failure.message)


def failure_event(failure: Failure, request_id: str) -> dict[str, Any]:
    """An error inside a stream of `/generate_stream`: the last event."""
    return {"id": request_id, "error": failure.code, "message": failure.message, "done": True}


def respond(request: Request, error: Exception) -> JSONResponse:
    """Any error as a response; an unexpected one is logged and answered without details."""
    path = request.url.path
    if not isinstance(error, CllmError):
        log.exception("unexpected error in %r", path, exc_info=error)
        body = error_body(
            path, 500, "internal_error", "an internal error occurred: the server's log has the details"
        )
        return JSONResponse(body, 500)
    status = error_status(error)
    headers = {}
    if isinstance(error, CapacityError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    field = error.field if isinstance(error, InvalidRequest) else None
    return JSONResponse(error_body(path, status, error.code, error.message, field), status, headers)


def describe_validation(errors: list[dict[str, Any]]) -> tuple[str, str | None]:
    """The message for the first error of a body, and its field."""
    # A union reports every branch; an error inside one says more than that the value is of another kind.
    first = next(
        (error for error in errors if error["loc"][:2] == errors[0]["loc"][:2] and not _is_other_kind(error)),
        errors[0],
    )
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] in ("json_invalid", "missing") and not where:
        return "the body is not a JSON object", None
    if first["type"] == "json_invalid":
        return f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}", None
    # Unions add the name of the branch; the field is the first part.
    field = where[0] if where else None
    if field == "options" and len(where) > 1:  # Ollama's, an object of many
        field = ".".join(where[:2])
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "too_long" and isinstance(first.get("input"), str):
        message = message.replace(" items after validation", " characters")  # pydantic's words in a union
    if first["type"] == "missing" and len(where) > 1:
        message = f"{where[-1]!r} is missing"
    if field is None and (named := message.partition(": ")[0]).isidentifier():
        return message, named  # fields that contradict each other: the message names one
    return (f"{field}: {message}" if field else f"the body must be a JSON object: {message}"), field


def _is_other_kind(error: dict[str, Any]) -> bool:
    """True where the value is of another kind; a list whose first item is no integer is no list of tokens."""
    return error["type"] in _OTHER_KIND or (error["type"] == "int_type" and error["loc"][-1] == 0)


def _find_methods(app: FastAPI, request: Request) -> list[str]:
    """The methods of all routes that have the path of a request."""
    routes = [each for each in app.routes if isinstance(each, Route) and each.include_in_schema]
    paths = (each.path for each in routes if each.matches(request.scope)[0] is not Match.NONE)
    path = next(paths, None)
    return sorted({method for each in routes if each.path == path for method in each.methods or ()})


def install(app: FastAPI) -> None:
    """Register the handlers that turn errors into responses."""

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        return respond(request, error)

    async def on_validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        message, field = describe_validation(list(error.errors()))
        return respond(request, InvalidRequest(message, field))

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code, message = _HTTP.get(error.status_code, ("invalid_request", ""))
        body = error_body(request.url.path, error.status_code, code, message or str(error.detail))
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(_find_methods(app, request))
        return JSONResponse(body, error.status_code, headers)

    app.add_exception_handler(CllmError, on_error)
    app.add_exception_handler(Exception, on_error)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
