"""`LLM` and `AsyncLLM` on a fake runner: what they cancel, how they close, and which input they refuse."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from typing import Any

import pytest

from cllm import LLM, AsyncLLM, SamplingParams
from cllm.backend.base import StepStatus
from cllm.config import EngineConfig
from cllm.errors import DeadlineExceeded, EngineDied, InvalidRequest, ShuttingDown
from cllm.testing import CHAT_TEMPLATE, FakeRunner, FakeVocabulary, ScriptedRunner, say
from tests.driver.server import wait_for

PATIENCE_S = 20.0
CANCELLED_S = 8.0
QUESTION = [{"role": "user", "content": "hi"}]
ENDLESS = SamplingParams(ignore_eos=True, seed=1)


def make_fake(_: EngineConfig) -> FakeRunner:
    return FakeRunner(chat_template=CHAT_TEMPLATE, step_s=0.002)


def make_slow(_: EngineConfig) -> FakeRunner:
    """900 tokens take longer than `CANCELLED_S`."""
    return FakeRunner(chat_template=CHAT_TEMPLATE, step_s=0.02)


class Interrupting(FakeVocabulary):
    """Tokenising the prompt `now` is interrupted, as by Ctrl-C."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        if text == "now":
            raise KeyboardInterrupt
        return super().tokenize(text, add_special=add_special, parse_special=parse_special)


def idle(llm: LLM | AsyncLLM) -> bool:
    return not llm._engine.requests


# A call that raises cancels what it has submitted ----------------------------------------------------


def test_a_prompt_that_is_refused_cancels_the_others() -> None:
    with LLM(make_runner=make_slow) as llm:
        with pytest.raises(InvalidRequest, match="empty"):
            llm.generate(["a", "b", "c", ""], ENDLESS, max_tokens=900)
        wait_for(lambda: idle(llm), CANCELLED_S)


def test_a_prompt_that_fails_cancels_the_others() -> None:
    with LLM(make_runner=make_slow) as llm:
        with pytest.raises(DeadlineExceeded):
            llm.generate(["a"] * 50, ENDLESS, max_tokens=900, timeout=0.05)
        wait_for(lambda: idle(llm), CANCELLED_S)


def test_an_interrupt_while_submitting_cancels_what_is_submitted() -> None:
    def make(_: EngineConfig) -> FakeRunner:
        runner = make_slow(_)
        runner.vocabulary = Interrupting()
        return runner

    with LLM(make_runner=make) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([*["a"] * 200, "now", "b"], ENDLESS, max_tokens=900)
        wait_for(lambda: idle(llm), CANCELLED_S)


@pytest.mark.parametrize("call", ["generate", "chat"])
def test_an_interrupt_at_the_end_of_a_submit_leaves_no_request(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The request is accepted, but its stream never reaches the caller."""
    with LLM(make_runner=make_slow) as llm:
        submit = llm._engine.submit

        def interrupted(*arguments: Any) -> Any:
            submit(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(llm._engine, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            if call == "chat":
                llm.chat(QUESTION, ENDLESS, n=3, max_tokens=900)
            else:
                llm.generate(["a", "b"], ENDLESS, max_tokens=900)
        wait_for(lambda: idle(llm), CANCELLED_S)


def test_ctrl_c_while_reading_cancels_all() -> None:
    timer = threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,))
    with LLM(make_runner=make_slow) as llm:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a"] * 20, ENDLESS, max_tokens=900)
        timer.join(PATIENCE_S)
        wait_for(lambda: idle(llm), CANCELLED_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_moment_of_submitting_leaves_the_engine_whole() -> None:
    """The request table is never left half-changed: all places are free again, each time."""
    drawn = random.Random(2)

    def interrupt(left: threading.Event) -> None:
        time.sleep(drawn.uniform(0, 0.02))
        os.kill(os.getpid(), signal.SIGINT)
        while not left.wait(0.5):  # Python loses one that comes in a finaliser
            os.kill(os.getpid(), signal.SIGINT)

    with LLM(make_runner=lambda _: FakeRunner(sequences=2, step_s=0.01)) as llm:
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
            assert llm._engine._queue.waiting == (0, 0) and not llm._engine._queue._engine
            assert len(llm.generate(["b"] * 4, max_tokens=1)) == 4


def test_an_async_prompt_that_is_refused_cancels_the_others() -> None:
    async def use() -> None:
        async with AsyncLLM(make_runner=make_slow) as llm:
            with pytest.raises(InvalidRequest, match="empty"):
                await llm.generate(["a", "b", "", "c"], ENDLESS, max_tokens=900)
            assert len(asyncio.all_tasks()) == 1, "no call goes on in the background"
            await asyncio.to_thread(wait_for, lambda: idle(llm), CANCELLED_S)

    asyncio.run(use())


# Closing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", [False, True])
def test_closing_an_async_model_ends_its_streams_on_the_loop(debug: bool) -> None:
    async def use() -> None:
        llm = AsyncLLM(make_runner=make_fake)
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


def test_a_long_text_does_not_hold_up_the_event_loop() -> None:
    begun, release = threading.Event(), threading.Event()

    class Slow(FakeVocabulary):
        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            if text == "long":
                begun.set()
                assert release.wait(PATIENCE_S)
            return super().tokenize(text, add_special=add_special, parse_special=parse_special)

    def make(_: EngineConfig) -> FakeRunner:
        runner = FakeRunner()
        runner.vocabulary = Slow()
        return runner

    async def use() -> None:
        async with asyncio.timeout(PATIENCE_S), AsyncLLM(make_runner=make) as llm:
            long = asyncio.create_task(llm.generate("long", max_tokens=2))
            embedding = asyncio.create_task(llm.embed("short"))
            while not begun.is_set():  # the loop runs
                await asyncio.sleep(0.001)
            assert await llm.generate("short", max_tokens=2), "nor other texts"
            await embedding
            assert not long.done()
            closing = asyncio.create_task(llm.close())
            await asyncio.sleep(0.02)
            assert not closing.done(), "the vocabulary is being read"
            release.set()
            await closing
            with pytest.raises(ShuttingDown):
                await long

    asyncio.run(use())


def test_an_engine_that_has_died_says_so_each_time() -> None:
    def fail(_: int, name: str) -> StepStatus | None:
        return StepStatus.FAILED if name == "collect" else None

    with LLM(make_runner=lambda _: FakeRunner(fail=fail)) as llm:
        for call in (llm.generate, llm.generate, llm.embed):
            with pytest.raises(EngineDied):
                call("x")


# Input -----------------------------------------------------------------------------------------------


def test_a_stop_text_is_one_text() -> None:
    with LLM(make_runner=lambda _: ScriptedRunner()) as llm:
        prompt = say("8, 9, 10, 11")
        assert llm.generate(prompt, stop="9, 10")[0].text == "8, "
        assert llm.generate(prompt, stop=["9, 10", "x"])[0].text == "8, "
        assert "".join(llm.stream(prompt, stop="9, 10")) == "8, "
        assert llm.generate(prompt, stop=None)[0].text == "8, 9, 10, 11"


def test_without_a_seed_each_prompt_draws_its_own() -> None:
    warm, seeded = SamplingParams(temperature=1), SamplingParams(temperature=1, seed=5)
    with LLM(make_runner=make_fake) as llm:
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
        ({"sampling": SamplingParams(temperature=-1)}, "temperature is -1: expected `float` >= 0.0"),
        ({"sampling": SamplingParams(top_p=2)}, "top_p is 2: expected `float` <= 1.0"),
        ({"sampling": SamplingParams(min_p=float("nan"))}, "min_p is nan: expected a finite number"),
        ({"sampling": SamplingParams(dry_base=float("inf"))}, "dry_base is inf: expected a finite number"),
        ({"sampling": SamplingParams(top_k=1.5)}, "top_k is 1.5: expected `int`, got `float`"),  # type: ignore[arg-type]
        ({"sampling": SamplingParams(seed=-1)}, "seed is -1: expected `int` >= 0"),
        (
            {"sampling": SamplingParams(logit_bias=((1, float("nan")),))},
            "logit_bias is ((1, nan),): expected",
        ),
        (
            {"sampling": SamplingParams(logit_bias=((300, 1.0),))},
            "logit_bias: 300 is not a token id (0 to 257)",
        ),
        ({"max_tokens": 0}, "max_tokens is 0: expected `int` >= 1"),
        ({"max_tokens": None}, "max_tokens is None: expected `int`, got `null`"),
        ({"stop": [""]}, "stop is ['']: expected `str` of length >= 1"),
        ({"stop": 5}, "stop is 5: expected `array`, got `int`"),
        ({"timeout": 0}, "timeout is 0: expected `float` > 0.0"),
        ({"timeout": float("nan")}, "timeout is nan: expected a finite number"),
        ({"timeout": float("inf")}, "timeout is inf: expected a finite number"),
    ],
)
def test_wrong_values_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    field = message.split()[0].rstrip(":")
    with LLM(make_runner=make_fake) as llm:
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
    with LLM(make_runner=make_fake) as llm, pytest.raises(InvalidRequest) as refusal:
        llm.chat(QUESTION, **given)
    assert refusal.value.field == list(given)[-1]


def test_unknown_options_are_refused_with_the_one_that_was_meant() -> None:
    with LLM(make_runner=make_fake) as llm:
        for call in (llm.generate, llm.stream):
            with pytest.raises(TypeError, match=r"'max_token' \(did you mean 'max_tokens'\?\)"):
                call("x", max_token=3)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="SamplingParams"):
            llm.generate("x", {"temperature": 0})  # type: ignore[arg-type]


def test_texts_that_are_none_are_refused() -> None:
    with LLM(make_runner=make_fake) as llm:
        for prompts in ([b"x"], [1, 2]):
            with pytest.raises(InvalidRequest, match="prompts: expected a text"):
                llm.generate(prompts)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="lone surrogate"):
            llm.generate("\ud800")


def test_numbers_of_numpy_are_numbers() -> None:
    import numpy as np

    sampling = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint32(7))  # type: ignore[arg-type]
    with LLM(make_runner=make_fake) as llm:
        (answer,) = llm.generate("x", sampling, max_tokens=np.int32(4))  # type: ignore[arg-type]
        assert answer.text == llm.generate("x", SamplingParams(seed=7), max_tokens=4)[0].text
