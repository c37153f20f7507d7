"""Ollama's `/api/copy`: one more name for a served model, by operators, while the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx

from cllm.config import EngineConfig, ModelConfig, ServerConfig
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.engine_registry import EngineRegistry
from cllm.frontend.served_model import ServedModel
from cllm.server.app import create_app
from tests.driver.fake_runner import FakeRunner
from tests.driver.thread_engine import ThreadExecutor


def make_registry(*names: str) -> EngineRegistry:
    models = [
        ServedModel(
            ModelConfig(name=name),
            engine=EngineClient(ThreadExecutor(lambda _: FakeRunner(), EngineConfig())),
        )
        for name in names
    ]
    return EngineRegistry(models)


def copy(
    registry: EngineRegistry, pairs: Sequence[tuple[str, str]], host: str = "127.0.0.1"
) -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(create_app(registry, ServerConfig(host=host)))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return [
                await client.post("/api/copy", json={"source": source, "destination": destination})
                for source, destination in pairs
            ]

    return asyncio.run(ask())


def test_copy_gives_a_model_one_more_name() -> None:
    registry = make_registry("one", "two")
    (answer,) = copy(registry, [("two:latest", "assistant:latest")])
    assert (answer.status_code, answer.content) == (200, b"")
    assert registry.find("assistant") is registry.find("assistant:latest") is registry.find("two")
    assert registry.find("two").describe(default=False).aliases == ("assistant",)


def test_copy_to_a_taken_name_is_400() -> None:
    registry = make_registry("one", "two")
    taken = [("one", "two"), ("one", "ONE"), ("one", "a"), ("two", "a"), ("one", "")]
    assert [answer.status_code for answer in copy(registry, taken)] == [400, 400, 200, 400, 400]
    assert registry.find("a") is registry.default


def test_copy_is_for_operators() -> None:
    registry = make_registry("one", "two")
    (answer,) = copy(registry, [("one", "a")], host="0.0.0.0")
    assert answer.status_code == 403 and registry.default.config.aliases == ()
