"""The ASGI application: routes and middleware over an engine registry, without globals."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.middleware.cors import CORSMiddleware

from cllm import __version__
from cllm.config import ServerConfig
from cllm.errors import ConfigError, ModelNotFound
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.engine_registry import EngineRegistry
from cllm.server import errors, openapi, static
from cllm.server.hold import HoldMiddleware
from cllm.server.keys import KeyRing
from cllm.server.live import LiveFeed
from cllm.server.middleware import (
    AuthMiddleware,
    BodyLimitMiddleware,
    HeadersMiddleware,
    TrustedHostMiddleware,
    split_list,
)
from cllm.server.protocol.sampling import SamplingBody
from cllm.server.routes import (
    admin,
    chat,
    embeddings,
    generate,
    live,
    llama,
    messages,
    ollama,
    ollama_store,
    openai,
    responses,
)

EXPOSED_HEADERS = ("Retry-After", "X-Queue-Position", "request-id")  # that a page may read
SAME_FIELDS = (  # names of one thing: a body that has one of them needs no default for the others
    frozenset({"max_tokens", "n_predict", "max_completion_tokens", "max_output_tokens"}),
    frozenset({"repetition_penalty", "repeat_penalty"}),
    frozenset({"penalty_last_n", "repeat_last_n"}),
    frozenset({"grammar", "json_schema", "regex", "choice", "response_format", "text"}),
)
LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


def create_app(
    engines: Mapping[str, EngineClient | EngineRegistry], config: ServerConfig, keys: KeyRing | None = None
) -> FastAPI:
    """The ASGI application. The engines are started and stopped by the caller."""
    (given,) = engines.values()
    registry = given if isinstance(given, EngineRegistry) else EngineRegistry.of(given)
    app = FastAPI(
        title="cllm",
        version=__version__,
        description="GGUF models for many users at once, on llama.cpp.",
        docs_url=None,  # FastAPI's pages load their scripts from elsewhere
        redoc_url=None,
    )
    app.state.registry = registry
    app.state.live = LiveFeed(registry)
    app.state.responses = responses.ResponseStore(config.response_store_mb << 20)
    app.state.slow_reader_s = config.slow_reader_s
    app.state.open_routes = frozenset(split_list(config.open_routes))
    app.state.defaults = read_defaults(config.defaults)
    app.state.add_defaults = ModelDefaults(registry, app.state.defaults)
    app.state.large_bodies = asyncio.Lock()  # see LargeJsonRoute
    keys = keys or KeyRing(config.api_keys, config.api_key)
    openapi.install(app, closed=keys.closed)
    static.install(app)
    errors.install(app)
    # One flat list: of routers that are included, FastAPI asks each at every request whether it has changed.
    for module in (
        generate,
        openai,
        chat,
        responses,
        messages,
        embeddings,
        llama,
        ollama,
        ollama_store,
        admin,
        live,
    ):
        app.router.routes.extend(module.router.routes)
    _add_middleware(app, registry, config, keys)
    return app


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
        SamplingBody.model_validate(dict(defaults))
    except ValidationError as error:
        message, _ = errors.describe_validation([dict(each) for each in error.errors()])
        raise ConfigError(f"{where}: {message}") from None
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


class ModelDefaults:
    """Adds the defaults that a body lacks: those of its model, and below them the server's."""

    def __init__(self, registry: EngineRegistry, common: Mapping[str, Any]) -> None:
        self._registry = registry
        self._common = common
        self._merged = {
            model.name: {**common, **check_defaults(model.config.defaults, f"[models.{model.name}] defaults")}
            for model in registry.served
            if model.config.defaults
        }

    def __bool__(self) -> bool:
        """False where there are none at all: bodies need not be looked at."""
        return bool(self._common or self._merged)

    def __call__(self, body: Any) -> Any:
        defaults = self._common
        if self._merged and isinstance(body, dict):
            name = body.get("model")
            with suppress(ModelNotFound):  # the route refuses it
                model = self._registry.find(name if isinstance(name, str) else None)
                defaults = self._merged.get(model.name, defaults)
        return add_defaults(defaults, body)


def _add_middleware(app: FastAPI, registry: EngineRegistry, config: ServerConfig, keys: KeyRing) -> None:
    """The layers around the routes; the last one added is the outermost."""
    count_refusal = registry.count_refusal
    app.add_middleware(HoldMiddleware)
    app.add_middleware(
        BodyLimitMiddleware, max_bytes=config.max_body_mb << 20, max_header_bytes=config.max_header_kb << 10
    )
    app.add_middleware(
        AuthMiddleware,
        keys=keys,
        host=config.host,
        open_routes=config.open_routes,
        count_refusal=count_refusal,
    )
    if origins := split_list(config.cors_origins):
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_origin_regex=LOCAL_ORIGIN if "localhost" in origins else None,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(
        TrustedHostMiddleware,
        host=config.host,
        allowed_hosts=config.allowed_hosts,
        count_refusal=count_refusal,
    )
    app.add_middleware(HeadersMiddleware)
