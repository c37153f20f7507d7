"""The description of the API at `/openapi.json`, and the page made of it at `/docs`, without any CDN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse

from cllm.server.answers import ANSWERS, JSON
from cllm.server.errors import error_body

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
    "llama-server": "llama.cpp's own server: scripts written for it run unchanged.",
    "operation": "Is it alive, does it admit, what does it do.",
}
# status → code and message of an example, and when it happens
ERRORS: dict[int, tuple[str, str, str]] = {
    400: (
        "invalid_request",
        "max_tokens: Input should be greater than or equal to 1",
        "A field is wrong, and the message names it; or the prompt does not fit (`context_length_exceeded`)",
    ),
    401: (
        "invalid_api_key",
        "this server wants an API key",
        "The server has keys, and none of them was sent",
    ),
    404: ("not_found", "there is no such model; GET /v1/models lists what is served", "No such model"),
    413: ("payload_too_large", "the body is over the limit of 8388608 bytes", "The body is too large"),
    429: (
        "queue_full",
        "1024 requests are waiting and the queue holds 1024; try again in 3 s",
        "The queue is full; `Retry-After` says when to come back",
    ),
    500: ("engine_died", "the engine process was ended by SIGSEGV", "Our fault: the engine died, or failed"),
    503: ("engine_not_ready", "the model is still loading", "Loading, restarting or shutting down"),
}
_GENERATING = (
    "/generate",
    "/completion",
    "/infill",
    "/v1/completions",
    "/v1/chat",
    "/v1/responses",
    "/v1/messages",
)


def install(app: FastAPI) -> None:
    """Give an app made with neither `docs_url` nor `redoc_url` its description and its page."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = description(app)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text(), headers={"Content-Security-Policy": POLICY})


def description(app: FastAPI) -> dict[str, Any]:
    """FastAPI's own, with what our routes really answer."""
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    used: set[str] = set()
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            used.update(route.get("tags", ()))
            # FastAPI makes the summary from the function's name; ours is what the function says of itself.
            first, _, more = route.get("description", "").partition("\n")
            route["summary"] = first.removesuffix(".")
            route["description"] = more.strip()
            route["responses"] = _responses(path, method)
    for unused in ("HTTPValidationError", "ValidationError"):  # what is wrong is told with 400, in our shape
        schema.get("components", {}).get("schemas", {}).pop(unused, None)
    schema["tags"] = [{"name": tag, "description": text} for tag, text in TAGS.items() if tag in used]
    return schema


def _responses(path: str, method: str) -> dict[str, Any]:
    answers = ANSWERS.get(f"{method.upper()} {path}", {})
    content = {
        kind: {"schema": {} if kind == JSON else {"type": "string"}, "example": example}
        for kind, example in answers.items()
    }
    found: dict[str, Any] = {"200": {"description": "Done", "content": content}}
    for status in _statuses(path, method):
        code, message, when = ERRORS[status]
        example = error_body(path, status, code, message, "max_tokens" if status == 400 else None)
        found[str(status)] = {
            "description": when,
            "content": {JSON: {"schema": {"type": "object"}, "example": example}},
        }
    return found


def _statuses(path: str, method: str) -> list[int]:
    if path == "/health":
        return []
    statuses = [401, 500, 503]
    if method == "post":
        statuses += [400, 413]
        statuses += [404] * path.startswith("/v1/") + [429] * path.startswith(_GENERATING)
    return sorted(statuses)
