"""A replica with a scripted engine: each gateway gets its own outputs, and takes its requests along."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from cllm.cluster.link import FromReplica, Link
from cllm.cluster.placer import ReplicaReport, hash_blocks
from cllm.cluster.replica import ReplicaLoad, ReplicaServer, ReplicaSettings
from cllm.config import EngineConfig
from cllm.messages import Died, Ready, StepReport, StepStats, Submit
from cllm.testing import FakeVocabulary, say
from cllm.types import FinishReason, Limits, Prompt, Request, RequestOutput, SamplingParams
from tests.driver.cluster import FolderDirectory

LIMIT_S = 30.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReplicaServer]:
    engine = EngineConfig(model="5", parallel=8, ctx_size=8192, draft_tokens=0)
    settings = ReplicaSettings(name="scripted", engine=engine, module="cllm.testing", drain_s=1.0)
    server = ReplicaServer(settings, engine, "127.0.0.1", FolderDirectory(str(tmp_path)))
    server.start()
    yield server
    server.stop()


class FakeGateway:
    """A link to a replica, and what came over it."""

    def __init__(self, name: str) -> None:
        self.received: list[object] = []
        self.link = Link(
            FromReplica, b"", name=name, received=lambda _, message: self.received.append(message)
        )

    async def connect(self, server: ReplicaServer) -> None:
        self.link._key = server.address.key
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self.link, server.address.host, server.address.port)
        await wait(lambda: any(isinstance(each, ReplicaReport) for each in self.received))
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
        load = [each for each in two.received if isinstance(each, ReplicaReport)][-1]
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


# Load ----------------------------------------------------------------------------------------------

LIMITS = Limits(sequences=2, cells=512, sequence_cells=256, request_tokens=256, batch_tokens=64)
PROMPT = tuple(range(130))


def make_load() -> ReplicaLoad:
    load = ReplicaLoad()
    load.reset(LIMITS)
    return load


def end(name: str, tokens: tuple[int, ...] = ()) -> RequestOutput:
    return RequestOutput(request_id=name, tokens=tokens, finish_reason=FinishReason.STOP)


def test_a_request_is_pending_until_its_first_token_and_leaves_its_blocks() -> None:
    load = make_load()
    load.submitted(Request(id="r", prompt=Prompt(PROMPT), max_tokens=9, tenant="t"), 1.0)
    assert load.report().requests == {"r": 130}
    load.processed([RequestOutput(request_id="r", tokens=(1,))], StepStats(), 2.0)
    assert load.report().requests == {"r": 0}
    load.processed([end("r", tuple(range(62)))], StepStats(), 5.0)
    report = load.report(all_blocks=True)
    assert report.requests == {} and report.speed.slot_s == 4.0
    whole = (*PROMPT, 1, *range(62), 0)
    assert set(report.blocks or ()) == set(hash_blocks(whole, "t")) and len(report.blocks or ()) == 3
    load.submitted(Request(id="again", prompt=Prompt(PROMPT), max_tokens=9, tenant="t"), 6.0)
    assert load.report().requests == {"again": 130 - 128}
    load.submitted(Request(id="foreign", prompt=Prompt(PROMPT), max_tokens=9, tenant="u"), 6.0)
    assert load.report().requests["foreign"] == 130


def test_blocks_are_reported_when_they_change_and_are_bounded_by_the_memory() -> None:
    load = make_load()
    assert load.report().blocks == []
    assert load.report().blocks is None
    for number in range(9):
        load.submitted(Request(id=f"{number}", prompt=Prompt((number,) * 65), max_tokens=1), 0.0)
    assert len(load.report().blocks or ()) == LIMITS.cells // 64
    load.forget_blocks()
    assert load.report().blocks == []


def test_speed_is_that_of_steps_with_a_prompt() -> None:
    load = make_load()
    load.processed([], StepStats(tokens=1, step_s=5.0, running=1), 0.0)
    assert load.report().speed.prefill_token_s == 0.0, "not known yet"
    load.processed([], StepStats(tokens=500, step_s=1.0, running=1), 0.0)
    assert load.report().speed.prefill_token_s == 0.002
    for _ in range(100):
        load.processed([], StepStats(tokens=500, step_s=2.0, running=1), 0.0)
    assert abs(load.report().speed.prefill_token_s - 0.004) < 1e-4


def test_what_waits_is_beyond_the_slots() -> None:
    load = make_load()
    for number in range(5):
        load.submitted(Request(id=f"{number}", prompt=Prompt((1,)), max_tokens=1), 0.0)
    assert load.waiting == 3
    load.reset(LIMITS)
    assert load.waiting == 0 and load.report().requests == {}
