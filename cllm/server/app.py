"""The ASGI application: routes and middleware over an engine registry, without globals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from cllm import __version__
from cllm.config import ServerConfig
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.engine_registry import EngineRegistry
from cllm.server import errors, openapi
from cllm.server.keys import KeyRing
from cllm.server.middleware import (
    AuthMiddleware,
    BodyLimitMiddleware,
    HeadersMiddleware,
    TrustedHostMiddleware,
    split_list,
)
from cllm.server.routes import admin, chat, embeddings, generate, llama, messages, openai, responses

EXPOSED_HEADERS = ("Retry-After", "X-Queue-Position", "request-id")  # that a page may read


def create_app(
    engines: Mapping[str, EngineClient | EngineRegistry], config: ServerConfig, keys: KeyRing | None = None
) -> FastAPI:
    """The ASGI application. The engines are started and stopped by the caller."""
    (given,) = engines.values()  # several models: later; the signature is ready for it
    registry = given if isinstance(given, EngineRegistry) else EngineRegistry(given)
    app = FastAPI(
        title="cllm",
        version=__version__,
        description="GGUF models for many users at once, on llama.cpp.",
        docs_url=None,  # FastAPI's pages load their scripts from elsewhere
        redoc_url=None,
    )
    app.state.registry = registry
    app.state.started = int(time.time())
    app.state.responses = responses.ResponseStore(config.response_store_mb << 20)
    app.state.slow_reader_s = config.slow_reader_s
    app.state.large_bodies = asyncio.Lock()  # see LargeJsonRoute
    keys = keys or KeyRing(config.api_keys, config.api_key)
    openapi.install(app, closed=keys.closed)
    errors.install(app)
    # One flat list: of routers that are included, FastAPI asks each at every request whether it has changed.
    for module in (generate, openai, chat, responses, messages, embeddings, llama, admin):
        app.router.routes.extend(module.router.routes)
    _add_middleware(app, registry, config, keys)
    return app


def _add_middleware(app: FastAPI, registry: EngineRegistry, config: ServerConfig, keys: KeyRing) -> None:
    """The layers around the routes; the last one added is the outermost."""

    def count_refusal(code: str) -> None:
        registry.current.metrics.refused.labels(code).inc()

    app.add_middleware(
        BodyLimitMiddleware, max_bytes=config.max_body_mb << 20, max_header_bytes=config.max_header_kb << 10
    )
    app.add_middleware(AuthMiddleware, keys=keys, host=config.host, count_refusal=count_refusal)
    if origins := split_list(config.cors_origins):
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
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
