"""`LLM` and `AsyncLLM` on the embedded model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cllm import LLM, AsyncLLM, SamplingParams
from cllm.errors import ContextLengthExceeded, EngineNotReady, InvalidRequest, ModelFileError
from cllm.testing import FakeRunner
from cllm.types import FinishReason
from tests.driver.server import environment

GREEDY = SamplingParams(temperature=0)
PROMPTS = ["1, 2, 3, 4,", "Once upon a time", "The capital of France is"]
QUESTION = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(parallel=4, ctx_size=4096, threads=1) as opened:
        yield opened


def test_several_prompts_are_answered_in_order(llm: LLM) -> None:
    answers = llm.generate(PROMPTS, GREEDY, max_tokens=8)
    assert len(answers) == 3
    assert " 5" in answers[0].text and "Paris" in answers[2].text
    for answer in answers:
        assert len(answer.tokens) == answer.usage.completion_tokens == 8
        assert answer.finish_reason is FinishReason.LENGTH
    (single,) = llm.generate(PROMPTS[1], GREEDY, max_tokens=8)
    assert single.text


def test_the_pieces_of_a_stream_are_the_answer(llm: LLM) -> None:
    (answer,) = llm.generate(PROMPTS[0], GREEDY, max_tokens=12)
    pieces = list(llm.stream(PROMPTS[0], GREEDY, max_tokens=12))
    assert "".join(pieces) == answer.text


def test_chat_uses_the_models_template(llm: LLM) -> None:
    answer = llm.chat(QUESTION, GREEDY, max_tokens=16)
    assert "hello" in answer.text.lower()
    assert answer.usage.prompt_tokens > 10
    assert "".join(llm.stream(QUESTION, GREEDY, max_tokens=16)) == answer.text


def test_a_stop_string_ends_the_answer(llm: LLM) -> None:
    (answer,) = llm.generate(PROMPTS[0], GREEDY, max_tokens=64, stop=[" 9"])
    assert answer.finish_reason is FinishReason.STOP
    assert answer.text.endswith(" 8,")


def test_the_same_seed_gives_the_same_text(llm: LLM) -> None:
    sampling = SamplingParams(temperature=1.0, seed=11)
    texts = {llm.generate(PROMPTS[1], sampling, max_tokens=12)[0].text for _ in range(3)}
    assert len(texts) == 1


def test_leaving_a_stream_cancels_it(llm: LLM) -> None:
    for _ in range(10):  # more than there are sequences: a leak would block the last
        stream = llm.stream(PROMPTS[1], GREEDY, max_tokens=900)
        next(iter(stream))
        del stream
    assert llm.generate(PROMPTS[0], GREEDY, max_tokens=2)[0].text


def test_bad_requests_raise(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        llm.generate("", GREEDY)
    with pytest.raises(ContextLengthExceeded) as caught:
        llm.generate("word " * 5000, GREEDY)
    assert "5001" in str(caught.value) and "1024" in str(caught.value)
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_no_tokens_at_all_cannot_be_asked_for(llm: LLM, max_tokens: int) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        llm.generate(PROMPTS[0], GREEDY, max_tokens=max_tokens)


def test_an_empty_stop_string_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="stop"):
        llm.generate(PROMPTS[0], GREEDY, max_tokens=4, stop=[""])


def test_a_missing_model_raises_at_once(tmp_path: Path) -> None:
    for kind in (LLM, AsyncLLM):
        with pytest.raises(ModelFileError, match="no model file"):
            kind(tmp_path / "none.gguf")


def test_a_model_that_is_not_open_yet_says_so() -> None:
    with pytest.raises(EngineNotReady, match="open it first"):
        LLM(make_runner=lambda _: FakeRunner()).info  # noqa: B018


def test_closing_twice_is_fine(tiny_model: Path) -> None:
    with LLM(tiny_model, parallel=1, ctx_size=512, threads=1) as tiny:
        assert tiny.generate("x", GREEDY, max_tokens=2)[0].tokens
        tiny.close()


CLOSED = """
import sys
from cllm import LLM, SamplingParams
from cllm.errors import ShuttingDown
with LLM(sys.argv[1], parallel=1, ctx_size=512, threads=1) as llm:
    pass
for use in (llm.generate, lambda prompt: next(iter(llm.stream(prompt)))):
    try:
        use("x")
    except ShuttingDown:
        print("closed")
"""


def test_a_closed_model_says_so(tiny_model: Path) -> None:
    """In a process of its own: its memory is freed, and a use of it would be the end of that process."""
    done = subprocess.run(
        [sys.executable, "-c", CLOSED, str(tiny_model)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert (done.returncode, done.stdout.split()) == (0, ["closed", "closed"]), done.stderr


def test_async_has_the_same_names_and_answers(llm: LLM) -> None:
    (alone,) = llm.generate(PROMPTS[0], GREEDY, max_tokens=12)
    said = llm.chat(QUESTION, GREEDY, max_tokens=12)

    async def use() -> None:
        async with AsyncLLM(parallel=4, ctx_size=4096, threads=1) as model:
            answers = await model.generate(PROMPTS, GREEDY, max_tokens=4)
            assert [len(answer.tokens) for answer in answers] == [4, 4, 4]
            pieces = [piece async for piece in model.stream(PROMPTS[0], GREEDY, max_tokens=12)]
            assert "".join(pieces) == alone.text
            assert (await model.chat(QUESTION, GREEDY, max_tokens=12)).text == said.text
            together = await asyncio.gather(
                *(model.generate(prompt, GREEDY, max_tokens=4) for prompt in PROMPTS)
            )
            assert len(together) == 3
            with pytest.raises(InvalidRequest):
                await model.generate("", GREEDY)

    asyncio.run(use())


def test_a_cancelled_async_call_frees_its_sequence(tiny_model: Path) -> None:
    async def use() -> None:
        async with AsyncLLM(tiny_model, parallel=1, ctx_size=4096, threads=1) as model:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await model.generate("for ever", GREEDY, max_tokens=4000)
            (answer,) = await model.generate("next", GREEDY, max_tokens=2)
            assert len(answer.tokens) == 2

    asyncio.run(use())
