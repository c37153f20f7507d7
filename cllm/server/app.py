"""The ASGI application: routes, the page at `/`, and middleware over an engine registry, without globals."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, compile_path

from cllm import __version__
from cllm.config import ServerConfig, split_list
from cllm.errors import CllmError, ConfigError, InvalidRequest, ModelNotFound, NotFound
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.engine_registry import EngineRegistry
from cllm.server import dialect
from cllm.server.answer_log import AnswerLogs
from cllm.server.background import BackgroundAnswers, call_route
from cllm.server.batch_runner import BatchRunner
from cllm.server.batches import ENDPOINTS
from cllm.server.body import TenantTurns
from cllm.server.dialect import JSON, HttpError, respond
from cllm.server.dialects import DIALECTS, TABLE
from cllm.server.dialects.responses import ROUTE as RESPONSES
from cllm.server.generation import GenerationBody
from cllm.server.job_store import JobStore
from cllm.server.keys import KeyRing
from cllm.server.live import LiveFeed
from cllm.server.middleware import PAGE_FILES, RequestMiddleware
from cllm.server.openapi import make_description
from cllm.server.sse import resume_stream

FOLDER = Path(__file__).parent / "page"
# The page runs the scripts of its own folder and asks this server only.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".json": JSON,
}
SAME_FIELDS = (  # names of one thing: a body that has one of them needs no default for the others
    frozenset({"max_tokens", "n_predict", "max_completion_tokens", "max_output_tokens"}),
    frozenset({"repetition_penalty", "repeat_penalty"}),
    frozenset({"penalty_last_n", "repeat_last_n"}),
    frozenset({"grammar", "json_schema", "regex", "choice", "response_format", "text"}),
)
_HTTP = {  # code and message for errors of the framework
    404: ("not_found", "this route does not exist: GET /docs lists the routes"),
    405: ("method_not_allowed", "this route does not support this method: GET /docs lists the methods"),
}


def create_app(
    given: EngineClient | EngineRegistry,
    config: ServerConfig,
    keys: KeyRing | None = None,
    folder: Path | None = None,
) -> Starlette:
    """The ASGI application. The engines are started and stopped by the caller.

    `folder` is that of jobs; without one they end with the process.
    """
    registry = given if isinstance(given, EngineRegistry) else EngineRegistry.of(given)
    keys = keys or KeyRing(config.api_keys, config.api_key)
    app = Starlette(
        routes=_make_routes(closed=keys.closed),
        middleware=[Middleware(RequestMiddleware, config, keys, TABLE, registry.count_refusal)],
        exception_handlers={HTTPException: _on_http, CllmError: _on_error, Exception: _on_error},  # type: ignore[dict-item]
    )
    app.state.registry = registry
    app.state.live = LiveFeed(registry)
    app.state.jobs = JobStore(folder, config.job_store_mb << 20, lambda: len(keys.tenants))
    app.state.response_ttl, app.state.max_line = config.response_ttl, config.max_body_bytes
    routes = {each.path: each for one in DIALECTS for each in one.routes if each.path in ENDPOINTS}
    call = partial(call_route, app, keys)
    app.state.batches = BatchRunner(call, routes, app.state.jobs, registry, keys, config)
    app.state.logs, app.state.uploads = AnswerLogs(), Counter[str]()
    app.state.background = BackgroundAnswers(call, routes[RESPONSES], app.state.jobs, keys)
    app.state.slow_reader_s, app.state.reconnect_s = config.slow_reader_s, config.reconnect_s
    app.state.open_routes = frozenset(split_list(config.open_routes))
    app.state.defaults = read_defaults(config.defaults)
    app.state.add_defaults = make_defaults(registry, app.state.defaults)
    app.state.large_bodies = TenantTurns()
    return app


# Routes -----------------------------------------------------------------------------------------------


def _make_routes(*, closed: bool) -> list[BaseRoute]:
    @cache
    def describe() -> bytes:
        return msgspec.json.encode(make_description(DIALECTS, closed=closed))

    async def openapi(http: Request) -> Response:
        return Response(describe(), media_type=JSON)

    own = {"/": root, "/docs": docs, PAGE_FILES + "{name:path}": page_file, "/openapi.json": openapi}
    routes = [
        Route(each.path, partial(_respond, each) if each.computes else each.respond, methods=[each.method])
        for one in DIALECTS
        for each in one.routes
    ]
    routes += [Route(path, handler, methods=["GET"]) for path, handler in own.items()]
    for route in routes:
        assert route.methods is not None
        route.methods.discard("HEAD")  # RequestMiddleware answers it as GET
    return [*routes]


async def _respond(route: dialect.Route, http: Request) -> Response:
    """The answer of a route, or the rest of an earlier one."""
    return resume_stream(http) if "last-event-id" in http.headers else await route.respond(http)


async def _on_error(http: Request, error: Exception) -> Response:
    return respond(http.scope, error)


async def _on_http(http: Request, error: HTTPException) -> Response:
    """Answer for the framework, which knows the methods of one route of a path alone."""
    code, message = _HTTP.get(error.status_code, ("invalid_request", str(error.detail)))
    response = respond(http.scope, HttpError(error.status_code, code, message))
    response.headers.update(error.headers or {})
    if error.status_code == 405:
        path, routes = http.scope["path"], [each for one in DIALECTS for each in one.routes if each.shown]
        found = next((each.path for each in routes if re.match(compile_path(each.path)[0], path)), None)
        response.headers["Allow"] = ", ".join(sorted({each.method for each in routes if each.path == found}))
    return response


# The page ---------------------------------------------------------------------------------------------


class StaticFile:
    """A file as it is sent: plain and compressed, with its ETag and the strict content policy."""

    def __init__(self, path: Path) -> None:
        self._plain = path.read_bytes()
        self.compressed = gzip.compress(self._plain, 9, mtime=0)
        self._headers = {
            "Content-Type": _TYPES[path.suffix],
            "ETag": f'"{hashlib.sha256(self._plain).hexdigest()[:24]}"',
            "Cache-Control": "no-cache",  # kept, and asked for again: 304 unless it has changed
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Vary": "Accept, Accept-Encoding",
        }

    def respond(self, http: Request) -> Response:
        known = [each.strip().removeprefix("W/") for each in http.headers.get("if-none-match", "").split(",")]
        if self._headers["ETag"] in known:
            return Response(status_code=304, headers=self._headers)
        if "gzip" in http.headers.get("accept-encoding", ""):
            return Response(self.compressed, headers={**self._headers, "Content-Encoding": "gzip"})
        return Response(self._plain, headers=self._headers)


@cache
def list_files() -> dict[str, Path]:
    """Every file of the page, by its path in the folder."""
    found = sorted(path for path in FOLDER.rglob("*") if path.suffix in _TYPES)
    return {str(path.relative_to(FOLDER)): path for path in found}


read_file = cache(StaticFile)  # when it is first asked for: few visits need all of them


async def root(http: Request) -> Response:
    """A browser gets the page, any other client a line: some look for Ollama this way."""
    if "text/html" in http.headers.get("accept", ""):
        return await docs(http)
    return PlainTextResponse(f"cllm {__version__} is running", headers={"Vary": "Accept"})


async def docs(http: Request) -> Response:
    """The page, which shows its API tab at this path."""
    return read_file(FOLDER / "index.html").respond(http)


async def page_file(http: Request) -> Response:
    """A file of the page."""
    if (path := list_files().get(http.path_params["name"])) is None:
        raise NotFound("the page has no such file")
    return read_file(path).respond(http)


# Defaults ---------------------------------------------------------------------------------------------


def read_defaults(setting: str) -> dict[str, Any]:
    """The fields for requests that lack them. Raises ConfigError."""
    try:
        defaults = msgspec.json.decode(setting, type=dict[str, Any]) if setting else {}
    except msgspec.MsgspecError:
        raise ConfigError(f"--defaults is not a JSON object: {setting[:80]!r}") from None
    return check_defaults(defaults, "--defaults")


def check_defaults(defaults: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fields for requests, checked. Raises ConfigError."""
    try:
        GenerationBody.parse(dict(defaults))
    except InvalidRequest as error:
        raise ConfigError(f"{where}: {error.message}") from None
    if "max_tokens" in defaults:  # it has this name on /v1/responses
        return {"max_output_tokens": defaults["max_tokens"], **defaults}
    return dict(defaults)


def add_defaults(defaults: Mapping[str, Any], body: Any) -> Any:
    """A body with the defaults that it lacks. Objects are merged; null is what a body lacks."""
    if not isinstance(body, dict):
        return body
    if "max_tokens" in defaults:  # -1 is no limit but the server's
        body = {name: value for name, value in body.items() if value != -1 or name not in SAME_FIELDS[0]}
    given = {name for name, value in body.items() if value is not None}
    for same in SAME_FIELDS:
        given |= same if given & same else frozenset()
    merged = {
        name: {**default, **body[name]}
        for name, default in defaults.items()
        if isinstance(default, dict) and isinstance(body.get(name), dict)
    }
    return {**body, **{name: value for name, value in defaults.items() if name not in given}, **merged}


def make_defaults(registry: EngineRegistry, common: Mapping[str, Any]) -> Callable[[Any], Any] | None:
    """Make what adds the defaults of a body's model, and below them the server's. None without any."""
    merged = {
        model.name: {**common, **check_defaults(model.config.defaults, f"[models.{model.name}] defaults")}
        for model in registry.served
        if model.config.defaults
    }

    def add(body: Any) -> Any:
        defaults = common
        if merged and isinstance(body, dict):
            name = body.get("model")
            with suppress(ModelNotFound):  # the route refuses it
                defaults = merged.get(registry.find(name if isinstance(name, str) else None).name, common)
        return add_defaults(defaults, body)

    return add if common or merged else None
