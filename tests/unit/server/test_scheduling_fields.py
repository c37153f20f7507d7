"""Fields that say how a request is computed, `X-Queue-Position` and tenants' limits, through the routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from cllm.config import EngineConfig, ServerConfig
from cllm.frontend.engine_client import EngineClient
from cllm.messages import Submit
from cllm.server.app import create_app
from cllm.types import Request, TenantLimits
from tests.driver.fake_runner import FakeRunner
from tests.driver.thread_engine import ThreadExecutor

ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"prompt": "hello", "max_tokens": 3}),
    ("/generate_stream", {"prompt": "hello", "max_tokens": 3}),
    ("/completion", {"prompt": "hello", "n_predict": 3}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 3}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 3, "stream": True, "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 3}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}),
]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
Asked = Callable[[httpx.AsyncClient, EngineClient, list[Request]], Coroutine[Any, Any, None]]


class TemplateRunner(FakeRunner):
    """The fake, with a chat template."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.info = msgspec.structs.replace(self.info, chat_template=TEMPLATE)


class SpyHost(ThreadExecutor):
    """The engine in a thread; what goes into it is written down."""

    def __init__(self, **options: Any) -> None:
        super().__init__(lambda _: TemplateRunner(**options), EngineConfig())
        self.requests: list[Request] = []

    def send(self, command: Any) -> None:
        if isinstance(command, Submit):
            self.requests.append(command.request)
        super().send(command)


@asynccontextmanager
async def served(
    api_key: str = "", **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, EngineClient, list[Request]]]:
    host = SpyHost(**options)
    engine = EngineClient(host, queue_size=2)
    engine.start(asyncio.get_running_loop())
    try:
        await asyncio.wrap_future(engine.loaded)
        app = create_app(engine, ServerConfig(api_key=api_key))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
            yield client, engine, host.requests
    finally:
        await asyncio.get_running_loop().run_in_executor(None, engine.stop)


def with_server(test: Asked, **options: Any) -> None:
    async def run() -> None:
        async with served(**options) as (client, engine, requests):
            await test(client, engine, requests)

    asyncio.run(run())


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_every_generating_route_passes_the_fields_on(path: str, body: dict[str, Any]) -> None:
    async def asked(client: httpx.AsyncClient, _: EngineClient, requests: list[Request]) -> None:
        fields: dict[str, Any] = {"timeout": 30, "priority": -7, "cache_prompt": False, "speculate": False}
        fields |= {"min_tokens": 2, "stop_token_ids": [7, 8]}
        answer = await client.post(path, json={**body, **fields})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-queue-position"] == "0"
        assert requests
        for request in requests:
            assert (request.timeout_s, request.priority, request.reuse) == (30.0, -7, False)
            assert not request.speculate
            assert (request.min_tokens, request.stop_token_ids) == (2, (7, 8))
        requests.clear()
        await client.post(path, json=body)
        assert (requests[0].timeout_s, requests[0].priority, requests[0].reuse) == (None, 0, True)
        assert requests[0].speculate
        await client.post(path, json={**body, "priority": 500})
        assert requests[-1].priority == 100, "a priority out of range is the nearest"

    with_server(asked)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/v1/chat/completions"])
def test_requests_know_whether_their_answer_is_streamed(path: str) -> None:
    async def asked(client: httpx.AsyncClient, _: EngineClient, requests: list[Request]) -> None:
        body: dict[str, Any] = {
            "model": "fake",
            "messages": [{"role": "user", "content": "hi"}],
            "prompt": "hi",
        }
        for stream in ({}, {"stream": True}, {"stream": False}):
            answer = await client.post(path, json={**body, **stream, "max_tokens": 1})
            assert answer.status_code == 200, answer.text
        assert [each.streamed for each in requests] == [path.startswith("/api/"), True, False]

    with_server(asked)


CHAT = ("/v1/chat/completions", ROUTES[5][1])


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        (*CHAT, {"reasoning_budget": 5}),
        (*CHAT, {"thinking": {"type": "enabled", "budget_tokens": 5}}),
        ("/v1/messages", ROUTES[7][1], {"thinking": {"type": "enabled", "budget_tokens": 5}}),
    ],
)
def test_a_budget_of_reasoning_is_passed_on(path: str, body: dict[str, Any], fields: dict[str, Any]) -> None:
    async def asked(client: httpx.AsyncClient, _: EngineClient, requests: list[Request]) -> None:
        assert (await client.post(path, json={**body, **fields})).status_code == 200
        limit = requests[0].reasoning
        assert limit is not None and limit.budget == 5 and not limit.inside
        assert (bytes(limit.opening), bytes(limit.closing)) == (b"<think>", b"</think>")
        await client.post(path, json=body)
        await client.post(path, json={**body, **fields, "choice": ["a", "b"]})
        assert requests[1].reasoning is requests[2].reasoning is None

    with_server(asked)


def test_a_prediction_is_passed_on() -> None:
    async def asked(client: httpx.AsyncClient, _: EngineClient, requests: list[Request]) -> None:
        path, body = CHAT
        for content in ("abcdef", [{"type": "text", "text": "abc"}, {"type": "text", "text": "def"}]):
            given = {**body, "max_tokens": 4, "prediction": {"type": "content", "content": content}}
            assert (await client.post(path, json=given)).status_code == 200
        assert [bytes(request.prediction) for request in requests] == [b"abcdef"] * 2

    with_server(asked)


def test_draft_tokens_are_counted_and_can_be_declined() -> None:
    async def asked(client: httpx.AsyncClient, _: EngineClient, __: list[Request]) -> None:
        body = {"prompt": "abcd" * 8, "max_tokens": 200, "ignore_eos": True, "temperature": 0}

        async def counted(name: str) -> float:
            lines = (await client.get("/metrics")).text.splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith(f"cllm_{name}_total"))

        assert (await client.post("/generate", json={**body, "speculate": False})).status_code == 200
        assert await counted("drafted_tokens") == await counted("accepted_tokens") == 0
        answer = (await client.post("/generate", json=body)).json()["data"]
        assert await counted("drafted_tokens") == answer["usage"]["drafted_tokens"]
        assert await counted("accepted_tokens") == answer["usage"]["accepted_tokens"]

    with_server(asked)


def test_a_tenant_over_its_limit_gets_429_with_the_right_time() -> None:
    async def asked(client: httpx.AsyncClient, engine: EngineClient, _: list[Request]) -> None:
        engine.tenants.register({"": TenantLimits(requests_per_s=0.1)})
        assert (await client.post("/generate", json=ROUTES[0][1])).status_code == 200
        answer = await client.post("/v1/completions", json=ROUTES[3][1])
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert 8 <= int(answer.headers["retry-after"]) <= 10
        engine.tenants.register({})
        assert (await client.post("/generate", json=ROUTES[0][1])).status_code == 200

    with_server(asked)


@pytest.mark.parametrize(("path", "field"), [("/v1/embeddings", "input"), ("/embedding", "content")])
def test_embeddings_count_for_the_tenant_of_the_key(path: str, field: str) -> None:
    async def asked(client: httpx.AsyncClient, engine: EngineClient, requests: list[Request]) -> None:
        engine.tenants.register({"default": TenantLimits(requests_per_s=0.1)})
        key = {"Authorization": "Bearer secret"}
        assert (await client.post(path, json={field: "hello"})).status_code == 401
        assert (await client.post(path, json={field: "hello"}, headers=key)).status_code == 200
        assert [request.tenant for request in requests] == ["default"]
        assert (await client.post(path, json={field: "hello"}, headers=key)).status_code == 429

    with_server(asked, api_key="secret")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "hello", "timeout": 30}),
        ("/embedding", {"content": "hello", "timeout": 30}),
        ("/api/embed", {"model": "fake", "input": "hello", "options": {"timeout": 30, "num_ctx": 9}}),
        ("/api/embeddings", {"model": "fake", "prompt": "hello", "options": {"timeout": 30}}),
    ],
)
def test_embeddings_have_a_time_limit(path: str, body: dict[str, Any]) -> None:
    async def asked(client: httpx.AsyncClient, _: EngineClient, requests: list[Request]) -> None:
        assert (await client.post(path, json=body)).status_code == 200
        assert [request.timeout_s for request in requests] == [30.0]

    with_server(asked)


def test_queue_position_is_told_and_a_full_queue_refuses() -> None:
    async def asked(client: httpx.AsyncClient, engine: EngineClient, _: list[Request]) -> None:
        body = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True}
        running = [asyncio.ensure_future(client.post("/generate", json=body)) for _ in range(3)]
        while len(engine.requests) < 3:
            await asyncio.sleep(0.01)
        waiting = []
        for count in (4, 5):
            waiting.append(asyncio.ensure_future(client.post("/generate_stream", json=body)))
            while len(engine.requests) < count:
                await asyncio.sleep(0.01)
        for path, refused in ROUTES[:4]:
            answer = await client.post(path, json=refused)
            assert answer.status_code == 429 and "2 requests are waiting" in answer.text
        assert [(await each).headers["x-queue-position"] for each in (*running, *waiting)] == list("01234")

    with_server(asked, sequences=1, step_s=0.01)
