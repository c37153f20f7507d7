"""Streams begin at once, show that they are alive, and end with an event, whatever happens."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from msgspec import structs

from cllm.backend.base import Batch, StepResult, StepStatus
from cllm.config import EngineConfig, ServerConfig
from cllm.errors import DeadlineExceeded
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.server import sse
from cllm.server.app import create_app
from cllm.server.dialect import COMMENT, DONE
from cllm.server.dialects.cllm import cllm, events
from cllm.testing import CHAT_TEMPLATE
from cllm.types import Failure, FinishReason, RequestOutput, TokenLogprob
from tests.driver.fake_runner import FakeRunner
from tests.driver.thread_engine import ThreadExecutor

MESSAGES = [{"role": "user", "content": "hello"}]
ROUTES: list[tuple[str, dict[str, Any], bytes]] = [
    ("/generate", {"prompt": "hello"}, b":\n\n"),
    ("/generate_stream", {"prompt": "hello"}, b":\n\n"),
    ("/completion", {"prompt": "hello"}, b":\n\n"),
    ("/v1/completions", {"prompt": "hello"}, b":\n\n"),
    ("/v1/chat/completions", {"messages": MESSAGES}, b'"role":"assistant"'),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}, b"event: message_start"),
    ("/v1/responses", {"input": "hello"}, b"event: response.created"),
]
Send = Callable[[Any], Coroutine[Any, Any, None]]


class GatedRunner(FakeRunner):
    """Computes nothing until it may: a prompt that is being read."""

    def __init__(self, gate: threading.Event, *, fails: bool = False) -> None:
        super().__init__(chat_template=CHAT_TEMPLATE)
        self._gate, self._fails = gate, fails

    def _decode(self, batch: Batch) -> StepResult:
        assert self._gate.wait(30)
        return StepResult(StepStatus.FAILED, code=-2) if self._fails else super()._decode(batch)


@asynccontextmanager
async def engine_of(runner: FakeRunner) -> AsyncIterator[EngineClient]:
    engine = EngineClient(ThreadExecutor(lambda _: runner, EngineConfig(draft_tokens=0)))
    engine.start(asyncio.get_running_loop())
    try:
        await asyncio.wrap_future(engine.loaded)
        yield engine
    finally:
        await asyncio.get_running_loop().run_in_executor(None, engine.stop)


class Client:
    """Sends a request to the application; keeps what comes and when the first body did."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "http_version": "1.1",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }
        self._request = json.dumps(body).encode()
        self.status = 0
        self.data = b""
        self.got = asyncio.Event()
        self.left = asyncio.Event()

    async def receive(self) -> Any:
        if self._request is not None:
            body, self._request = self._request, None  # type: ignore[assignment]
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["body"]:
            self.data += message["body"]
            self.got.set()

    async def ask(self, engine: EngineClient) -> None:
        app = create_app(engine, ServerConfig())
        await app(self.scope, self.receive, self.send)


@pytest.mark.parametrize(("path", "body", "first"), ROUTES, ids=[path for path, *_ in ROUTES])
async def test_a_stream_begins_before_anything_is_computed(
    path: str, body: dict[str, Any], first: bytes
) -> None:
    gate = threading.Event()
    async with engine_of(GatedRunner(gate)) as engine:
        client = Client(path, {**body, "stream": True})
        asked = asyncio.ensure_future(client.ask(engine))
        await client.got.wait()
        assert client.status == 200 and first in client.data
        assert not gate.is_set()
        begun = len(client.data)
        gate.set()
        await asked
        assert len(client.data) > begun + 20


@pytest.mark.parametrize(("path", "body", "first"), ROUTES, ids=[path for path, *_ in ROUTES])
async def test_what_is_known_at_once_keeps_its_status(path: str, body: dict[str, Any], first: bytes) -> None:
    async with engine_of(GatedRunner(threading.Event())) as engine:
        wrong = {**body, "stream": True, "temperature": "hot"}
        long = {name: _lengthen(value) for name, value in body.items()}
        for given, status in ((wrong, 400), ({**long, "stream": True}, 400)):
            client = Client(path, given)
            await client.ask(engine)
            assert client.status == status, client.data
        assert engine.requests == ()
        engine.drain()
        client = Client(path, {**body, "stream": True})
        await client.ask(engine)
        assert client.status == 503


def _lengthen(value: Any) -> Any:
    if isinstance(value, list):
        return [{"role": "user", "content": "x" * 20_000}]
    return "x" * 20_000 if isinstance(value, str) else value


@pytest.mark.parametrize(("path", "body", "first"), ROUTES, ids=[path for path, *_ in ROUTES])
async def test_a_later_failure_is_an_event(path: str, body: dict[str, Any], first: bytes) -> None:
    gate = threading.Event()
    async with engine_of(GatedRunner(gate, fails=True)) as engine:
        client = Client(path, {**body, "stream": True})
        asked = asyncio.ensure_future(client.ask(engine))
        await client.got.wait()
        gate.set()
        await asked
        assert client.status == 200 and b'"error"' in client.data


@pytest.mark.parametrize(
    ("path", "beat"),
    [("/v1/chat/completions", b":\n\n"), ("/v1/messages", b'event: ping\ndata: {"type":"ping"}\n\n')],
)
async def test_a_silent_stream_beats(path: str, beat: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "BEAT_S", 0.02)
    gate = threading.Event()
    async with engine_of(GatedRunner(gate)) as engine:
        client = Client(path, {"messages": MESSAGES, "max_tokens": 4, "stream": True})
        asked = asyncio.ensure_future(client.ask(engine))
        while client.data.count(beat) < 4:
            await asyncio.sleep(0.01)
        gate.set()
        await asked
        ended = client.data
        await asyncio.sleep(0.05)
        assert client.data == ended and not ended.endswith(beat)


def make_response(engine: EngineClient, pieces: Sequence[bytes], gap_s: float) -> sse.EventStream:
    async def produce() -> AsyncIterator[bytes]:
        for piece in pieces:
            await asyncio.sleep(gap_s)
            yield piece

    return sse.EventStream(engine, [AsyncOutputStream("x")], produce())


def scope_of(slow_reader_s: float) -> Any:
    return {
        "type": "http",
        "app": SimpleNamespace(state=SimpleNamespace(slow_reader_s=slow_reader_s, reconnect_s=0.0)),
    }


async def never() -> Any:
    await asyncio.Event().wait()


async def test_a_stream_that_flows_does_not_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "BEAT_S", 1.0)  # far more than a gap, even where the machine is busy
    async with engine_of(FakeRunner()) as engine:
        sent: list[bytes] = []

        async def send(message: Any) -> None:
            sent.append(message.get("body", b"head"))

        await make_response(engine, [b"x"] * 50, 0.03)(scope_of(30.0), never, send)
        assert sent == [b"head", *[b"x"] * 50, b""]


async def test_an_event_waits_for_the_beat_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beat that the socket does not take yet holds the end back: nothing is written after the end."""
    monkeypatch.setattr(sse, "BEAT_S", 0.02)
    async with engine_of(FakeRunner()) as engine:
        sent: list[bytes] = []
        beating, produced = asyncio.Event(), asyncio.Event()

        async def produce() -> AsyncIterator[bytes]:
            await beating.wait()
            produced.set()
            yield b"x"

        async def send(message: Any) -> None:
            body = message.get("body", b"head")
            if body == COMMENT:
                beating.set()
                await produced.wait()
                await asyncio.sleep(0.1)
            sent.append(body)

        response = sse.EventStream(engine, [AsyncOutputStream("x")], produce())
        await response(scope_of(30.0), never, send)
        assert sent == [b"head", COMMENT, b"x", b""]


async def test_a_client_that_takes_no_beat_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "BEAT_S", 0.02)
    async with engine_of(FakeRunner()) as engine:

        async def send(message: Any) -> None:
            if message.get("body") == COMMENT:
                await asyncio.Event().wait()

        await make_response(engine, [b"x"], 30.0)(scope_of(0.1), never, send)
        assert engine.metrics.slow_readers._value.get() == 1


async def test_a_failure_that_is_there_already_keeps_its_status() -> None:
    async with engine_of(FakeRunner()) as engine:
        stream = AsyncOutputStream("x")
        failure = Failure(DeadlineExceeded.code, "too late")
        stream.push(RequestOutput(request_id="x", finish_reason=FinishReason.ERROR, error=failure))
        statuses: list[int] = []

        async def send(message: Any) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        scope = {**scope_of(30.0), "state": {"dialect": cllm}}
        await sse.EventStream(engine, [stream], events(stream))(scope, never, send)
        assert statuses == [504]


async def test_leaving_before_the_first_token_cancels() -> None:
    gate = threading.Event()
    async with engine_of(GatedRunner(gate)) as engine:
        client = Client("/v1/messages", {"messages": MESSAGES, "max_tokens": 4, "stream": True})
        asked = asyncio.ensure_future(client.ask(engine))
        await client.got.wait()
        client.left.set()
        await asked
        gate.set()
        while engine.requests:
            await asyncio.sleep(0.005)


async def test_requests_of_several_choices_begin_at_once() -> None:
    gate = threading.Event()
    async with engine_of(GatedRunner(gate)) as engine:
        body = {"messages": MESSAGES, "max_tokens": 4, "n": 3, "stream": True}
        client = Client("/v1/chat/completions", body)
        asked = asyncio.ensure_future(client.ask(engine))
        while client.data.count(b'"role":"assistant"') < 3:
            await asyncio.sleep(0.005)
        gate.set()
        await asked
        assert client.data.endswith(DONE)


async def test_the_sdks_read_a_stream_with_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "BEAT_S", 0.01)
    runner = FakeRunner(chat_template=CHAT_TEMPLATE, step_s=0.04)
    async with engine_of(runner) as engine:
        app = create_app(engine, ServerConfig())
        raw: list[bytes] = []

        async def record(response: Any) -> None:
            raw.append(await response.aread())

        hooks: Any = {"response": [record]}
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), event_hooks=hooks)
        by_openai = openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="x", http_client=http)
        asked: Any = {"model": "any", "messages": MESSAGES, "max_tokens": 6, "seed": 1}
        chunks = await by_openai.chat.completions.create(**asked, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        events = await by_openai.responses.create(
            model="any", input="hello", max_output_tokens=6, stream=True
        )
        kinds = [event.type async for event in events]
        other = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), event_hooks=hooks)
        by_anthropic = anthropic.AsyncAnthropic(base_url="http://127.0.0.1", api_key="x", http_client=other)
        async with by_anthropic.messages.stream(
            model="any", messages=asked["messages"], max_tokens=6, extra_body={"seed": 1}
        ) as stream:
            message = await stream.get_final_message()
        assert len(text) == 6 and message.content[0].text == text  # type: ignore[union-attr]
        assert kinds[0] == "response.created"
        assert kinds[-1] in ("response.completed", "response.incomplete")
        assert all(b"\n\n:\n\n" in got for got in raw[:2])
        assert raw[2].count(b"event: ping") > 2


@pytest.mark.parametrize(
    ("field", "many"), [("logprobs", False), ("logprobs", True), ("prompt_logprobs", True)]
)
async def test_many_scores_are_rendered_on_a_thread(field: str, many: bool) -> None:
    """256 short answers with 20 likely tokens each stopped all others for 1.6 s."""
    entries = (TokenLogprob(1, 0.0),) * (sse.MAX_SCORED // 2 + many)
    outputs = [[structs.replace(RequestOutput(request_id="a"), **{field: entries})]] * 2
    here = await sse.render(outputs, threading.current_thread) is threading.current_thread()
    assert here is not many
