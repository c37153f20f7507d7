"""The OpenAPI description at `/openapi.json`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cllm import __version__
from cllm.errors import InvalidRequest
from cllm.server.dialect import EVENTS, JSON, NDJSON, PLAIN, Dialect, HttpError, Route
from cllm.server.examples import make_example
from cllm.server.middleware import ADMIN, OPEN

REFERENCE = "#/components/schemas/{name}"
ERRORS = {  # status → code and message of an example
    400: ("invalid_request", "{field}: this field is required"),
    401: ("invalid_api_key", "an API key is needed: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"),
    403: ("forbidden", "this server does not accept this Host header: add its name to --allowed-hosts"),
    404: ("model_not_found", "this model does not exist: GET /v1/models lists the models served"),
    408: ("request_timeout", "the body was not complete within 30 s"),
    413: ("payload_too_large", "the body is over the limit of 8388608 bytes (--max-body-mb)"),
    415: ("unsupported_media_type", "the body must be JSON: send it with 'Content-Type: application/json'"),
    429: ("queue_full", "1024 requests are waiting and the queue holds 1024; try again in 3 s"),
    431: ("headers_too_large", "the headers are over the limit of 32768 bytes"),
    500: ("engine_died", "the engine process was ended by SIGSEGV"),
    503: ("engine_not_ready", "the model is still loading"),
    504: ("deadline_exceeded", "the request was not done within its 30 s: it was still waiting"),
}
WHEN = {
    400: "A field is wrong (the message names it), the prompt is too long (`context_length_exceeded`), or "
    "the model does not support the request",
    401: "The server has API keys, and the request has none of them",
    403: "The Host header is not a name of this server",
    404: "No such model",
    408: "The body took too long to arrive; inside a stream: the client does not read it (`slow_reader`)",
    413: "The body is too large",
    415: "The content type of the body is not JSON",
    429: "The queue is full, or the key has reached its limits (`rate_limit_exceeded`)",
    431: "The address and headers are too large",
    500: "The engine died or failed",
    503: "Loading, an engine that keeps crashing, or shutting down",
    504: "The request's deadline passed before anything was sent",
}
_NO_ADMIN = "; or the key is not an admin's"
_NO_FOLDER = "; or the server was started without the folder this needs (`--model-dir`)"
_FOR_OPERATORS = "Needs an admin's API key where the server has keys; else a server on loopback."
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key, as `cllm keys new` makes them"},
    "x-api-key": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "The same key, as Anthropic's clients send it",
    },
}
_RETRY = {"Retry-After": {"description": "Seconds to wait", "schema": {"type": "integer"}, "example": 3}}
_POSITION = {
    "X-Queue-Position": {
        "description": "Requests that waited for a slot, up to this one, when it was accepted; 0: none",
        "schema": {"type": "integer"},
        "example": 0,
    }
}


def make_description(dialects: Sequence[Dialect], *, closed: bool) -> dict[str, Any]:
    """The OpenAPI description of all routes that are shown. A `closed` server needs keys."""
    routes = [route for dialect in dialects for route in dialect.routes if route.shown]
    bodies = dict.fromkeys(route.body for route in routes if route.body is not None)
    kinds = dict.fromkeys([*bodies, *(kind for route in routes if (kind := _get_kind(route)) is not None)])
    found, schemas = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    references = dict(zip(kinds, found, strict=True))
    for body in bodies:
        if body.EXAMPLE:
            _resolve(schemas, references[body])["example"] = dict(body.EXAMPLE)
    for field in (each for schema in schemas.values() for each in schema.get("properties", {}).values()):
        if field.keys() == {"enum"}:  # the tag of a struct in a union
            field["description"] = "Which of the forms this is"
    paths: dict[str, Any] = {}
    for route in routes:
        described = _describe(route, references, schemas, closed=closed)
        paths.setdefault(re.sub(r":\w+}", "}", route.path), {})[route.method.lower()] = described
    tags = {dialect.name: dialect.about for dialect in dialects}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "cllm",
            "description": "GGUF models for many users at once, on llama.cpp.",
            "version": __version__,
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": _SCHEMES},
        "tags": [{"name": name, "description": about} for name, about in tags.items()],
    }


def _get_kind(route: Route) -> Any:
    """The type of a route's answers; None where they are plain text, or a stream alone."""
    example = _get_example(route)
    if example is None or isinstance(example, str):
        return None
    return list[type(example[0])] if isinstance(example, list) else type(example)  # type: ignore[misc]


def _get_example(route: Route) -> Any:
    return make_example(route.answer) if isinstance(route.answer, type) else route.answer


def _resolve(schemas: dict[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """The schema that a reference names."""
    found: dict[str, Any] = schemas[str(reference["$ref"]).rpartition("/")[2]]
    return found


def _describe(
    route: Route, references: Mapping[Any, Any], schemas: dict[str, Any], *, closed: bool
) -> dict[str, Any]:
    first, _, more = inspect.cleandoc(route.handler.__doc__ or "").partition("\n")
    operators = route.path.startswith(ADMIN)
    described: dict[str, Any] = {
        "tags": [route.dialect.name],
        "summary": first.removesuffix("."),
        "description": "\n\n".join(filter(None, (more.strip(), _FOR_OPERATORS if operators else ""))),
        "operationId": re.sub(r"\W+", "_", f"{route.handler.__name__}_{route.path}_{route.method.lower()}"),
        "security": _security(route.path, closed=closed),
    }
    if names := re.findall(r"{(\w+)", route.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    required, named = None, route.path.startswith("/v1/models/")
    if route.body is not None:
        reference = references[route.body]
        schema = _resolve(schemas, reference)
        required = next(iter(schema.get("required", ())), None)
        named = named or "model" in schema.get("properties", ())
        described["requestBody"] = {"content": {JSON: {"schema": reference}}, "required": True}
    if route.form:
        content = {"multipart/form-data": {"schema": route.form}}
        described["requestBody"] = {"content": content, "required": True}
    described["responses"] = _responses(
        route, _content(route, references.get(_get_kind(route))), required, named=named
    )
    return described


def _content(route: Route, schema: Any) -> dict[str, Any]:
    """The answers of a route, by content type."""
    content: dict[str, Any] = {}
    example = _get_example(route)
    if isinstance(example, str):
        content[PLAIN] = {"schema": {"type": "string"}, "example": example}
    elif example is not None:
        if route.several:
            one = {"anyOf": [schema, {"type": "object", "description": "What `response_fields` names"}]}
            schema = {"anyOf": [*one["anyOf"], {"type": "array", "items": one}]}
        content[JSON] = {"schema": schema, "example": msgspec.to_builtins(example)}
    if route.events:
        content[EVENTS] = {"example": route.events.decode()}
    if route.lines:
        content[NDJSON] = {"example": route.lines.decode()}
    return content


def _security(path: str, *, closed: bool) -> list[dict[str, list[str]]]:
    """Either scheme, with the role it takes; `{}`: or without any."""
    if path in OPEN:
        return []
    roles = ["admin"] if path.startswith(ADMIN) else []
    return [*({name: roles} for name in _SCHEMES), *([] if closed else [{}])]


def _responses(route: Route, content: dict[str, Any], required: str | None, *, named: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"200": {"description": "Done", "content": content}}
    statuses = {403, 431, *route.errors, *((404,) if named else ())}
    if route.path not in OPEN:
        statuses |= {401, 500, 503}
    if route.method == "POST":
        statuses |= {400, 408, 413, 415}
    if route.computes:
        statuses |= {429, 504}
        found["200"]["headers"] = _POSITION
    for status in sorted(statuses):
        code, message, when = route.errors.get(status) or (*ERRORS[status], WHEN[status])
        field = required if status == 400 else None
        if status == 400 and field is None:  # no field is required
            message = "the body is not a JSON object"
        message = message.format(field=field)
        error = InvalidRequest(message, field) if status == 400 else HttpError(status, code, message)
        if status == 403:
            admin = route.path.startswith("/admin/")
            when += _NO_ADMIN * route.path.startswith(ADMIN) + _NO_FOLDER * admin
        found[str(status)] = {
            "description": when,
            "content": {JSON: {"schema": {"type": "object"}, "example": route.dialect.make_error(error)}},
        }
        if status in (429, 503, 504):
            found[str(status)]["headers"] = _RETRY
    return found
