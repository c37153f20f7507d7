"""Embedding requests on the fake runner: their results, their turns, and failures that stay their own."""

from __future__ import annotations

import asyncio
import random
import struct
from unittest.mock import AsyncMock, Mock

import msgspec
import numpy as np
import pytest

from cllm.backend.base import Batch, RowResult, StepResult, StepStatus
from cllm.errors import ContextLengthExceeded, EngineDied, InvalidRequest, NotEnoughMemory
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.request_queue import MAX_EMBEDDING_REQUESTS
from cllm.messages import (
    TokenizePairs,
    TokenizeTexts,
    TokenLists,
)
from cllm.server.dialects.openai import embeddings
from cllm.server.dialects.openai.embeddings import to_vector
from cllm.testing.scripted import END_TOKEN
from cllm.types import (
    EmbedLimits,
    Failure,
    FinishReason,
    Pooling,
    Prompt,
    Request,
    RequestOutput,
    SamplingParams,
    Usage,
)
from cllm.workers.tokenizer import TokenizerWorker
from tests.driver.engine import StepDriver
from tests.driver.fake_runner import FakeRunner
from tests.driver.thread_engine import BlockingEngine, BlockingOutputStream
from tests.unit.frontend.test_engine_client import ScriptedExecutor

UNCHUNKED = EmbedLimits(tokens=256, batch_tokens=64, rows=4, chunked=False)


class Spied(FakeRunner):
    """Remembers the batches it was given."""

    batches: list[Batch]

    def submit(self, batch: Batch) -> None:
        self.__dict__.setdefault("batches", []).append(batch)
        super().submit(batch)

    @property
    def kinds(self) -> str:
        """The batches in order: e for vectors, g for tokens."""
        return "".join(batch.kind.value[0] for batch in self.batches)


class Timed(Spied):
    """Each step takes a tenth of a second."""

    def collect(self) -> StepResult:
        return super().collect()._replace(compute_s=0.1)


def generate(driver: StepDriver, prompt: bytes, max_tokens: int) -> str:
    return driver.add(prompt, max_tokens, ignore_eos=True)


def check(driver: StepDriver, name: str) -> None:
    """The request ended well, with what a model alone would say."""
    assert driver.answers[name].error_code is None
    assert driver.outcome(name) is (FinishReason.STOP if driver.requests[name].embed else FinishReason.LENGTH)
    driver.check_answer(name)


def texts(count: int, length: int = 10, seed: int = 0) -> list[bytes]:
    source = random.Random(seed)
    return [bytes(source.randrange(97, 123) for _ in range(length)) for _ in range(count)]


def test_short_requests_do_not_wait_for_all_long_ones() -> None:
    """With one long input in each turn, a request for two words waited for all that came before."""
    driver = StepDriver(Spied(batch_tokens=64))
    long = [driver.embed(*texts(3, 60, seed=seed)) for seed in range(8)]
    short = driver.embed(*texts(2, 4))
    for _ in range(3):
        driver.step()
    assert driver.outcome(short) is FinishReason.STOP and not any(
        driver.answers[each].finish_reason for each in long
    )
    driver.run()
    for name in (*long, short):
        check(driver, name)


def test_long_inputs_beside_a_stream_are_not_computed_in_single_tokens() -> None:
    driver = StepDriver(runner := Timed(batch_tokens=256))  # whole tiles: a stream has no row in them
    stream = generate(driver, b"stream", 150)
    name = driver.embed(*texts(3, 240))
    driver.run()
    sizes = [batch.token_count for batch in runner.batches if batch.kind.value == "embed"]
    assert sum(sizes) == 720 and len(sizes) < 20 and {64, 128, 192} & {*sizes}, sizes
    for each in (name, stream):
        check(driver, each)


def test_tenants_share_the_batches_of_embeddings() -> None:
    driver = StepDriver(Timed(batch_tokens=64))
    many = [driver.embed(*texts(2, 60, seed=seed), tenant="many") for seed in range(8)]
    one = driver.embed(*texts(3, 60, seed=9), tenant="one")
    steps = 0
    while driver.answers[one].finish_reason is None:
        driver.step()
        steps += 1
    assert steps <= 7, "every other batch is its own"
    driver.run()
    for name in (*many, one):
        check(driver, name)


def test_inputs_are_packed_up_to_the_limits_of_a_step() -> None:
    runner = Spied(batch_tokens=64)
    driver = StepDriver(runner)
    driver.embed(*texts(8, 10))
    driver.embed(*texts(3, 40))
    driver.finish()
    assert all(len(batch.rows) <= 4 and batch.token_count <= 64 for batch in runner.batches)
    assert len(runner.batches) <= 5, "11 inputs of 200 tokens need no more"


@pytest.mark.parametrize("length", [65, 128, 129, 256])
def test_a_long_input_is_computed_over_several_steps(length: int) -> None:
    runner = Spied(batch_tokens=64)
    driver = StepDriver(runner)
    name = driver.embed(b"before", *texts(1, length), b"after")
    driver.finish()
    check(driver, name)
    assert max(batch.token_count for batch in runner.batches) <= 64


def test_an_input_that_cannot_be_cut_is_a_step_of_its_own() -> None:
    runner = Spied(batch_tokens=64, embed=UNCHUNKED)
    driver = StepDriver(runner)
    name = driver.embed(b"before", *texts(1, 200), b"after")
    driver.finish()
    check(driver, name)
    assert [batch.token_count for batch in runner.batches if len(batch.rows) == 1].count(200) == 1


def test_embeddings_and_generation_take_turns() -> None:
    runner = Spied(sequences=4)
    driver = StepDriver(runner)
    streams = [generate(driver, prompt, 30) for prompt in texts(3, 20)]
    call = driver.embed(*texts(60, 20))
    driver.finish()
    for name in (*streams, call):
        check(driver, name)
    assert "gege" in runner.kinds
    together = runner.kinds[: runner.kinds.rindex("g")]
    assert "ee" not in together, "two batches of vectors between two steps of tokens"


def test_a_short_call_does_not_wait_for_a_long_one() -> None:
    driver = StepDriver(Spied(batch_tokens=64))
    long = driver.embed(*texts(100, 30))
    driver.step()
    short = driver.embed(b"me first")
    for _ in range(3):
        driver.step()
    check(driver, short)
    assert driver.answers[long].finish_reason is None
    driver.finish()
    check(driver, long)


def test_a_call_with_large_inputs_is_not_passed_over_for_ever() -> None:
    driver = StepDriver(Spied(batch_tokens=64))
    for seed in range(3):
        driver.embed(*texts(400, 30, seed))
    large = driver.embed(b"z" * 60)
    for _ in range(8):
        driver.step()
    check(driver, large)


def test_one_refused_input_ends_its_own_call_only() -> None:
    driver = StepDriver(Spied(sequences=4))
    bad = driver.embed(b"good", (65, END_TOKEN), b"good")  # the fake refuses to read the end token
    good = driver.embed(*texts(5))
    stream = generate(driver, b"and a stream", 10)
    driver.finish()
    assert driver.answers[bad].error_code == "bad_batch"
    check(driver, good)
    check(driver, stream)


def test_an_input_without_a_vector_ends_its_own_call_only() -> None:
    class Blurred(Spied):
        """Gives no vector for one input."""

        def collect(self) -> StepResult:
            result = super().collect()
            rows = (
                RowResult(error="not finite") if tuple(row.tokens) == tuple(b"bad") else outcome
                for row, outcome in zip(self.batches[-1].rows, result.rows, strict=True)
            )
            return result._replace(rows=tuple(rows))

    driver = StepDriver(Blurred())
    bad, good = driver.embed(b"fine", b"bad", b"fine too"), driver.embed(b"one", b"two")
    driver.finish()
    assert driver.answers[bad].error_message == "input 1: not finite"
    check(driver, good)


def test_a_cancelled_call_ends_once_and_leaves_nothing() -> None:
    driver = StepDriver(Spied())
    other = driver.embed(*texts(3))
    long = driver.embed(*texts(2, 250))
    while not driver.fake.embedding_memory:
        assert not driver.core.idle
        driver.step()
    driver.cancel(long)
    driver.cancel(long)
    assert driver.fake.embedding_memory == []
    driver.finish()
    assert driver.outcome(long) is FinishReason.CANCELLED and driver.answers[long].embeddings == ()
    check(driver, other)
    again = driver.embed(*texts(1, 250))
    driver.finish()
    check(driver, again)


@pytest.mark.parametrize("status", [StepStatus.ABORTED, StepStatus.FAILED])
@pytest.mark.parametrize("at", range(6))
def test_a_failed_step_only_costs_time(status: StepStatus, at: int) -> None:
    numbers = iter(range(1000))
    runner = Spied(fail=lambda _, name: status if name == "embed" and next(numbers) == at else None)
    driver = StepDriver(runner)
    names = [driver.embed(*texts(5, 40)), driver.embed(*texts(2, 200)), generate(driver, b"a stream", 12)]
    driver.finish()
    for name in names:
        check(driver, name)


def test_two_failed_steps_in_a_row_end_the_engine_and_no_request() -> None:
    runner = FakeRunner(fail=lambda _, name: StepStatus.FAILED if name == "embed" else None)
    driver = StepDriver(runner)
    driver.enqueue(
        Request(id="a", prompt=Prompt(()), max_tokens=0, embed=((1, 2),)),
        Request(id="b", prompt=Prompt(()), max_tokens=0, embed=((3,),)),
        # Turns are shared by time: it goes on while the others fail.
        Request(id="c", prompt=Prompt((1,)), max_tokens=240, sampling=SamplingParams(ignore_eos=True)),
    )
    with pytest.raises(EngineDied, match="two steps in a row"):
        driver.core.run()
    driver.check_released()
    assert {answer.finish_reason for answer in driver.answers.values()} == {None}


@pytest.mark.parametrize("number", range(24))
def test_whatever_native_call_raises_every_request_ends_once(number: int) -> None:
    def fail(call: int, name: str) -> Exception | None:
        return RuntimeError("injected") if call == number and name != "truncate" else None

    driver = StepDriver(FakeRunner(fail=fail))
    names = [driver.embed(*texts(3, 40)), driver.embed(*texts(1, 200)), generate(driver, b"a stream", 6)]
    driver.run()
    driver.check_end()
    failed = [name for name in names if driver.answers[name].error_code is not None]
    assert len(failed) <= 1, "one call failed: at most one request suffers"
    for name in set(names) - set(failed):
        check(driver, name)


def test_missing_memory_is_an_error_of_the_request_and_tried_again() -> None:
    short_of_memory = [True]

    def fail(_: int, name: str) -> Exception | None:
        return NotEnoughMemory("too little") if name == "open_embedding" and short_of_memory[0] else None

    driver = StepDriver(FakeRunner(fail=fail))
    stream = generate(driver, b"a stream", 6)
    refused = driver.embed(b"x")
    driver.finish()
    assert driver.answers[refused].error_code == "not_enough_memory"
    check(driver, stream)
    short_of_memory[0] = False
    later = driver.embed(b"x")
    driver.finish()
    check(driver, later)


def test_an_embedding_model_refuses_to_generate() -> None:
    driver = StepDriver(FakeRunner(generates=False))
    mute, vectors = generate(driver, b"say something", 5), driver.embed(b"x")
    driver.finish()
    assert driver.answers[mute].error_code == "invalid_request"
    check(driver, vectors)


@pytest.mark.parametrize("seed", range(25))
def test_random_workloads(seed: int) -> None:
    source = random.Random(seed)
    failures = (StepStatus.ABORTED, StepStatus.BAD_BATCH, StepStatus.NO_ROOM)

    def fail(_: int, name: str) -> StepStatus | None:
        return source.choice(failures) if name == "embed" and source.random() < 0.1 else None

    limits = source.choice([None, UNCHUNKED])
    driver = StepDriver(Spied(sequences=2, fail=fail, embed=limits))
    for _ in range(80):
        match source.randrange(6):
            case 0:
                sizes = [source.choice([1, 5, 30, 64, 65, 250]) for _ in range(source.randrange(1, 9))]
                driver.embed(*(texts(1, size, source.randrange(99))[0] for size in sizes))
            case 1:
                generate(driver, texts(1, source.randrange(1, 90), 7)[0], source.randrange(1, 20))
            case 2 if driver.requests:
                driver.cancel(source.choice(list(driver.requests)))
            case _:
                driver.step()
    driver.finish()
    for name, answer in driver.answers.items():
        driver.check_answer(name)
        assert answer.error_code in (None, "bad_batch")


# The HTTP process ---------------------------------------------------------------------------------


def call(name: str, *inputs: bytes) -> Request:
    return Request(id=name, prompt=Prompt(()), max_tokens=0, embed=tuple(map(tuple, inputs)))


def done(name: str) -> RequestOutput:
    usage = Usage(prompt_tokens=1, completion_tokens=0)
    return RequestOutput(request_id=name, finish_reason=FinishReason.STOP, usage=usage, embeddings=(b"1234",))


@pytest.fixture
def scripted() -> tuple[EngineClient, ScriptedExecutor]:
    host = ScriptedExecutor()
    engine = BlockingEngine(host, queue_size=100)
    engine.start()
    return engine, host


def test_inputs_that_cannot_fit_are_refused_with_both_numbers(
    scripted: tuple[EngineClient, ScriptedExecutor],
) -> None:
    engine, _ = scripted
    with pytest.raises(ContextLengthExceeded, match=r"input 1 has 257 tokens.*256") as refusal:
        engine.submit(call("long", b"short", b"x" * 257), BlockingOutputStream)
    assert (refusal.value.prompt_tokens, refusal.value.limit, refusal.value.field) == (257, 256, "input")
    with pytest.raises(InvalidRequest, match="input 0 is empty"):
        engine.submit(call("empty", b""), BlockingOutputStream)
    engine.submit(call("fits", b"x" * 256), BlockingOutputStream)


def test_embedding_requests_take_no_slots(
    scripted: tuple[EngineClient, ScriptedExecutor],
) -> None:
    engine, host = scripted
    for number in range(MAX_EMBEDDING_REQUESTS + 4):
        engine.submit(call(f"e{number}", b"x"), BlockingOutputStream)
    assert len(host.submitted()) == MAX_EMBEDDING_REQUESTS
    for number in range(6):
        engine.submit(Request(id=f"g{number}", prompt=Prompt((1,)), max_tokens=1), BlockingOutputStream)
    assert host.submitted()[MAX_EMBEDDING_REQUESTS:] == ["g0", "g1", "g2", "g3"]
    host.say(done("e0"))
    assert host.submitted()[-1] == f"e{MAX_EMBEDDING_REQUESTS}"


def test_a_call_survives_the_engines_death(scripted: tuple[EngineClient, ScriptedExecutor]) -> None:
    engine, host = scripted
    stream = engine.submit(call("e0", b"x"), BlockingOutputStream)
    host.die()
    assert host.submitted() == ["e0"], "nothing was sent yet, so it is replayed"
    host.say(done("e0"))
    (delta,) = list(stream)
    assert delta.embeddings == (b"1234",)
    assert engine.requests == ()
    poison = engine.submit(call("poison", b"xyz"), BlockingOutputStream)
    for _ in range(3):
        host.die()
    (delta,) = list(poison)
    assert delta.error is not None and delta.error.code == "poison_request"
    assert delta.usage is not None and delta.usage.prompt_tokens == 3


# Text and numbers ----------------------------------------------------------------------------------


def test_texts_and_pairs_are_tokenised_together_and_bounded() -> None:
    worker = TokenizerWorker(FakeRunner().vocabulary, None)
    answer = worker.perform(TokenizeTexts(("ab", "<|x|>"), max_tokens=5))
    assert answer == TokenLists((tuple(b"ab"), tuple(b"<|x|>")))
    refused = worker.perform(TokenizeTexts(("ab", "abcdef"), max_tokens=5))
    assert isinstance(refused, Failure) and refused.code == "context_length_exceeded"
    assert "input 1 has 6 tokens" in refused.message and "at most 5" in refused.message
    refused = worker.perform(TokenizeTexts(("abcdef",), max_tokens=5, field="content"))
    assert isinstance(refused, Failure) and refused.field == "content" and "content 0" in refused.message
    pairs = worker.perform(TokenizePairs("q", ("a", "bc"), max_tokens=4))
    assert pairs == TokenLists(((113, 257, 97), (113, 257, 98, 99)))
    refused = worker.perform(TokenizePairs("q", ("abc",), max_tokens=4))
    assert isinstance(refused, Failure) and refused.field == "documents"


def test_embeddings_are_cut_then_scaled() -> None:
    data = struct.pack("<4f", 3.0, 4.0, 12.0, 0.0)
    np.testing.assert_allclose(to_vector(data), np.array([3, 4, 12, 0]) / 13, rtol=1e-6)
    np.testing.assert_allclose(to_vector(data, 2), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(to_vector(data, norm=-1), [3, 4, 12, 0])
    np.testing.assert_allclose(to_vector(data, norm=1), np.array([3, 4, 12, 0]) / 19, rtol=1e-6)
    assert to_vector(data, norm=0).max() == 32760
    assert to_vector(bytes(16)).tolist() == [0, 0, 0, 0]
    assert to_vector(data).dtype == np.dtype("<f4")


def test_numbers_of_one_input_leave_turns_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pooling an input has a vector for each token: here 400,000 numbers."""
    data = np.arange(400_000, dtype="<f4").tobytes()
    found = {"use_engine": None, "tokenize_inputs": None, "embed": ([data, data[:4000]], None)}
    for name, value in found.items():
        monkeypatch.setattr(embeddings, name, AsyncMock(return_value=value))
    info = Mock(pooling=Pooling.NONE, vector_length=1000)
    monkeypatch.setattr(embeddings, "loaded", lambda _: (info, None))

    async def answer() -> tuple[bytes, int]:
        task = asyncio.create_task(embeddings.llama_embedding(Mock(), Mock()))
        turns = 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        return msgspec.json.encode(task.result()), turns

    encoded, turns = asyncio.run(answer())
    first, second = (np.array(entry["embedding"]) for entry in msgspec.json.decode(encoded))
    assert (first == np.arange(400_000).reshape(400, 1000)).all() and (second == first[:1]).all()
    assert turns > 10
