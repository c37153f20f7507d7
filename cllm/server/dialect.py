"""Dialect: one HTTP API with its routes, the shape of its errors, and how an error ends a stream."""

from __future__ import annotations

import inspect
import logging
import math
import tomllib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

import msgspec
from msgspec.inspect import is_struct_type
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from cllm import errors
from cllm.errors import CapacityError, CllmError, Unauthorized
from cllm.server.body import Body, read_body

log = logging.getLogger(__name__)
JSON, EVENTS, NDJSON, PLAIN = "application/json", "text/event-stream", "application/x-ndjson", "text/plain"
TEXT = "text_completion"  # an operation of the GenAI conventions
INTERNAL = "an internal error occurred: the server's log has the details"
_CODES = tomllib.loads(Path(__file__).with_name("statuses.toml").read_text(encoding="utf-8"))
STATUS: dict[type[Exception], int] = {getattr(errors, name): code for name, code in _CODES.items()}
Handler = Callable[..., Awaitable[Any]]
HandlerKind = TypeVar("HandlerKind", bound=Handler)
to_json = msgspec.json.Encoder().encode


class HttpError(CllmError):
    """An error of HTTP itself: no such route, a body that is too large."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def get_status(error: Exception) -> int:
    """The HTTP status of an error: its own, or that of its nearest ancestor in the table."""
    if isinstance(error, HttpError):
        return error.status
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path, and what its documentation says of the responses."""

    dialect: Dialect
    method: str
    path: str
    handler: Handler
    names: frozenset[str]  # of the handler's parameters
    body: type[Body] | None
    answer: Any  # an example, or the struct that one is made of. None: it only streams
    events: bytes = b""  # an example of a stream
    lines: bytes = b""  # the same, where a stream is lines of JSON
    computes: str = ""  # what the queue is asked for: an operation of the GenAI conventions
    several: bool = False  # it answers several prompts with a list
    shown: bool = True  # in the documentation

    async def respond(self, http: Request) -> Response:
        """Read the body, call the handler, and answer with what it returns or raises.

        What is no response, a struct or whatever else msgspec encodes, is one as JSON.
        """
        given: dict[str, Any] = {"http": http} if "http" in self.names else {}
        try:
            if self.body is not None:
                given["body"] = await read_body(http, self.body)
            answer = await self.handler(**given, **http.path_params)
            return answer if isinstance(answer, Response) else Response(to_json(answer), media_type=JSON)
        except CllmError as error:
            return respond(http.scope, error)


class Dialect:
    """One HTTP API. Its routes are registered by decorators: `@openai.post("/v1/completions", …)`."""

    name: ClassVar[str]
    about: ClassVar[str]
    prefix: ClassVar[str]  # of paths that no route has
    types: ClassVar[Mapping[int, str]] = {}  # the name of an error by its status
    id_header: ClassVar[str] = ""  # of a response, with an id of its own

    def __init__(self) -> None:
        self.routes: list[Route] = []
        self.get = partial(self.route, "GET")
        self.post = partial(self.route, "POST")
        self.delete = partial(self.route, "DELETE")

    def get_type(self, status: int) -> str:
        """The name of errors of a status in this API."""
        server = self.types.get(500, "server_error")
        return self.types.get(status, "invalid_request_error" if status < 500 else server)

    def make_error(self, error: CllmError) -> Any:
        """The body of an error response."""
        raise NotImplementedError

    def frame_error(self, error: CllmError) -> bytes:
        """An error as the last frame of a stream."""
        return encode(self.make_error(error))

    def route(
        self, method: str, path: str, answer: Any = None, **about: Any
    ) -> Callable[[HandlerKind], HandlerKind]:
        """Register a handler. Its parameters are `body`, whose type is read, `http`, and the path's.

        Without an example, the answer's is made from the struct that the handler returns.
        """

        def register(handler: HandlerKind) -> HandlerKind:
            names = frozenset(inspect.signature(handler).parameters)
            hints = get_type_hints(handler)
            kinds = get_args(hints.get("return")) or (hints.get("return"),)
            shown = answer or next((kind for kind in kinds if is_struct_type(kind)), None)
            given: Any = {"dialect": self, "method": method, "path": path, "handler": handler}
            self.routes.append(Route(**given, answer=shown, names=names, body=hints.get("body"), **about))
            return handler

        return register


class DialectTable:
    """Finds the dialect of a path: that of its route, else of its prefix."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        routes = [route for dialect in dialects for route in dialect.routes]
        self._exact = {route.path: route.dialect for route in routes}
        prefixes = {dialect.prefix: dialect for dialect in dialects}
        prefixes |= {route.path.partition("{")[0]: route.dialect for route in routes if "{" in route.path}
        self._prefixes = sorted(prefixes.items(), key=lambda each: len(each[0]), reverse=True)

    def find(self, path: str) -> Dialect:
        if (found := self._exact.get(path)) is not None:
            return found
        return next(dialect for prefix, dialect in self._prefixes if path.startswith(prefix))


def respond(scope: Scope, error: Exception) -> Response:
    """Any error as a response; an unexpected one is logged and answered without details.

    Where the head of a stream has been sent, the error is the stream's last frame.
    """
    if not isinstance(error, CllmError):
        log.exception("unexpected error in %r", scope["path"], exc_info=error)
        error = HttpError(500, "internal_error", INTERNAL)
    dialect: Dialect = scope["state"]["dialect"]
    scope["state"]["error"] = error.code
    if scope["state"].get("streaming"):
        return Response(dialect.frame_error(error), media_type=EVENTS)
    headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else {}
    if isinstance(error, CapacityError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return Response(to_json(dialect.make_error(error)), get_status(error), headers, JSON)


# Frames of streams: server-sent events, and lines of JSON ---------------------------------------------


def encode(event: Any) -> bytes:
    """One event."""
    return b"data: " + to_json(event) + b"\n\n"


def encode_named(name: str, event: Any) -> bytes:
    """One event with a name, which clients listen for."""
    return b"event: " + name.encode() + b"\n" + encode(event)


def encode_line(value: Any) -> bytes:
    """One line of JSON."""
    return to_json(value) + b"\n"


DONE = b"data: [DONE]\n\n"
COMMENT = b":\n\n"  # an event that every client ignores
