"""Model leases: a stream that waits for its model shows that it is alive, and a model is kept to the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cllm.config import EngineConfig, ModelConfig, PreparedModel, ServerConfig
from cllm.errors import NotEnoughMemory
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.engine_registry import EngineRegistry
from cllm.frontend.served_model import Memory, ServedModel
from cllm.server import sse
from cllm.server.app import create_app
from cllm.testing import CHAT_TEMPLATE
from tests.driver.fake_runner import FakeRunner
from tests.driver.thread_engine import ThreadExecutor
from tests.unit.server.test_sse import ROUTES, Client

ERRORS = {
    "/v1/messages": b"event: error\ndata: ",
    "/v1/responses": b'event: error\ndata: {"type":"error"',
    "/generate": b'"error":"model_does_not_fit"',
    "/generate_stream": b'"error":"model_does_not_fit"',
}


class GatedLoader:
    """Prepares a model when the gate is opened, or finds that it does not fit."""

    def __init__(self, *, fits: bool) -> None:
        self.gate = threading.Event()
        self._fits = fits

    def prepare(
        self,
        model: ModelConfig,
        *,
        serving: EngineConfig | None = None,
        file: str = "",
        rooms: Sequence[Memory] = (),
    ) -> PreparedModel:
        assert self.gate.wait(30)
        if not self._fits:
            raise NotEnoughMemory("not enough memory: model 9 MiB + KV 9 MiB")
        return PreparedModel(config=EngineConfig())

    def is_current(self, prepared: PreparedModel) -> bool:
        return True

    def find_file(self, name: str) -> Path:
        raise AssertionError("no adapter is loaded here")

    def make(self, prepared: PreparedModel) -> EngineClient:
        executor = ThreadExecutor(lambda _: FakeRunner(chat_template=CHAT_TEMPLATE), prepared.config)
        return EngineClient(executor)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "HEAD_AFTER_S", 0.01)
    monkeypatch.setattr(sse, "BEAT_S", 0.01)


def make_app(loader: GatedLoader) -> tuple[Callable[..., Any], EngineRegistry]:
    models = [ServedModel(ModelConfig(name=name), loader) for name in ("one", "two")]
    registry = EngineRegistry(models)
    return create_app(registry, ServerConfig()), registry


@pytest.mark.parametrize(("path", "body", "first"), ROUTES, ids=[path for path, *_ in ROUTES])
@pytest.mark.parametrize("fits", [True, False])
async def test_a_stream_shows_life_while_its_model_is_loaded(
    path: str, body: dict[str, Any], first: bytes, fits: bool
) -> None:
    loader = GatedLoader(fits=fits)
    app, registry = make_app(loader)
    client = Client(path, {**body, "stream": True, "model": "two"})
    asked = asyncio.ensure_future(app(client.scope, client.receive, client.send))
    while client.data.count(b":\n\n") < 3:
        await asyncio.sleep(0.005)
    assert client.status == 200 and client.data.strip(b":\n") == b""
    loader.gate.set()
    await asked
    if fits:
        assert first in client.data and b"does not fit" not in client.data
        assert registry.find("two").users == 0 and registry.find("two").loaded
    else:
        assert ERRORS.get(path, b'data: {"error"') in client.data
        assert b"two does not fit: not enough memory" in client.data
    await asyncio.to_thread(registry.stop)


async def test_a_client_that_leaves_while_a_model_is_loaded_is_not_waited_for() -> None:
    loader = GatedLoader(fits=True)
    app, registry = make_app(loader)
    client = Client("/generate", {"prompt": "x", "model": "one"})
    asked = asyncio.ensure_future(app(client.scope, client.receive, client.send))
    while not registry.default.waiters:
        await asyncio.sleep(0.001)
    client.left.set()
    await asked
    assert client.status == 499 and not registry.default.waiters
    loader.gate.set()
    while registry.default.loading is not None:
        await asyncio.sleep(0.001)
    assert not registry.default.loaded, "it was not needed any more"


async def test_an_error_that_is_known_soon_has_its_status() -> None:
    loader = GatedLoader(fits=False)
    loader.gate.set()
    app, _ = make_app(loader)
    for body, status in (({"model": "none"}, 404), ({"model": "two"}, 507)):
        client = Client("/v1/completions", {"prompt": "x", **body})
        await app(client.scope, client.receive, client.send)
        assert client.status == status
