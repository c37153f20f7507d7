"""A replica with a scripted engine: each gateway gets its own outputs, and takes its requests along."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from cllm.cluster.link import FromReplica, Link, Load, ReplicaAddress
from cllm.cluster.replica import ReplicaServer, ReplicaSettings
from cllm.config import EngineConfig
from cllm.messages import Died, Ready, StepReport, Submit
from cllm.testing import FakeVocabulary, say
from cllm.types import FinishReason, Prompt, Request, RequestOutput, SamplingParams

LIMIT_S = 30.0


class NoDirectory:
    def put(self, model: str, address: ReplicaAddress) -> None:
        self.address = address

    def remove(self, model: str, replica: str) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ReplicaServer]:
    engine = EngineConfig(model="5", parallel=8, ctx_size=8192, draft_tokens=0)
    settings = ReplicaSettings(name="scripted", engine=engine, module="cllm.testing", drain_s=1.0)
    server = ReplicaServer(settings, engine, "127.0.0.1", NoDirectory())
    server.start()
    yield server
    server.stop()


class FakeGateway:
    """A link to a replica, and what came over it."""

    def __init__(self, name: str) -> None:
        self.received: list[object] = []
        self.link = Link(
            FromReplica,
            b"",
            name=name,
            opened=lambda *_: None,
            received=lambda _, message: self.received.append(message),
            lost=lambda _: None,
        )

    async def connect(self, server: ReplicaServer) -> None:
        self.link._key = server.address.key
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self.link, server.address.host, server.address.port)
        await wait(lambda: any(isinstance(each, Load) for each in self.received))
        assert any(isinstance(each, Ready) for each in self.received)

    def submit(self, name: str, text: str) -> None:
        tokens = FakeVocabulary().tokenize(say(text), add_special=False, parse_special=False)
        sampling = SamplingParams(temperature=0)
        request = Request(id=name, prompt=Prompt(tuple(tokens)), max_tokens=600, sampling=sampling)
        self.link.send(Submit(request))

    @property
    def outputs(self) -> list[RequestOutput]:
        reports = [each for each in self.received if isinstance(each, StepReport)]
        return [output for report in reports for output in report.outputs]

    def text(self, name: str) -> str:
        return "".join(output.text for output in self.outputs if output.request_id == name)

    def ended(self, name: str) -> bool:
        return any(each.request_id == name and each.finish_reason for each in self.outputs)


async def wait(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not what():
            await asyncio.sleep(0.01)


def run(test: Callable[[FakeGateway, FakeGateway], Awaitable[None]], server: ReplicaServer) -> None:
    async def connected() -> None:
        gateways = FakeGateway("one"), FakeGateway("two")
        for gateway in gateways:
            await gateway.connect(server)
        try:
            await test(*gateways)
        finally:
            for gateway in gateways:
                gateway.link.abort()

    asyncio.run(connected())


def test_each_gateway_gets_its_own_outputs(server: ReplicaServer) -> None:
    async def test(one: FakeGateway, two: FakeGateway) -> None:
        one.submit("a", "for the first one " * 3)
        two.submit("b", "for the second " * 3)
        await wait(lambda: one.ended("a") and two.ended("b"))
        assert one.text("a") == "for the first one " * 3 and two.text("b") == "for the second " * 3
        assert {each.request_id for each in one.outputs} == {"a"}
        assert {each.request_id for each in two.outputs} == {"b"}
        load = [each for each in two.received if isinstance(each, Load)][-1]
        assert set(load.gateways) == {"one", "two"}

    run(test, server)


def test_a_gateway_that_leaves_takes_its_requests_along(server: ReplicaServer) -> None:
    async def test(one: FakeGateway, two: FakeGateway) -> None:
        one.submit("a", "long " * 90)
        two.submit("b", "short " * 20)
        await wait(lambda: bool(one.text("a")))
        one.link.abort()
        await wait(lambda: two.ended("b"))
        assert two.text("b") == "short " * 20
        await wait(lambda: not server.load.requests)

    run(test, server)


def test_the_end_of_an_engine_is_said_and_another_one_started(server: ReplicaServer) -> None:
    async def test(one: FakeGateway, two: FakeGateway) -> None:
        one.submit("a", "long " * 90)
        await wait(lambda: bool(one.text("a")))
        server._supervisor.kill()
        for gateway in (one, two):
            await wait(lambda each=gateway: any(isinstance(m, Died) for m in each.received))  # type: ignore[misc]
            await wait(lambda each=gateway: sum(isinstance(m, Ready) for m in each.received) == 2)  # type: ignore[misc]
        assert not one.ended("a") and not server.load.requests
        two.submit("b", "again")
        await wait(lambda: two.ended("b"))
        assert [each.finish_reason for each in two.outputs][-1] is FinishReason.STOP

    run(test, server)
