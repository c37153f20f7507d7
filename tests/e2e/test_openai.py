"""OpenAI's own SDK against `/v1`: it must work as with OpenAI."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from cllm.models.store import embedded_model
from cllm.testing import say
from tests.driver.server import Server, StartServer, wait_for
from tests.e2e.clients import WEATHER_TOOL, Weather

QUESTION: Any = [{"role": "user", "content": "What is AI?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(tiny: Server) -> Iterator[openai.OpenAI]:
    """A client of a model that, greedy, never ends by itself, and says the same on every CPU."""
    with connect(tiny) as client:
        yield client


def connect(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def real(embedded: Server) -> Iterator[openai.OpenAI]:
    """A client of a model with a real vocabulary and chat template. What it says differs by the CPU."""
    with connect(embedded) as client:
        yield client


def test_the_model_is_listed(real: openai.OpenAI, embedded: Server) -> None:
    model = real.models.list().data[0]
    assert model.id == embedded_model().stem and model.created > 1_700_000_000
    told = model.to_dict()
    assert told["max_model_len"] == told["context_length"] == 4096
    chat = ["chat", "tools"] if embedded.get("/props")["chat_template"] else []
    assert told["capabilities"] == ["completion", *chat, "embeddings"]
    trained = embedded.get("/model/info")["context_train"]
    assert told["meta"]["n_ctx_train"] == trained  # type: ignore[index]
    assert real.models.retrieve(model.id) == model
    other = real.models.retrieve("/org/any:latest").to_dict()
    assert (other["id"], other["root"]) == ("/org/any:latest", model.id)
    with pytest.raises(openai.NotFoundError):
        real.models.retrieve("../x")


def test_a_completion_equals_the_native_route(client: openai.OpenAI, tiny: Server) -> None:
    native = tiny.generate("The capital of France is", 12, temperature=0)
    answer = client.completions.create(
        model="any", prompt="The capital of France is", max_tokens=12, temperature=0
    )
    assert answer.choices[0].text == native["text"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 12


def test_prompts_may_be_texts_or_tokens_and_be_echoed(client: openai.OpenAI, tiny: Server) -> None:
    tokens = tiny.post("/encode", {"text": "1+1="}).json()["tokens"]
    by_text = client.completions.create(
        model="any", prompt=["1+1=", "2+2="], max_tokens=4, temperature=0, echo=True
    )
    by_tokens = client.completions.create(model="any", prompt=tokens, max_tokens=4, temperature=0, echo=True)
    assert [choice.index for choice in by_text.choices] == [0, 1]
    assert by_text.choices[0].text == by_tokens.choices[0].text
    assert by_text.choices[1].text.startswith("2+2=")


def test_streamed_and_whole_chats_are_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="any", messages=QUESTION, max_tokens=24, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="any",
            messages=QUESTION,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None and whole.usage is not None
    where = {"prompt_tokens_details"}  # what the first left is there for the second
    assert chunks[-1].usage.model_dump(exclude=where) == whole.usage.model_dump(exclude=where)


def test_logprobs_hold_the_chosen_token(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="any", messages=QUESTION, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 6
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3 and entry.token == entry.top_logprobs[0].token
        assert entry.logprob <= 0
    old = client.completions.create(model="any", prompt="1+1=", max_tokens=3, temperature=0, logprobs=2)
    assert old.choices[0].logprobs is not None
    assert "".join(old.choices[0].logprobs.tokens or []) == old.choices[0].text


def test_json_schema_is_honoured(real: openai.OpenAI) -> None:
    for seed in range(3):
        answer = real.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": "Describe a person."}],
            max_tokens=400,  # far more than the longest answer that the schema allows
            seed=seed,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
            },
        )
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)


@pytest.mark.parametrize(
    ("field", "value", "shape"),
    [
        ("regex", r"[0-9]{3}-[0-9]{4}", r"[0-9]{3}-[0-9]{4}"),
        ("choice", ["yes", "no"], r"yes|no"),
        ("grammar", 'root ::= "maybe" | "never"', r"maybe|never"),
    ],
)
def test_other_constraints_are_honoured(real: openai.OpenAI, field: str, value: Any, shape: str) -> None:
    answer = real.completions.create(model="any", prompt="?", max_tokens=20, extra_body={field: value})
    assert re.fullmatch(shape, answer.choices[0].text)


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "../../etc/passwd", "prompt": "x"}, openai.NotFoundError, None),
        ({"model": "x", "prompt": "x", "temperature": -1}, openai.BadRequestError, "temperature"),
        ({"model": "x", "prompt": [999_999]}, openai.BadRequestError, "prompt"),
        ({"model": "x", "prompt": "x", "n": 10**9}, openai.BadRequestError, "n"),
        ({"model": "x", "prompt": "x", "logprobs": 21}, openai.BadRequestError, "logprobs"),
        ({"model": "x", "prompt": "x", "extra_body": {"regex": "("}}, openai.BadRequestError, "regex"),
        ({"model": "x", "prompt": "hello " * 9000}, openai.BadRequestError, "prompt"),
    ],
)
def test_errors_are_the_sdks_own(
    client: openai.OpenAI, fields: dict[str, Any], kind: type[openai.APIStatusError], param: str | None
) -> None:
    with pytest.raises(kind) as refusal:
        client.completions.create(**fields)
    assert refusal.value.param == param and refusal.value.code


def test_every_answer_has_a_request_id(client: openai.OpenAI) -> None:
    answers = [client.completions.create(model="m", prompt="x", max_tokens=1) for _ in range(2)]
    ids = {answer._request_id for answer in answers}
    assert len(ids) == 2 and all(each is not None and each.startswith("req_") for each in ids)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="m", prompt="x", max_tokens=-5)
    assert refused.value.request_id not in {None, *ids}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Weather"}}])
def test_a_forced_tool_call_fits_its_schema(client: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": "any",
        "messages": [{"role": "user", "content": "How is the weather in Rome?"}],
        "tools": [WEATHER_TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 200,
    }
    answer = client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.tool_calls
    (call,) = answer.message.tool_calls
    assert call.type == "function" and call.function.name == "Weather"
    assert Weather.model_validate_json(call.function.arguments)
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls and final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.arguments == call.function.arguments


def test_parse_gives_a_model(real: openai.OpenAI) -> None:
    answer = real.chat.completions.parse(
        model="any", messages=QUESTION, response_format=Weather, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)


def test_a_full_queue_is_a_rate_limit_error(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--parallel", "1", "--queue-size", "1", "--threads", "1")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        endless: Any = {"model": "any", "prompt": "1", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
        with pytest.raises(openai.RateLimitError) as refusal:
            client.completions.create(**endless, n=8)
        assert int(refusal.value.response.headers["Retry-After"]) >= 1
        wait_for(server.idle)


def test_an_error_in_a_stream_is_an_api_error(scripted: Server) -> None:
    """750 tokens take the scripted model three seconds, however fast the machine is."""
    fields: Any = {"model": "any", "max_tokens": 750, "stream": True, "extra_body": {"timeout": 0.5}}
    with (
        connect(scripted) as client,
        client.completions.create(prompt=say("word " * 150), **fields) as stream,
        pytest.raises(openai.APIError, match=r"not done within its 0.5 s"),
    ):
        for _ in stream:
            pass


LONG = 4000  # tokens: seconds on the tiny model
ENDLESS: dict[str, Any] = {"model": "any", "stream": True, "extra_body": {"ignore_eos": True}}
STREAMS: dict[str, Callable[[openai.OpenAI], Any]] = {
    "completions": lambda client: client.completions.create(prompt="1", max_tokens=LONG, **ENDLESS),
    "chat": lambda client: client.chat.completions.create(messages=QUESTION, max_tokens=LONG, **ENDLESS),
    "responses": lambda client: client.responses.create(input="1", max_output_tokens=LONG, **ENDLESS),
}


@pytest.mark.parametrize("route", list(STREAMS))
def test_a_disconnect_in_mid_stream_leaves_nothing_behind(
    client: openai.OpenAI, tiny: Server, route: str
) -> None:
    with tiny.freed_on_leaving(), STREAMS[route](client) as stream:
        next(iter(stream))


def test_reasoning_ends_at_its_budget(thinking: Server) -> None:
    """This model thinks for ever; without a budget nothing else comes."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 40, "temperature": 0}
    for budget in (0, 5):
        answer = thinking.post("/v1/chat/completions", {**body, "reasoning_budget": budget}).json()
        message = answer["choices"][0]["message"]
        assert message["content"] and len(message.get("reasoning_content", "")) <= 4 * budget
    free = thinking.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert not free["content"] and free["reasoning_content"]
