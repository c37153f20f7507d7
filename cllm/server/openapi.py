"""The description of the API at `/openapi.json`, and the page made of it at `/docs`, without any CDN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse

from cllm.server.answers import LEGACY
from cllm.server.errors import error_body
from cllm.server.middleware import ADMIN, OPEN
from cllm.server.protocol.base import JSON

PAGE = Path(__file__).with_name("docs.html")
# The page runs its own script and asks this server, nobody else.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TAGS = {
    "cLLM": "The short way: a prompt in, text out. No chat template is applied.",
    "OpenAI": "For OpenAI's SDKs and everything that speaks their language.",
    "Anthropic": "For Anthropic's SDKs.",
    "vectors": "Texts as numbers: embeddings, and rankings by a reranker.",
    "llama-server": "llama.cpp's own server: scripts written for it run unchanged.",
    "operation": "Is it alive, does it admit, what does it do.",
}
# status → code and message of an example, and when it happens
ERRORS: dict[int, tuple[str, str, str]] = {
    400: (
        "invalid_request",
        "{field}: Field required",
        "A field is wrong, and the message names it; or the prompt does not fit (`context_length_exceeded`); "
        "or the model cannot do it",
    ),
    401: (
        "invalid_api_key",
        "an API key is needed: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        "The server has keys, and none of them was sent",
    ),
    403: (
        "forbidden",
        "this server does not answer to that Host; --allowed-hosts says to which it does",
        "The name the server was called by is not one of its own",
    ),
    404: ("model_not_found", "there is no such model; GET /v1/models lists what is served", "No such model"),
    408: (
        "request_timeout",
        "the body was not complete within 30 s",
        "The body took too long to arrive (inside a stream: the client does not read it, `slow_reader`)",
    ),
    413: (
        "payload_too_large",
        "the body is over the limit of 8388608 bytes (--max-body-mb); send less",
        "The body is too large",
    ),
    415: (
        "unsupported_media_type",
        "the body must be JSON: send it with 'Content-Type: application/json'",
        "The body is said to be something else than JSON",
    ),
    429: (
        "queue_full",
        "1024 requests are waiting and the queue holds 1024; try again in 3 s",
        "The queue is full, or this key has had what it may have for now (`rate_limit_exceeded`)",
    ),
    431: (
        "headers_too_large",
        "the headers are over the limit of 32768 bytes",
        "Address and headers are too large",
    ),
    500: ("engine_died", "the engine process was ended by SIGSEGV", "Our fault: the engine died, or failed"),
    503: ("engine_not_ready", "the model is still loading", "Loading, restarting or shutting down"),
    504: (
        "deadline_exceeded",
        "the request was not done within its 30 s: it was still waiting",
        "The request's time was up before anything of it was sent",
    ),
}
_NO_ADMIN = "; or the key is not an admin's"
_NO_FOLDER = "; or the server was started without the folder that this needs (`--model-dir`, `--state-dir`)"
_FOR_OPERATORS = "Needs an admin's API key where the server has keys, and answers on loopback only where not."
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
        "description": "How many went before it, itself included; 0: it did not have to wait",
        "schema": {"type": "integer"},
        "example": 0,
    }
}


def install(app: FastAPI, *, closed: bool) -> None:
    """Give an app made with neither `docs_url` nor `redoc_url` its description and its page.

    `closed`: keys are needed.
    """

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = description(app, closed=closed)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text(), headers={"Content-Security-Policy": POLICY})


def description(app: FastAPI, *, closed: bool) -> dict[str, Any]:
    """FastAPI's own, with what our routes really answer."""
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    used: set[str] = set()
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            used.update(route.get("tags", ()))
            # FastAPI makes the summary from the function's name; ours is what the function says of itself.
            first, _, more = route.get("description", "").partition("\n")
            route["summary"] = first.removesuffix(".")
            notes = (more.strip(), _FOR_OPERATORS if path.startswith(ADMIN) else "")
            route["description"] = "\n\n".join(filter(None, notes))
            route["security"] = _security(path, closed=closed)
            route["responses"] = _responses(path, method, route, _needed(schema, route))
            for name, struct in route.pop("x-schemas", {}).items():
                assert schemas.setdefault(name, struct) == struct, f"two schemas are called {name}"
    for unused in ("HTTPValidationError", "ValidationError"):  # what is wrong is told with 400, in our shape
        schemas.pop(unused, None)
    schema["components"]["securitySchemes"] = _SCHEMES
    schema["tags"] = [{"name": tag, "description": text} for tag, text in TAGS.items() if tag in used]
    return schema


def _security(path: str, *, closed: bool) -> list[dict[str, list[str]]]:
    """Either scheme, with the role it takes; `{}`: or without any."""
    if path == OPEN:
        return []
    roles = ["admin"] if path.startswith(ADMIN) else []
    return [*({name: roles} for name in _SCHEMES), *([] if closed else [{}])]


def _needed(schema: dict[str, Any], route: dict[str, Any]) -> str | None:
    """The first field a body cannot do without: what an empty one is told to lack."""
    if "requestBody" not in route:
        return None
    reference: str = route["requestBody"]["content"][JSON]["schema"]["$ref"]
    body: dict[str, Any] = schema["components"]["schemas"][reference.rpartition("/")[2]]
    return str(body["required"][0]) if body.get("required") else None


def _responses(path: str, method: str, route: dict[str, Any], needed: str | None) -> dict[str, Any]:
    if "x-content" not in route:
        route.update(LEGACY.get(f"{method.upper()} {path}", {}))
    computes = route.pop("x-computes", False)
    own = {int(status): told for status, told in route.pop("x-errors", {}).items()}
    found: dict[str, Any] = {"200": {"description": "Done", "content": route.pop("x-content", {})}}
    if computes:
        found["200"]["headers"] = _POSITION
    for status in sorted({*_statuses(path, method, computes=computes), *own}):
        code, message, when = own.get(status) or ERRORS[status]
        field = needed if status == 400 else None
        if status == 400 and field is None:  # it can do without any field
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


def _statuses(path: str, method: str, *, computes: bool) -> list[int]:
    statuses = [403, 431]
    if path == OPEN:
        return statuses
    statuses += [401, 500, 503]
    if method == "post":
        statuses += [400, 408, 413, 415] + [404] * path.startswith("/v1/")
    return statuses + [429, 504] * computes
