"""Engine client: one terminal event per request, refusals at once, survival of a native death."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from cllm.errors import (
    EngineNotReady,
    InvalidRequest,
)
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.frontend.request_queue import RequestState, Stage
from cllm.frontend.tenants import Tenant
from cllm.messages import Cancel, Command, Died, Encoding, Ready, StepReport, StepStats, Submit, Unready
from cllm.types import Failure, FinishReason, Health, Prompt, Request, RequestOutput, Usage
from cllm.workers.executor import ProcessExecutor, Receive
from cllm.workers.supervisor import Backoff
from tests.driver.fake_runner import FakeRunner
from tests.driver.thread_engine import BlockingEngine, BlockingOutputStream, ThreadTokenizer


def request(name: str, prompt: bytes = b"hello", max_tokens: int = 8) -> Request:
    return Request(id=name, prompt=Prompt(tuple(prompt)), max_tokens=max_tokens)


class ScriptedExecutor(ProcessExecutor):
    """An executor whose engine does what the test says."""

    tokenizer = ThreadTokenizer()

    def __init__(self) -> None:
        runner = FakeRunner(sequences=2)
        self.ready = Ready(runner.info, runner.limits)
        self.sent: list[Command] = []
        self.starts = 0
        self.delay_s = 0.0
        self.loads = True  # a run is Ready as soon as it is started
        self.unsendable: dict[str, Exception] = {}  # by request id
        self.stopped = False
        self.receive: Receive | None = None

    def start(self, receive: Receive, delay_s: float = 0.0) -> None:
        self.starts += 1
        self.delay_s = delay_s
        self.sent.clear()
        self.receive = receive
        if self.loads:
            receive(self.ready)

    def send(self, command: Command) -> None:
        if self.unsendable and isinstance(command, Submit) and command.request.id in self.unsendable:
            raise self.unsendable[command.request.id]
        self.sent.append(command)

    def stop(self) -> None:
        self.stopped = True

    def submitted(self) -> list[str]:
        return [command.request.id for command in self.sent if isinstance(command, Submit)]

    def prefixes(self) -> dict[str, tuple[int, ...]]:
        """What submitted requests have said before, where they have."""
        requests = (command.request for command in self.sent if isinstance(command, Submit))
        return {one.id: one.generated_prefix for one in requests if one.generated_prefix}

    def say(self, *deltas: RequestOutput, spent: dict[str, float] | None = None) -> None:
        assert self.receive is not None
        self.receive(StepReport(deltas, StepStats(), spent or {}))

    def die(self) -> None:
        assert self.receive is not None
        self.receive(Died("engine_died", "killed by the test"))

    def come_back(self) -> None:
        """The run that was started last is Ready."""
        assert self.receive is not None
        self.receive(self.ready)


@pytest.fixture
def executor() -> ScriptedExecutor:
    return ScriptedExecutor()


@pytest.fixture
def engine(executor: ScriptedExecutor) -> Iterator[EngineClient]:
    engine = BlockingEngine(executor, queue_size=10)
    engine.start()
    yield engine
    engine.stop()


def token(name: str, text: str = "x") -> RequestOutput:
    return RequestOutput(request_id=name, text=text, tokens=(1,))


def last(name: str) -> RequestOutput:
    usage = Usage(prompt_tokens=5, completion_tokens=1)
    return RequestOutput(request_id=name, finish_reason=FinishReason.STOP, usage=usage)


def read(stream: BlockingOutputStream) -> RequestOutput:
    """The terminal output; iteration ends with it."""
    return list(stream)[-1]


def test_the_engine_gets_a_few_more_than_it_can_run_and_the_rest_wait(
    engine: EngineClient, executor: ScriptedExecutor
) -> None:
    for number in range(8):
        engine.submit(request(f"r{number}"), BlockingOutputStream)
    assert executor.submitted() == ["r0", "r1", "r2", "r3"]
    executor.say(last("r1"))
    assert executor.submitted()[-1] == "r4"


def test_a_place_kept_for_a_tenant_that_has_left_is_given_away_in_time(
    engine: EngineClient, executor: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing happens in the engine meanwhile: a timer looks at the queue."""
    monkeypatch.setattr(Tenant, "HOLD_S", 0.25)

    def ask(name: str) -> None:
        tenant = name.rstrip("0123456789")
        engine.submit(
            Request(id=name, prompt=Prompt((1,)), max_tokens=5, tenant=tenant), BlockingOutputStream
        )

    ask("left1")
    ask("stays1")
    executor.say(token("stays1"), last("left1"))
    ask("stays2")
    assert executor.submitted() == ["left1", "stays1"], "the free place is kept"
    deadline = time.monotonic() + 10
    while "stays2" not in executor.submitted() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert executor.submitted() == ["left1", "stays1", "stays2"]


def median_s(calls: Sequence[Callable[[], object]]) -> float:
    """Median of the time that one of these calls takes."""
    times = []
    for call in calls:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@pytest.mark.parametrize("tenants", [1, 10_000])
def test_submitting_and_cancelling_cost_the_same_however_many_wait(
    executor: ScriptedExecutor, tenants: int
) -> None:
    engine = BlockingEngine(executor, queue_size=100_000)
    engine.start()

    def submit(number: int) -> AsyncOutputStream:
        tenant, timeout_s = f"t{number % tenants}", 1000.0 + number
        one = Request(id=f"r{number}", prompt=Prompt((1,)), max_tokens=5, tenant=tenant, timeout_s=timeout_s)
        return engine.submit(one, BlockingOutputStream)

    few, many = 500, 10_000 if tenants > 1 else 14_000

    def measure(first: int) -> list[float]:
        """Medians at `first` waiting: to submit, to cancel from the middle, to end with its successor."""
        submitted = [partial(submit, first + number) for number in range(few)]
        cancelled = [partial(engine.cancel, f"r{first // 2 + number}") for number in range(few // 2)]
        ended = [lambda: executor.say(last(next(iter(engine._queue._engine)))) for _ in range(few // 2)]
        return [median_s(calls) for calls in (submitted, cancelled, ended)]

    for number in range(few):
        submit(number)
    shortly = measure(few)
    for number in range(2 * few, many):
        submit(number)
    at_length = measure(many)
    # A search of the queue would take thirty times as long. Ratios, since the machine may be busy.
    assert all(later < 6 * before for before, later in zip(shortly, at_length, strict=True)), (
        shortly,
        at_length,
    )
    engine.stop()
    assert engine.requests == ()


def test_a_cancel_in_the_queue_never_reaches_the_engine(
    engine: EngineClient, executor: ScriptedExecutor
) -> None:
    streams = [engine.submit(request(f"r{number}"), BlockingOutputStream) for number in range(6)]
    engine.cancel("r5")
    assert read(streams[5]).finish_reason is FinishReason.CANCELLED
    assert "r5" not in executor.submitted() and Cancel("r5") not in executor.sent
    engine.cancel("r0")
    assert Cancel("r0") in executor.sent


def test_at_a_crash_begun_requests_are_resumed_and_others_replayed(
    engine: EngineClient, executor: ScriptedExecutor
) -> None:
    streams = [engine.submit(request(f"r{number}"), BlockingOutputStream) for number in range(6)]
    executor.say(RequestOutput(request_id="r0", text="ab", tokens=(7, 8)), token("r1"))
    executor.say(RequestOutput(request_id="r0", text="c", tokens=(9,)))
    engine.cancel("r1")
    executor.die()
    assert read(streams[1]).finish_reason is FinishReason.CANCELLED
    assert executor.submitted() == ["r0", "r2", "r3", "r4"]
    assert executor.prefixes() == {"r0": (7, 8, 9)}
    executor.say(token("r0", "d"), last("r0"))
    assert "".join(output.text for output in streams[0]) == "abcd"
    for number in range(2, 6):
        executor.say(token(f"r{number}"), last(f"r{number}"))
        assert read(streams[number]).finish_reason is FinishReason.STOP
    assert engine.requests == () and engine.health is Health.READY


def test_the_usage_of_a_resumed_request_is_that_of_one(
    engine: EngineClient, executor: ScriptedExecutor
) -> None:
    """Cached are the tokens that its first engine had; drafts are those of all engines."""
    stream = engine.submit(request("r0"), BlockingOutputStream)

    def say(**fields: Any) -> None:
        usage = Usage(prompt_tokens=5, completion_tokens=1, **fields)
        executor.say(msgspec.structs.replace(token("r0"), usage_so_far=usage))

    say(cached_tokens=3, cached_from="ram")
    executor.die()
    say(cached_tokens=4, cached_from="device", drafted_tokens=5, accepted_tokens=2)
    executor.say(token("r0"))
    executor.die()
    end = Usage(prompt_tokens=5, completion_tokens=4, cached_tokens=1, cached_from="device", drafted_tokens=3)
    executor.say(RequestOutput(request_id="r0", finish_reason=FinishReason.LENGTH, usage=end))
    usage = read(stream).usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (5, 4)
    assert (usage.cached_tokens, usage.cached_from) == (3, "ram")
    assert (usage.drafted_tokens, usage.accepted_tokens) == (8, 2)


def test_a_request_that_crashes_the_engine_in_mid_answer_is_isolated_and_failed(
    engine: EngineClient, executor: ScriptedExecutor
) -> None:
    poison = engine.submit(request("poison"), BlockingOutputStream)
    other = engine.submit(request("r0"), BlockingOutputStream)
    executor.say(token("poison"), token("r0"))
    executor.die()
    executor.say(token("poison"))
    executor.die()
    assert executor.submitted() == ["poison"] and executor.prefixes() == {"poison": (1, 1)}
    executor.die()
    *said, end = poison
    assert "".join(output.text for output in said) == "xx"
    assert end.error is not None and end.error.code == "poison_request" and end.usage is not None
    assert end.usage.completion_tokens == 2
    executor.say(last("r0"))
    assert read(other).finish_reason is FinishReason.STOP


def test_a_request_that_gets_on_is_cleared_of_earlier_crashes(
    engine: EngineClient, executor: ScriptedExecutor
) -> None:
    """Else a long answer that was there at two crashes would keep all others waiting to its end."""
    engine.submit(request("long", max_tokens=500), BlockingOutputStream)
    engine.submit(request("r0"), BlockingOutputStream)
    executor.say(token("long"))
    executor.die()
    executor.die()
    assert executor.submitted() == ["long"], "it runs alone"
    progress = RequestState.CLEARING_TOKENS
    executor.say(*[token("long")] * (progress - 1))
    assert executor.submitted() == ["long"]
    executor.say(token("long"))
    assert executor.submitted() == ["long"], "the other one must run alone, too"
    executor.die()
    assert executor.submitted()[0] == "long" and len(executor.prefixes()["long"]) == 1 + progress
    assert engine._queue.states["long"].crashes == 1


def test_reports_of_a_dead_engine_are_ignored(engine: EngineClient, executor: ScriptedExecutor) -> None:
    stream = engine.submit(request("r0"), BlockingOutputStream)
    stale = executor.receive
    executor.die()
    assert stale is not None
    stale(StepReport((last("r0"),), StepStats()))
    assert not stream.finished
    executor.say(last("r0"))
    assert stream.finished


def test_an_engine_that_keeps_crashing_is_refused_for_and_started_again_for_ever(
    engine: EngineClient, executor: ScriptedExecutor
) -> None:
    """Was: given up after five restarts, with 500 for every later request."""
    executor.loads = False
    for count in range(Backoff.MAX_IN_A_ROW):
        executor.die()
        assert engine.health is Health.RESTARTING and executor.starts == 2 + count
    waiting = engine.submit(request("r0"), BlockingOutputStream)
    delays = []
    for _ in range(30):
        executor.die()
        delays.append(executor.delay_s)
        assert engine.health is Health.FAILED
    assert delays == sorted(delays) and delays[-1] == Backoff.MAX_DELAY_S
    failure = read(waiting).error
    assert failure is not None and failure.code == "engine_not_ready"
    with pytest.raises(EngineNotReady, match=r"crashed 35 times.*again in 60 s") as refusal:
        engine.submit(request("r1"), BlockingOutputStream)
    assert refusal.value.retry_after_s == Backoff.MAX_DELAY_S
    with pytest.raises(EngineNotReady):
        engine.check_capacity()
    executor.come_back()
    assert engine.health is Health.READY
    stream = engine.submit(request("r2"), BlockingOutputStream)
    executor.say(last("r2"))
    assert read(stream).finish_reason is FinishReason.STOP


def test_an_answer_that_is_an_error_is_no_progress(engine: EngineClient, executor: ScriptedExecutor) -> None:
    """Was: an engine that gave each request an error before it died was restarted without any delay."""
    for number in range(Backoff.MAX_IN_A_ROW + 1):
        stream = engine.submit(request(f"r{number}"), BlockingOutputStream)
        failure = Failure("engine_died", "two steps in a row failed")
        executor.say(RequestOutput(request_id=f"r{number}", finish_reason=FinishReason.ERROR, error=failure))
        assert read(stream).error == failure
        executor.loads = number < Backoff.MAX_IN_A_ROW
        executor.die()
    assert engine.health is Health.FAILED and executor.delay_s > 5


def test_cores_are_left_until_the_last_picture_is_encoded(
    engine: EngineClient, executor: ScriptedExecutor
) -> None:
    with engine.encoding():
        with engine.encoding():
            pass
        assert executor.sent == [Encoding(active=True)] * 2
    assert executor.sent[2:] == [Encoding(active=False)]
    executor.loads = False
    executor.die()
    executor.sent.clear()
    with engine.encoding():
        assert executor.sent == [], "there is no engine"


def test_death_while_draining_replays_on_the_next_run(
    engine: EngineClient, executor: ScriptedExecutor
) -> None:
    """Was: what came after the death went into the closed socket, and waited for the end of the drain."""
    streams = [engine.submit(request(f"r{number}"), BlockingOutputStream) for number in range(6)]
    executor.say(token("r0"))
    engine.drain()
    executor.loads = False
    executor.die()
    engine.cancel("r5")  # it makes a place: nothing may be sent while there is no engine
    assert executor.sent == [] and {state.stage for state in engine.requests} == {Stage.QUEUED}
    assert engine.inspect().exception(0) is not None
    executor.come_back()
    assert engine.health is Health.DRAINING and executor.submitted() == ["r0", "r1", "r2", "r3"]
    assert executor.prefixes() == {"r0": (1,)}
    executor.say(*(last(f"r{number}") for number in range(4)))
    executor.loads = False
    executor.die()
    engine.end_all()
    ends = [read(stream).finish_reason for stream in streams[1:]]
    assert ends == [FinishReason.STOP] * 3 + [FinishReason.ERROR, FinishReason.CANCELLED]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("a number is out of range"), "invalid_request"),
        (RecursionError(), "engine_error"),
        (EngineNotReady("the engine process does not read its input"), "engine_not_ready"),
    ],
)
def test_a_request_that_cannot_be_sent_fails_alone(
    engine: EngineClient, executor: ScriptedExecutor, error: Exception, code: str
) -> None:
    """Was: it stayed "in the engine", which had never heard of it, and its neighbours were not sent."""
    executor.unsendable = dict.fromkeys(("r1", "r4", "r5"), error)
    streams = [engine.submit(request(f"r{number}"), BlockingOutputStream) for number in range(8)]
    executor.say(last("r0"))
    assert executor.submitted() == ["r0", "r2", "r3", "r6", "r7"]
    for number in (1, 4, 5):
        failure = read(streams[number]).error
        assert failure is not None and failure.code == code


def test_stopping_ends_every_request_exactly_once(engine: EngineClient, executor: ScriptedExecutor) -> None:
    streams = [engine.submit(request(f"r{number}"), BlockingOutputStream) for number in range(9)]
    engine.stop()
    engine.stop()
    assert [read(stream).finish_reason for stream in streams] == [FinishReason.ERROR] * 9
    assert executor.stopped and engine.requests == ()


def test_requests_wait_while_a_cluster_has_no_replica_until_it_is_given_up(
    engine: EngineClient, executor: ScriptedExecutor
) -> None:
    running = engine.submit(request("running"), BlockingOutputStream)
    assert executor.receive is not None
    executor.receive(Unready("no replica is there"))
    assert engine.health is Health.RESTARTING and engine.error is not None
    engine.submit(request("waits"), BlockingOutputStream)
    assert executor.submitted() == ["running"]
    executor.come_back()
    assert engine.health.value == "ready" and engine.error is None
    assert executor.submitted() == ["running", "waits"] and not running.finished
    executor.receive(Unready("no replica is there", given_up=True))
    assert read(running).error == Failure(EngineNotReady.code, "no replica is there")
    with pytest.raises(EngineNotReady, match="no replica is there"):
        engine.submit(request("later"), BlockingOutputStream)
    executor.come_back()
    engine.submit(request("again"), BlockingOutputStream)
    assert executor.submitted()[-1] == "again"


def test_the_engine_is_told_whose_requests_wait_for_slots(
    engine: EngineClient, executor: ScriptedExecutor
) -> None:
    for tenant, name in (("few", "one"), ("many", "first"), ("many", "second"), ("many", "third")):
        engine.submit(msgspec.structs.replace(request(name), tenant=tenant), BlockingOutputStream)
    executor.say(last("first"))
    sent = [each.request for each in executor.sent if isinstance(each, Submit)]
    backlogged = {each.id: each.backlogged for each in sent}
    assert backlogged == {"one": False, "first": False, "second": True}, (
        "`third` waited when `second` was sent"
    )
    for name in ("one", "second", "third"):
        executor.say(last(name))


def test_a_tenant_pays_for_the_seconds_that_its_requests_take(
    engine: EngineClient, executor: ScriptedExecutor
) -> None:
    """Its prompt is paid before; what that did not cost, since it was cached, is given back."""
    for name in ("cheap", "costly"):
        engine.submit(msgspec.structs.replace(request(name), tenant=name), BlockingOutputStream)
    cheap, costly = map(engine.tenants.accounts.__getitem__, ("cheap", "costly"))
    prepaid = cheap.virtual
    assert prepaid == costly.virtual > 0
    executor.say(token("cheap"), spent={"cheap": prepaid / 2, "costly": prepaid + 1, "unknown": 1.0})
    assert cheap.virtual == prepaid and costly.virtual == pytest.approx(prepaid + 1)
    assert cheap.tokens == costly.tokens + 1, "its limit is of tokens"
    executor.say(last("cheap"))
    engine.submit(msgspec.structs.replace(request("again"), tenant="cheap"), BlockingOutputStream)
    assert cheap.virtual == pytest.approx(1.5 * prepaid)
    executor.say(last("again"))
    executor.say(last("costly"))
