"""The OpenAPI description at `/openapi.json`."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from cllm.server.errors import error_body
from cllm.server.middleware import ADMIN, OPEN
from cllm.server.protocol.base import DOCUMENTED, JSON

TAGS = {
    "cLLM": "cllm's own: a prompt in, text out. No chat template is applied.",
    "OpenAI": "For OpenAI's SDKs and compatible clients.",
    "Anthropic": "For Anthropic's SDKs.",
    "embeddings": "Embeddings of texts, and rankings and scores by a reranker.",
    "Ollama": "For Ollama's clients that speak no other API; names may end in `:latest`.",
    "llama-server": "llama.cpp's own server: scripts written for it run unchanged.",
    "operation": "Health, metrics, debugging and administration.",
}
ERRORS = {  # status → code and message of an example
    400: ("invalid_request", "{field}: Field required"),
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
_FOR_OPERATORS = (
    "Needs an admin's API key where the server has keys; answers on loopback only where it has none."
)
_SCHEMES = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "An API key, as `cllm keys new` makes them",
    },
    "x-api-key": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "The same key, as Anthropic's clients send it",
    },
}
_RETRY = {
    "Retry-After": {"description": "Seconds to wait", "schema": {"type": "integer"}, "example": 3},
}
_POSITION = {
    "X-Queue-Position": {
        "description": "The request's position in the queue when it was accepted; 0: it did not wait",
        "schema": {"type": "integer"},
        "example": 0,
    }
}
_UNDOCUMENTED = '{"content": {}, "schemas": {}, "computes": false, "errors": {}}'


def install(app: FastAPI, *, closed: bool) -> None:
    """Give an app made with neither `docs_url` nor `redoc_url` its description.

    `closed`: keys are needed.
    """

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = make_description(app, closed=closed)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def make_description(app: FastAPI, *, closed: bool) -> dict[str, Any]:
    """FastAPI's own description, with the responses that each route declares by `documented`."""
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = schema["components"]["schemas"]
    used: set[str] = set()
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            used.update(route["tags"])
            # FastAPI makes the summary from the function's name; the docstring says more.
            first, _, more = route["description"].partition("\n")
            route["summary"] = first.removesuffix(".")
            notes = (more.strip(), _FOR_OPERATORS if path.startswith(ADMIN) else "")
            route["description"] = "\n\n".join(filter(None, notes))
            route["security"] = _security(path, closed=closed)
            about = msgspec.json.decode(route.pop(DOCUMENTED, _UNDOCUMENTED))
            if _names_model(schemas, path, route):
                about["errors"].setdefault("404", (*ERRORS[404], WHEN[404]))
            route["responses"] = _responses(path, method, about, _first_required(schemas, route))
            for name, struct in about["schemas"].items():
                assert schemas.setdefault(name, struct) == struct, f"two schemas are called {name}"
    for unused in ("HTTPValidationError", "ValidationError"):  # a wrong body is a 400, in our shape
        schemas.pop(unused, None)
    schema["components"]["securitySchemes"] = _SCHEMES
    schema["tags"] = [{"name": tag, "description": text} for tag, text in TAGS.items() if tag in used]
    return schema


def _security(path: str, *, closed: bool) -> list[dict[str, list[str]]]:
    """Either scheme, with the role it takes; `{}`: or without any."""
    if path in OPEN:
        return []
    roles = ["admin"] if path.startswith(ADMIN) else []
    return [*({name: roles} for name in _SCHEMES), *([] if closed else [{}])]


def _names_model(schemas: dict[str, Any], path: str, route: dict[str, Any]) -> bool:
    """Whether a request says which model it is for: then there may be no such model."""
    named = {parameter["name"] for parameter in route.get("parameters", ())}
    if "requestBody" in route:
        reference: str = route["requestBody"]["content"][JSON]["schema"]["$ref"]
        named |= schemas[reference.rpartition("/")[2]].get("properties", {}).keys()
    return "model" in named or path.startswith("/v1/models/")


def _first_required(schemas: dict[str, Any], route: dict[str, Any]) -> str | None:
    """The field that the error for an empty body names."""
    if "requestBody" not in route:
        return None
    reference: str = route["requestBody"]["content"][JSON]["schema"]["$ref"]
    required = schemas[reference.rpartition("/")[2]].get("required")
    return str(required[0]) if required else None


def _responses(path: str, method: str, about: dict[str, Any], required: str | None) -> dict[str, Any]:
    own = {int(status): error for status, error in about["errors"].items()}
    found: dict[str, Any] = {"200": {"description": "Done", "content": about["content"]}}
    statuses = {403, 431, *own}
    if path not in OPEN:
        statuses |= {401, 500, 503}
    if method == "post":
        statuses |= {400, 408, 413, 415}
    if about["computes"]:
        statuses |= {429, 504}
        found["200"]["headers"] = _POSITION
    for status in sorted(statuses):
        code, message, when = own.get(status) or (*ERRORS[status], WHEN[status])
        field = required if status == 400 else None
        if status == 400 and field is None:  # no field is required
            message = "the body is not a JSON object"
        example = error_body(path, status, code, message.format(field=field), field)
        if status == 403:
            when += _NO_ADMIN * path.startswith(ADMIN) + _NO_FOLDER * path.startswith("/admin/")
        found[str(status)] = {
            "description": when,
            "content": {JSON: {"schema": {"type": "object"}, "example": example}},
        }
        if status in (429, 503, 504):
            found[str(status)]["headers"] = _RETRY
    return found
