"""`LLM` and `AsyncLLM` over a fake runner: what they cancel, how they open and close, what they refuse."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from cllm import LLM, AsyncLLM, SamplingParams
from cllm.config import EngineConfig
from cllm.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineNotReady,
    InvalidRequest,
    ModelFileError,
    ShuttingDown,
)
from cllm.frontend import async_calls
from cllm.frontend.engine_client import EngineClient
from cllm.testing import CHAT_TEMPLATE, ScriptedRunner, say
from cllm.types import SamplingOptions
from tests.driver.fake_runner import FakeRunner
from tests.driver.server import wait_for
from tests.driver.thread_engine import make_llm

PATIENCE_S = 20.0
CANCELLED_S = 8.0
QUESTION = [{"role": "user", "content": "hi"}]
ENDLESS = SamplingParams(ignore_eos=True, seed=1)


def make_fake(_: EngineConfig) -> FakeRunner:
    return FakeRunner(chat_template=CHAT_TEMPLATE, step_s=0.002)


def make_slow(_: EngineConfig) -> FakeRunner:
    """900 tokens take longer than `CANCELLED_S`."""
    return FakeRunner(chat_template=CHAT_TEMPLATE, step_s=0.02)


@pytest.fixture
def slow_llm() -> Iterator[LLM]:
    with make_llm(LLM, make_slow) as opened:
        yield opened


def idle(llm: LLM | AsyncLLM) -> bool:
    return not (llm._model if isinstance(llm, LLM) else llm)._engine.requests


# A call that raises cancels what it has submitted ----------------------------------------------------


def test_a_prompt_that_is_refused_cancels_the_others(slow_llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        slow_llm.generate(["a", "b", "c", ""], ENDLESS, max_tokens=900)
    wait_for(lambda: idle(slow_llm), CANCELLED_S)


def test_a_prompt_that_fails_cancels_the_others(slow_llm: LLM) -> None:
    with pytest.raises(DeadlineExceeded):
        slow_llm.generate(["a"] * 50, ENDLESS, max_tokens=900, timeout=0.05)
    wait_for(lambda: idle(slow_llm), CANCELLED_S)


@pytest.mark.parametrize("call", ["generate", "chat", "stream"])
def test_ctrl_c_while_reading_cancels_all(slow_llm: LLM, call: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: slow_llm.generate(["a"] * 20, ENDLESS, max_tokens=900),
        "chat": lambda: slow_llm.chat(QUESTION, ENDLESS, n=3, max_tokens=900),
        "stream": lambda: list(slow_llm.stream("a", ENDLESS, max_tokens=900)),
    }
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    timer.join(PATIENCE_S)
    wait_for(lambda: idle(slow_llm), CANCELLED_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_moment_of_a_call_leaves_no_request() -> None:
    drawn = random.Random(2)

    def interrupt(left: threading.Event) -> None:
        time.sleep(drawn.uniform(0, 0.02))
        os.kill(os.getpid(), signal.SIGINT)
        while not left.wait(0.5):  # Python loses one that comes in a finaliser
            os.kill(os.getpid(), signal.SIGINT)

    with make_llm(LLM, lambda _: FakeRunner(sequences=2, step_s=0.01)) as llm:
        for _ in range(15):
            left = threading.Event()
            thread = threading.Thread(target=interrupt, args=(left,))
            try:
                with pytest.raises(KeyboardInterrupt):
                    thread.start()
                    llm.generate(["a"] * 2000, ENDLESS, max_tokens=900)
            finally:
                left.set()
                thread.join(PATIENCE_S)
            wait_for(lambda: idle(llm), CANCELLED_S)
            queue = llm._model._engine._queue
            assert queue.waiting == (0, 0) and not queue._engine
            assert len(llm.generate(["b"] * 4, max_tokens=1)) == 4


def test_a_dropped_stream_is_cancelled(slow_llm: LLM) -> None:
    for stream in (
        slow_llm.stream("a", ENDLESS, max_tokens=900),
        slow_llm.chat(QUESTION, ENDLESS, n=2, max_tokens=900, stream=True),
    ):
        next(iter(stream))
        assert not idle(slow_llm)
    del stream
    wait_for(lambda: idle(slow_llm), CANCELLED_S)


def test_a_reader_that_is_slow_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineClient, "unread_limit", 100)  # of a server, which would end its stream
    with make_llm(LLM, make_fake) as llm:
        stream = llm.stream("a", ENDLESS, max_tokens=200)
        first = next(stream)
        wait_for(lambda: idle(llm), PATIENCE_S)
        assert len(first + "".join(stream)) == 200


# Opening and closing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", [False, True])
def test_closing_an_async_model_ends_its_streams_on_the_loop(debug: bool) -> None:
    async def use() -> None:
        llm = make_llm(AsyncLLM, make_fake)
        await llm.__aenter__()
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in llm.stream("hello", ENDLESS, max_tokens=900):
                begun.set()

        readers = [asyncio.create_task(read()) for _ in range(3)]
        waiting = asyncio.create_task(llm.generate(["a"] * 20, ENDLESS, max_tokens=900))
        async with asyncio.timeout(PATIENCE_S):
            await begun.wait()
            await llm.close()
            ends = await asyncio.gather(*readers, waiting, return_exceptions=True)
        assert [type(end) for end in ends] == [ShuttingDown] * 4
        assert str(ends[0]) == "the model was closed"

    asyncio.run(use(), debug=debug)


def test_closing_ends_the_calls_of_other_threads() -> None:
    with make_llm(LLM, make_slow) as llm:
        calls: list[Callable[[], object]] = [
            lambda: llm.generate(["a"] * 20, ENDLESS, max_tokens=900),
            lambda: list(llm.stream("a", ENDLESS, max_tokens=900)),
        ]
        running = [run(call) for call in calls]
        wait_for(lambda: not idle(llm), PATIENCE_S)
        llm.close()
        assert all(isinstance(call.exception(PATIENCE_S), ShuttingDown) for call in running)


class SlowLoad:
    """A runner that takes until `finish` to load, and cannot be interrupted."""

    def __init__(self) -> None:
        self.begun, self.finish = threading.Event(), threading.Event()

    def __call__(self, _: EngineConfig) -> FakeRunner:
        self.begun.set()
        assert self.finish.wait(PATIENCE_S)
        return FakeRunner()


@pytest.fixture
def slow() -> Iterator[SlowLoad]:
    load = SlowLoad()
    yield load
    load.finish.set()


def run(call: Callable[[], object]) -> Future[object]:
    """Call it in a thread."""
    return ThreadPoolExecutor(1).submit(call)


def test_a_model_can_be_closed_while_it_loads(slow: SlowLoad) -> None:
    llm = make_llm(LLM, slow)
    opener = run(llm.__enter__)
    assert slow.begun.wait(PATIENCE_S)
    caller = run(lambda: llm.generate("x"))
    closer = run(llm.close)
    wait_for(lambda: llm._model._closed, PATIENCE_S)
    slow.finish.set()
    closer.result(PATIENCE_S)
    for waiting in (opener, caller):
        assert isinstance(waiting.exception(PATIENCE_S), ShuttingDown)


def test_threads_that_use_a_model_first_wait_for_one_loading(slow: SlowLoad) -> None:
    llm = make_llm(LLM, slow)
    callers = [run(lambda: llm.generate("x", max_tokens=2)) for _ in range(4)]
    assert slow.begun.wait(PATIENCE_S)
    slow.finish.set()
    answers = [caller.result(PATIENCE_S) for caller in callers]
    llm.close()
    assert len(answers) == 4


async def test_a_cancelled_opening_closes_what_it_began(
    slow: SlowLoad, caplog: pytest.LogCaptureFixture
) -> None:
    asyncio.get_running_loop().call_later(0.1, slow.finish.set)
    llm = make_llm(AsyncLLM, slow)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), llm:
            raise AssertionError("it is not loaded")
    with pytest.raises(ShuttingDown, match="closed"):
        await llm.generate("x")
    del llm
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_cancelled_first_call_leaves_the_model_to_the_next(slow: SlowLoad) -> None:
    llm = make_llm(AsyncLLM, slow)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(llm.generate("x"), 0.05)
    slow.finish.set()
    assert await llm.generate("x", max_tokens=2)
    await llm.close()


async def test_a_failed_load_reaches_the_call_after_a_cancelled_one(slow: SlowLoad) -> None:
    def fail(config: EngineConfig) -> FakeRunner:
        slow(config)
        raise ModelFileError("no such file")

    llm = make_llm(AsyncLLM, fail)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(llm.open(), 0.05)
    slow.finish.set()
    for call in (asyncio.wrap_future(llm._engine.loaded), llm.generate("x")):
        with pytest.raises(ModelFileError, match="no such file"):
            await call


def test_threads_share_one_event_loop_from_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    both, make = threading.Barrier(2), asyncio.new_event_loop

    def make_slowly() -> asyncio.AbstractEventLoop:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.1)  # without a lock, the other thread comes here, too
        return make()

    async_calls._LOOPS.clear()
    monkeypatch.setattr(asyncio, "new_event_loop", make_slowly)
    models = [make_llm(LLM, make_fake) for _ in range(2)]
    for opening in [run(llm.open) for llm in models]:
        opening.result(PATIENCE_S)
    assert models[0]._model._loop is models[1]._model._loop
    for llm in models:
        llm.close()


def test_a_model_is_opened_once_however_often_it_is_entered() -> None:
    loaded: list[EngineConfig] = []

    def make(config: EngineConfig) -> FakeRunner:
        loaded.append(config)
        return make_fake(config)

    llm = make_llm(LLM, make)
    assert llm.generate("hello", max_tokens=2)
    with llm as entered:
        assert entered.open() is llm and llm.generate("hello", max_tokens=2)
    assert len(loaded) == 1
    with pytest.raises(ShuttingDown, match="this model is closed"):
        llm.__enter__()


def test_a_model_of_one_event_loop_is_refused_on_another() -> None:
    llm = make_llm(AsyncLLM, make_fake)

    async def use() -> None:
        assert await llm.generate("x", max_tokens=2)

    with asyncio.Runner() as runner:
        runner.run(use())
        with asyncio.Runner() as other, pytest.raises(EngineNotReady, match="another event loop"):
            other.run(use())
        runner.run(llm.close())


def test_a_loading_that_fails_leaves_nothing_open() -> None:
    def fail(_: EngineConfig) -> FakeRunner:
        raise ModelFileError("no such file")

    llm = make_llm(LLM, fail)
    with pytest.raises(ModelFileError, match="no such file"):
        llm.__enter__()
    with pytest.raises(ShuttingDown, match="closed"):
        llm.generate("x")


USES: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate("x"),
    "no prompts": lambda llm: llm.generate([]),
    "chat": lambda llm: llm.chat(QUESTION),
    "chat stream": lambda llm: llm.chat(QUESTION, stream=True),
    "stream": lambda llm: llm.stream("x"),
    "stream of a chat": lambda llm: llm.stream(QUESTION),
    "embed": lambda llm: llm.embed("x"),
    "no texts": lambda llm: llm.embed([]),
    "info": lambda llm: llm.info,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_opens_the_model_and_says_when_it_is_closed(use: Callable[[LLM], Any]) -> None:
    llm = make_llm(LLM, make_fake)
    try:
        use(llm)
    finally:
        llm.close()
    for closed in (llm, make_llm(LLM, make_fake)):
        closed.close()
        with pytest.raises(ShuttingDown, match="this model is closed"):
            use(closed)


def test_every_use_opens_an_async_model() -> None:
    async def use(call: Callable[[AsyncLLM], Any]) -> None:
        llm = make_llm(AsyncLLM, make_fake)
        with pytest.raises(EngineNotReady, match=r"open it first: `await llm\.open\(\)`"):
            _ = llm.info
        made = call(llm)
        if hasattr(made, "__anext__"):
            assert [piece async for piece in made]
        else:
            assert await made
        assert llm.info.name
        await llm.close()

    for call in (
        lambda llm: llm.generate("x", max_tokens=2),
        lambda llm: llm.chat("x", max_tokens=2),
        lambda llm: llm.chat("x", max_tokens=8, temperature=0, ignore_eos=True, stream=True),
        lambda llm: llm.stream("x", max_tokens=8, temperature=0, ignore_eos=True),
        lambda llm: llm.stream(QUESTION, max_tokens=8, temperature=0, ignore_eos=True),
        lambda llm: llm.embed("x"),
    ):
        asyncio.run(use(call))


def test_a_stream_that_was_made_before_closing_says_so() -> None:
    with make_llm(LLM, make_fake) as llm:
        pieces, chunks = llm.stream("x"), llm.chat(QUESTION, stream=True)
    for late in (pieces, chunks):
        with pytest.raises(ShuttingDown, match="this model is closed"):
            next(iter(late))


# Settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("parallel", -1, "parallel is -1: expected a whole number of at least 0"),
        ("parallel", "4", "parallel is '4': expected a whole number, not a text"),
        ("ctx_size", -5, "ctx_size is -5: expected a whole number of at least 0"),
        ("batch_tokens", 0, "batch_tokens is 0: expected a whole number of at least 32"),
        ("cache_type_k", "nope", "cache_type_k is 'nope': expected one of f32, f16, bf16"),
    ],
)
def test_a_setting_out_of_bounds_is_refused_by_name(setting: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_llm(LLM, make_fake, **{setting: value})
    assert refusal.value.message.startswith(message)
    with pytest.raises(ConfigError):
        make_llm(AsyncLLM, make_fake, config=EngineConfig(**{setting: value}))


def test_an_unknown_setting_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(TypeError, match=r"'paralel' \(did you mean 'parallel'\?\)"):
        make_llm(LLM, make_fake, paralel=2)


def test_the_model_of_a_configuration_counts_unless_another_is_given() -> None:
    asked: list[str] = []

    def make(config: EngineConfig) -> FakeRunner:
        asked.append(config.model)
        return FakeRunner()

    for more in ({}, {"model": "other.gguf"}):
        with make_llm(LLM, make, config=EngineConfig(model="own.gguf"), **more):
            pass
    assert asked == ["own.gguf", "other.gguf"]


# Input -----------------------------------------------------------------------------------------------


def test_a_stop_text_is_one_text() -> None:
    with make_llm(LLM, lambda _: ScriptedRunner()) as llm:
        prompt = say("8, 9, 10, 11")
        assert llm.generate(prompt, stop="9, 10")[0].text == "8, "
        assert llm.generate(prompt, stop=["9, 10", "x"])[0].text == "8, "
        assert "".join(llm.stream(prompt, stop="9, 10")) == "8, "
        assert llm.generate(prompt, stop=None)[0].text == "8, 9, 10, 11"


def test_fields_of_sampling_are_options() -> None:
    assert SamplingOptions.__annotations__.keys() == set(SamplingParams.__struct_fields__)
    with make_llm(LLM, make_fake) as llm:
        seeded = SamplingParams(temperature=1, seed=5)
        (wanted,) = llm.generate("x", seeded, max_tokens=12)
        (same,) = llm.generate("x", temperature=1, seed=5, max_tokens=12)
        (merged,) = llm.generate("x", SamplingParams(temperature=1, seed=6), seed=5, max_tokens=12)
        assert wanted.text == same.text == merged.text
        assert "".join(llm.stream("x", temperature=1, seed=5, max_tokens=12)) == wanted.text
        reply = llm.chat(QUESTION, seeded, max_tokens=12)
        assert reply.text == llm.chat(QUESTION, temperature=1, seed=5, max_tokens=12).text
        with pytest.raises(InvalidRequest, match="temperature is -1"):
            llm.generate("x", temperature=-1)


def test_a_text_is_a_message_of_the_user() -> None:
    with make_llm(LLM, make_fake) as llm:
        assert llm.chat("hi", seed=1).text == llm.chat(QUESTION, seed=1).text


def test_without_a_seed_each_prompt_draws_its_own() -> None:
    warm, seeded = SamplingParams(temperature=1), SamplingParams(temperature=1, seed=5)
    with make_llm(LLM, make_fake) as llm:
        for sampling in (None, warm):
            texts = {answer.text for answer in llm.generate(["x"] * 6, sampling, max_tokens=12)}
            assert len(texts) > 3
            reply = llm.chat(QUESTION, sampling, n=4, max_tokens=12)
            assert len({choice.text for choice in reply.choices}) > 1
        assert len({answer.text for answer in llm.generate(["x"] * 6, seeded, max_tokens=12)}) == 1
        first, again = (llm.chat(QUESTION, seeded, n=3, max_tokens=12).choices for _ in range(2))
        assert [choice.text for choice in first] == [choice.text for choice in again]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sampling": SamplingParams(temperature=-1)}, "temperature is -1: expected a number of at least 0"),
        ({"sampling": SamplingParams(top_p=2)}, "top_p is 2: expected a number of at most 1"),
        ({"sampling": SamplingParams(min_p=float("nan"))}, "min_p is nan: expected a finite number"),
        ({"sampling": SamplingParams(dry_base=float("inf"))}, "dry_base is inf: expected a finite number"),
        ({"sampling": SamplingParams(top_k=1.5)}, "top_k is 1.5: expected a whole number, not a number"),  # type: ignore[arg-type]
        ({"sampling": SamplingParams(seed=-1)}, "seed is -1: expected a whole number of at least 0"),
        (
            {"sampling": SamplingParams(logit_bias=((1, float("nan")),))},
            "logit_bias is ((1, nan),): expected",
        ),
        (
            {"sampling": SamplingParams(logit_bias=((300, 1.0),))},
            "logit_bias: 300 is not a token id (0 to 257)",
        ),
        *(({"max_tokens": each}, "max_tokens: expected `int` >= 1") for each in (0, -1, None)),
        ({"max_tokens": 1.5}, "max_tokens: expected `int | null`, got `float`"),
        ({"stop": 5}, "stop: expected `str | array | null`, got `int`"),
        ({"timeout": 0}, "timeout: expected `float` >= 0.001"),
        ({"timeout": float("nan")}, "timeout: expected `float` >= 0.001"),
        ({"timeout": float("inf")}, "timeout: expected `float` <= 86400.0"),
    ],
)
def test_wrong_values_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    field = re.split(r"\W", message)[0]
    with make_llm(LLM, make_fake) as llm:
        for call in (llm.generate, llm.stream):
            with pytest.raises(InvalidRequest) as refusal:
                call("x", **given)
            assert (refusal.value.field, refusal.value.message[: len(message)]) == (field, message)
        with pytest.raises(InvalidRequest) as refusal:
            llm.chat(QUESTION, **given)
        assert refusal.value.field == field


@pytest.mark.parametrize(
    "given", [{"n": 0}, {"n": 65}, {"logprobs": 3}, {"logprobs": True, "top_logprobs": 21}, {"n": True}]
)
def test_wrong_options_of_a_chat_are_refused_by_name(given: dict[str, Any]) -> None:
    with make_llm(LLM, make_fake) as llm, pytest.raises(InvalidRequest) as refusal:
        llm.chat(QUESTION, **given)
    assert refusal.value.field == list(given)[-1]


def test_unknown_options_are_refused_with_the_one_that_was_meant() -> None:
    with make_llm(LLM, make_fake) as llm:
        for call in (llm.generate, llm.stream):
            with pytest.raises(TypeError, match=r"'max_token' \(did you mean 'max_tokens'\?\)"):
                call("x", max_token=3)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="sampling must be SamplingParams, not dict: write temperature=0"):
            llm.generate("x", {"temperature": 0})  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"'sampling_params' \(did you mean 'sampling'\?\)"):
            llm.generate("x", sampling_params=ENDLESS)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"'temprature' \(did you mean 'temperature'\?\)"):
            llm.chat("x", temprature=0)  # type: ignore[call-overload]


def test_texts_that_are_none_are_refused() -> None:
    with make_llm(LLM, make_fake) as llm:
        for prompts in ([b"x"], [1, 2], None, 5, b"x"):
            with pytest.raises(InvalidRequest, match=r"prompts: expected a text or a sequence of texts$"):
                llm.generate(prompts)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="`chat` takes messages"):
            llm.generate(QUESTION)  # type: ignore[arg-type]
        for messages in (["hi"], QUESTION[0], 5, None):
            with pytest.raises(InvalidRequest, match=r'expected a text, or a list of messages: .*"role"'):
                llm.chat(messages)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="lone surrogate"):
            llm.generate("\ud800")


def test_numbers_of_numpy_are_numbers() -> None:
    import numpy as np

    sampling = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint32(7))  # type: ignore[arg-type]
    with make_llm(LLM, make_fake) as llm:
        (answer,) = llm.generate("x", sampling, max_tokens=np.int32(4))  # type: ignore[arg-type]
        assert answer.text == llm.generate("x", SamplingParams(seed=7), max_tokens=4)[0].text
