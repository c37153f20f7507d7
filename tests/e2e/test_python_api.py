"""`LLM` and `AsyncLLM`, on a tiny model whose greedy text is the same on every CPU."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cllm import LLM, AsyncLLM, SamplingParams
from cllm.errors import ContextLengthExceeded, InvalidRequest, ModelFileError
from cllm.models.store import embedded_model
from cllm.types import FinishReason
from tests.driver.server import Server
from tests.tiny_models import END_OF_TEXT

GREEDY = SamplingParams(temperature=0)
ENDING = SamplingParams(temperature=0, logit_bias=((END_OF_TEXT, 100.0),))  # wants to end at once
EXACT: dict[str, Any] = {"flash_attention": False, "cache_type_k": "f32", "cache_type_v": "f32"}
PROMPTS = ["1, 2, 3, 4,", "Once upon a time", "The capital of France is"]
QUESTION = [{"role": "user", "content": "Say hello."}]
TEMPLATE = "<|im_start|>{role}\n{content}<|im_end|>\n"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "now"}}
FORCED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    """Greedy, it never ends by itself."""
    with LLM(tiny_model, parallel=4, ctx_size=4096, threads=1, **EXACT) as opened:
        yield opened


def test_generate_keeps_the_order_of_prompts(llm: LLM) -> None:
    answers = llm.generate(PROMPTS, GREEDY, max_tokens=8)
    assert len({answer.text for answer in answers}) == 3
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer.tokens) == answer.usage.completion_tokens == 8
        assert answer.finish_reason is FinishReason.LENGTH
        (alone,) = llm.generate(prompt, GREEDY, max_tokens=8)
        assert alone.text == answer.text


def test_generate_without_a_model_uses_the_embedded_one() -> None:
    with LLM(parallel=1, ctx_size=512, threads=1) as opened:
        assert opened.info.name == embedded_model().stem
        (answer,) = opened.generate(PROMPTS[0], SamplingParams(ignore_eos=True), max_tokens=4)
        reply = opened.chat(QUESTION, SamplingParams(ignore_eos=True), max_tokens=4)
    assert len(answer.tokens) == len(reply.tokens) == 4


def test_the_pieces_of_a_stream_are_the_answer(llm: LLM) -> None:
    (answer,) = llm.generate(PROMPTS[0], GREEDY, max_tokens=12)
    pieces = list(llm.stream(PROMPTS[0], GREEDY, max_tokens=12))
    assert "".join(pieces) == answer.text


def test_chat_uses_the_chat_template(llm: LLM, tiny: Server) -> None:
    answer = llm.chat(QUESTION, GREEDY, max_tokens=16)
    body = {"messages": QUESTION, "max_tokens": 16, "temperature": 0}
    served = tiny.post("/v1/chat/completions", body).json()
    assert answer.text == served["choices"][0]["message"]["content"] != ""
    assert answer.usage.prompt_tokens == served["usage"]["prompt_tokens"] > len(QUESTION[0]["content"])
    assert "".join(llm.stream(QUESTION, GREEDY, max_tokens=16)) == answer.text


def test_a_required_call_is_made_and_parsed(llm: LLM) -> None:
    reply = llm.chat(QUESTION, GREEDY, tools=[WEATHER, CLOCK], tool_choice=FORCED, max_tokens=256)
    (call,) = reply.tool_calls
    assert call.name == "get_weather" and call.id.startswith("call_")
    assert set(json.loads(call.arguments)) == {"city"}
    assert reply.text == "" and reply.finish_reason is FinishReason.STOP
    required = llm.chat(QUESTION, GREEDY, tools=[CLOCK], tool_choice="required", max_tokens=256)
    assert required.tool_calls[0].name == "now" and json.loads(required.tool_calls[0].arguments) == {}
    forbidden = llm.chat(QUESTION, GREEDY, tools=[WEATHER], tool_choice="none", max_tokens=8)
    assert forbidden.tool_calls == () and forbidden.text == llm.chat(QUESTION, GREEDY, max_tokens=8).text


def test_a_call_and_its_result_can_be_sent_back(llm: LLM) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "What time is it?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    reply = llm.chat(talk, GREEDY, tools=[CLOCK], max_tokens=16)
    assert reply.usage.prompt_tokens > llm.chat(talk[:1], GREEDY, max_tokens=1).usage.prompt_tokens


def test_the_chunks_of_a_chat_add_up_to_its_reply(llm: LLM) -> None:
    long = 300  # tokens: so many that they are not read all at once
    whole = llm.chat(QUESTION, GREEDY, max_tokens=long)
    *chunks, last = llm.chat(QUESTION, GREEDY, max_tokens=long, stream=True)
    assert len(chunks) > 1 and not any(chunk.reply for chunk in chunks)
    assert last.reply is not None and last.reply.text == "".join(chunk.text for chunk in chunks) == whole.text
    assert last.reply.tokens == whole.tokens and last.reply.finish_reason is whole.finish_reason
    forced: dict[str, Any] = {"tools": [WEATHER], "tool_choice": FORCED, "max_tokens": 256}
    *chunks, last = llm.chat(QUESTION, GREEDY, stream=True, **forced)
    pieces = [chunk.tool_call for chunk in chunks if chunk.tool_call is not None]
    assert last.reply is not None and len(pieces) == len(chunks) > 0
    (call,) = last.reply.tool_calls
    assert {(piece.id, piece.name) for piece in pieces} == {(call.id, call.name)}
    assert "".join(piece.arguments for piece in pieces) == call.arguments


def test_a_response_format_is_kept(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["age"],
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    reply = llm.chat(QUESTION, GREEDY, response_format=wanted, max_tokens=64)
    assert isinstance(json.loads(reply.text)["age"], int)
    anything = llm.chat(QUESTION, GREEDY, response_format={"type": "json_object"}, max_tokens=24)
    assert anything.text.startswith("{")


def test_a_prompt_is_scored(llm: LLM) -> None:
    (answer,) = llm.generate(PROMPTS[0], GREEDY, max_tokens=1, prompt_logprobs=2)
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    assert all(entry.logprob <= 0 and len(entry.top) == 2 for entry in answer.prompt_logprobs[1:])
    reply = llm.chat(QUESTION, GREEDY, max_tokens=1, prompt_logprobs=0)
    assert len(reply.prompt_logprobs) == reply.usage.prompt_tokens
    assert llm.chat(QUESTION, GREEDY, max_tokens=1).prompt_logprobs == ()


def test_stop_token_ids_end_an_answer(llm: LLM) -> None:
    (free,) = llm.generate(PROMPTS[0], GREEDY, max_tokens=8)
    stop = free.tokens[5]
    (ended,) = llm.generate(PROMPTS[0], GREEDY, max_tokens=8, stop_token_ids=[stop])
    assert ended.finish_reason is FinishReason.STOP
    assert ended.tokens == free.tokens[: free.tokens.index(stop)]


def test_min_tokens_delays_eos(llm: LLM) -> None:
    for min_tokens in (0, 1, 6):
        (raw,) = llm.generate(PROMPTS[0], ENDING, max_tokens=16, min_tokens=min_tokens)
        reply = llm.chat(QUESTION, ENDING, max_tokens=16, min_tokens=min_tokens)
        for answer in (raw, reply):
            assert (len(answer.tokens), answer.finish_reason) == (min_tokens, FinishReason.STOP)


def test_a_prediction_and_a_reasoning_budget_are_taken(llm: LLM) -> None:
    plain = llm.chat(QUESTION, GREEDY, max_tokens=24)
    predicted = llm.chat(QUESTION, GREEDY, max_tokens=24, prediction=plain.text, reasoning_budget=4)
    assert predicted.text == plain.text and predicted.usage.predicted_tokens > 0


def test_several_choices_and_their_logprobs(llm: LLM) -> None:
    warm = SamplingParams(temperature=1.5, seed=3)
    reply = llm.chat(QUESTION, warm, n=3, max_tokens=12, logprobs=True, top_logprobs=2)
    assert len(reply.choices) == 3 and reply.choices[0] is reply
    assert len({choice.text for choice in reply.choices}) > 1, "each choice has a seed of its own"
    for choice in reply.choices:
        assert len(choice.logprobs) == len(choice.tokens) == choice.usage.completion_tokens
        assert all(len(entry.top) == 2 for entry in choice.logprobs)
    *chunks, last = llm.chat(QUESTION, warm, n=3, max_tokens=12, stream=True)
    assert last.reply is not None
    for index, choice in enumerate(last.reply.choices):
        assert "".join(chunk.text for chunk in chunks if chunk.choice == index) == choice.text
    assert [choice.text for choice in last.reply.choices] == [choice.text for choice in reply.choices]


def test_an_assistant_message_at_the_end_is_continued(llm: LLM, tiny: Server) -> None:
    begun = "".join(TEMPLATE.format(**message) for message in QUESTION) + "<|im_start|>assistant\n1, 2, 3,"
    reply = llm.chat([*QUESTION, {"role": "assistant", "content": "1, 2, 3,"}], GREEDY, max_tokens=8)
    continued = tiny.post("/completion", {"prompt": begun, "n_predict": 8, "temperature": 0}).json()
    assert reply.text == continued["content"] != ""


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [CLOCK], "tool_choice": FORCED}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"stop_token_ids": [10**7]}, "stop_token_ids"),
        ({"reasoning_budget": -2}, "reasoning_budget"),
    ],
)
def test_wrong_options_of_a_chat_name_their_field(llm: LLM, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        llm.chat(QUESTION, GREEDY, **options)
    assert refusal.value.field == field


def test_wrong_messages_and_schemas_are_refused(llm: LLM) -> None:
    for messages in ([], [{"content": "x"}], [{"role": "user", "content": 1}]):
        with pytest.raises(InvalidRequest, match="messages"):
            llm.chat(messages, GREEDY)
    wrong = {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}
    with pytest.raises(InvalidRequest, match="response_format"):
        llm.chat(QUESTION, GREEDY, response_format=wrong)
    with pytest.raises(TypeError, match="temprature"):
        llm.chat(QUESTION, GREEDY, temprature=1)  # type: ignore[call-overload]


def test_leaving_a_chat_cancels_all_its_choices(llm: LLM) -> None:
    for _ in range(5):  # more choices than there are sequences: a leak would block the last
        chunks = llm.chat(QUESTION, SamplingParams(ignore_eos=True), n=3, max_tokens=900, stream=True)
        next(iter(chunks))
        del chunks
    assert len(llm.chat(QUESTION, GREEDY, max_tokens=2).tokens) == 2


def test_a_stop_string_ends_the_answer(llm: LLM) -> None:
    (free,) = llm.generate(PROMPTS[0], GREEDY, max_tokens=32)
    stop = free.text[20:24]
    (answer,) = llm.generate(PROMPTS[0], GREEDY, max_tokens=32, stop=[stop])
    assert answer.finish_reason is FinishReason.STOP
    assert answer.text == free.text[: free.text.index(stop)]


def test_the_same_seed_gives_the_same_text(llm: LLM) -> None:
    sampling = SamplingParams(temperature=1.0, seed=11)
    texts = {llm.generate(PROMPTS[1], sampling, max_tokens=12)[0].text for _ in range(3)}
    assert len(texts) == 1


def test_leaving_a_stream_cancels_it(llm: LLM) -> None:
    for _ in range(10):  # more than there are sequences: a leak would block the last
        stream = llm.stream(PROMPTS[1], GREEDY, max_tokens=900)
        next(iter(stream))
        del stream
    assert len(llm.generate(PROMPTS[0], GREEDY, max_tokens=2)[0].tokens) == 2


def test_bad_requests_raise(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        llm.generate("", GREEDY)
    with pytest.raises(ContextLengthExceeded) as caught:
        llm.generate("0" * 5000, GREEDY)
    assert "5000" in str(caught.value) and "1024" in str(caught.value)
    assert llm.generate([], GREEDY) == []


def test_a_missing_model_raises_at_once(tmp_path: Path) -> None:
    for kind in (LLM, AsyncLLM):
        with pytest.raises(ModelFileError, match="no model file"):
            kind(tmp_path / "none.gguf")


def test_closing_twice_is_fine(tiny_model: Path) -> None:
    with LLM(tiny_model, parallel=1, ctx_size=512, threads=1) as tiny:
        assert tiny.generate("x", GREEDY, max_tokens=2)[0].tokens
        tiny.close()


def test_async_has_the_same_names_and_answers(tiny_model: Path) -> None:
    with LLM(tiny_model, parallel=4, ctx_size=4096, threads=1) as llm:
        (alone,) = llm.generate(PROMPTS[0], GREEDY, max_tokens=12)
        said = llm.chat(QUESTION, GREEDY, max_tokens=12)

    async def use() -> None:
        async with AsyncLLM(tiny_model, parallel=4, ctx_size=4096, threads=1) as model:
            answers = await model.generate(PROMPTS, GREEDY, max_tokens=4)
            assert [len(answer.tokens) for answer in answers] == [4, 4, 4]
            pieces = [piece async for piece in model.stream(PROMPTS[0], GREEDY, max_tokens=12)]
            assert "".join(pieces) == alone.text
            assert (await model.chat(QUESTION, GREEDY, max_tokens=12)).text == said.text
            chunks = [chunk async for chunk in model.chat(QUESTION, GREEDY, max_tokens=12, stream=True)]
            assert chunks[-1].reply is not None and chunks[-1].reply.text == said.text
            forced = await model.chat(
                QUESTION, GREEDY, tools=[WEATHER], tool_choice="required", n=2, max_tokens=256
            )
            assert [choice.tool_calls[0].name for choice in forced.choices] == ["get_weather"] * 2
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
