"""The application: routes over engines. No globals; everything comes in as an argument."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI

from cllm import __version__
from cllm.config import ServerConfig
from cllm.engine.engine import Engine
from cllm.server import errors
from cllm.server.anthropic.request_ids import RequestIds
from cllm.server.limits import RequestLimits
from cllm.server.routes import admin, generate, llama, messages, openai, responses


def create_app(engines: Mapping[str, Engine], config: ServerConfig) -> FastAPI:
    """The ASGI application. The engines are started and stopped by the caller."""
    (engine,) = engines.values()  # several models: later; the signature is ready for it
    app = FastAPI(
        title="cllm",
        version=__version__,
        description="GGUF models for many users at once, on llama.cpp.",
    )
    errors.install(app)
    app.include_router(generate.routes(engine))
    app.include_router(openai.routes(engine))
    app.include_router(responses.routes(engine))
    app.include_router(messages.routes(engine))
    app.include_router(llama.routes(engine))
    app.include_router(admin.routes(engine))
    app.add_middleware(RequestLimits, most_bytes=config.max_body_mb << 20)
    app.add_middleware(RequestIds)
    return app
