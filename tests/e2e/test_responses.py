"""OpenAI's own SDK against `/v1/responses`: it must work as with OpenAI."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseReasoningItem
from pydantic import BaseModel, ConfigDict, Field

from tests.driver.agent_bodies import CODEX, CODEX_TURNS
from tests.driver.same_text import EXACT
from tests.driver.server import Server, StartServer
from tests.tiny_models import END_OF_TEXT

QUESTION = "What is AI?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Oslo"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "name": "weather", "description": "Forecast", "parameters": SCHEMA}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    colour: Literal["red", "blue"]


@pytest.fixture(scope="module")
def client(tiny: Server) -> Iterator[openai.OpenAI]:
    """A client of a model that, greedy, never ends by itself, and says the same on every CPU."""
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def plain(response: Response) -> dict[str, Any]:
    """All but what differs between two calls: ids, times, and what was cached."""
    content = response.to_dict()
    output = [{**item, "id": "", "call_id": ""} for item in content["output"]]  # type: ignore[attr-defined]
    usage = {**content["usage"], "input_tokens_details": None}  # type: ignore[dict-item]
    return {**content, "id": "", "created_at": 0, "completed_at": 0, "output": output, "usage": usage}


def events_of(server: Server, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """A raw stream: each event's name and its data."""
    answer = server.post("/v1/responses", {**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    pairs = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        pairs.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return pairs


def test_an_answer_equals_the_chat_routes(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="any", input=QUESTION, max_output_tokens=16, temperature=0, metadata={"a": "b"}, store=True
    )
    chat = client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": QUESTION}], max_tokens=16, temperature=0
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None and chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == 16
    assert response.metadata == {"a": "b"} and response.temperature == 0 and response.model == "any"


def test_all_ways_to_ask_are_the_same(client: openai.OpenAI) -> None:
    inputs: list[Any] = [
        QUESTION,
        [{"role": "user", "content": QUESTION}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}],
    ]
    answers = [
        client.responses.create(
            model="any", input=given, instructions="Be brief.", max_output_tokens=8, temperature=0
        )
        for given in inputs
    ]
    answers.append(
        client.responses.create(
            model="any",
            input=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
            max_output_tokens=8,
            temperature=0,
        )
    )
    assert len({answer.output_text for answer in answers}) == 1
    assert len({answer.usage.input_tokens for answer in answers if answer.usage}) == 1
    counted = client.responses.input_tokens.count(model="any", input=QUESTION, instructions="Be brief.")
    assert answers[0].usage is not None and counted.input_tokens == answers[0].usage.input_tokens


def test_streamed_and_whole_responses_are_the_same(client: openai.OpenAI) -> None:
    long = 300  # tokens: so many that they are not read all at once
    ending = {"logit_bias": {str(END_OF_TEXT): 100}, "min_tokens": long}
    fields: Any = {"model": "any", "input": "Say hi", "max_output_tokens": long + 1, "temperature": 0}
    fields["extra_body"] = ending
    whole = client.responses.create(**fields)
    *events, last = client.responses.create(**fields, stream=True)
    assert last.type == "response.completed" and last.response.completed_at is not None
    assert plain(last.response) == plain(whole)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text and len(deltas) > 1
    with client.responses.stream(**fields) as stream:
        assert stream.get_final_response().output_text == whole.output_text


def test_structured_outputs_are_parsed(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model="any", input="Describe a person.", text_format=Person, max_output_tokens=200, temperature=0
    )
    assert isinstance(answer.output_parsed, Person)
    free = client.responses.create(
        model="any",
        input="Describe a person as JSON.",
        text={"format": {"type": "json_object"}},
        max_output_tokens=24,
        temperature=0,
    )
    assert free.output_text.startswith("{")


def test_a_demanded_call_fits_its_schema_and_its_result_goes_back(client: openai.OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    choice: Any = {"type": "function", "name": "weather"}
    answer = client.responses.create(
        model="any", input=asked, tools=[WEATHER], tool_choice=choice, max_output_tokens=200, temperature=0
    )
    (call,) = answer.output
    assert isinstance(call, ResponseFunctionToolCall) and call.name == "weather"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It snows."}
    follow: list[Any] = [*asked, call.to_dict(), result]
    after = client.responses.create(
        model="any", input=follow, tools=[WEATHER], tool_choice="none", max_output_tokens=12, temperature=0
    )
    assert after.output_text
    assert after.usage is not None and answer.usage is not None
    with client.responses.stream(
        model="any", input=asked, tools=[WEATHER], tool_choice=choice, max_output_tokens=200, temperature=0
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (streamed,) = stream.get_final_response().output
    assert "".join(deltas) == call.arguments
    assert streamed.type == "function_call" and streamed.arguments == call.arguments


def test_a_session_of_codex_is_taken(embedded: Server) -> None:
    items = [*CODEX["input"], *(item for turn in CODEX_TURNS for item in turn)]
    counts = [
        embedded.post("/v1/responses/input_tokens", {**CODEX, "input": items[:count]}).json()
        for count in (3, 12, len(items))
    ]
    tokens = [count["input_tokens"] for count in counts]
    assert tokens == sorted(set(tokens)), counts
    fields = {"stream": False, "max_output_tokens": 4, "ignore_eos": True}
    answer = embedded.post("/v1/responses", {**CODEX, "input": items, **fields})
    assert answer.status_code == 200 and answer.json()["output"], answer.text


def test_logprobs_are_given_where_asked_for(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="any",
        input=QUESTION,
        max_output_tokens=5,
        temperature=0,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    (message,) = answer.output
    assert message.type == "message" and message.content[0].type == "output_text"
    logprobs = message.content[0].logprobs
    assert logprobs is not None and [len(entry.top_logprobs) for entry in logprobs] == [2] * 5
    assert "".join(entry.token for entry in logprobs) == answer.output_text


def test_reasoning_are_an_item_of_their_own(thinking: Server) -> None:
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.responses.create(model="any", input="x", max_output_tokens=12, temperature=0)
        (item,) = answer.output
        assert isinstance(item, ResponseReasoningItem) and item.content and item.content[0].text
        assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens >= 11
        said = client.responses.create(
            model="any", input="x", max_output_tokens=12, temperature=0, reasoning={"effort": "none"}
        )
        assert said.output[0].type == "message" and said.output_text
        again: Any = [{"role": "user", "content": "x"}, item.to_dict(), {"role": "user", "content": "y"}]
        assert client.responses.create(model="any", input=again, max_output_tokens=1).output
    names = [name for name, _ in events_of(thinking, {"input": "x", "max_output_tokens": 6})]
    assert "response.reasoning_text.delta" in names and "response.reasoning_text.done" in names


@pytest.mark.parametrize(
    ("fields", "kind", "param", "said"),
    [
        ({"model": "../../etc/passwd"}, openai.NotFoundError, None, "model"),
        ({"previous_response_id": "resp_1"}, openai.NotFoundError, None, "whole conversation"),
        ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice", "needs tools"),
        ({"input": "hello " * 9000}, openai.BadRequestError, None, "maximum context length is"),
        ({"max_output_tokens": 0}, openai.BadRequestError, "max_output_tokens", "1"),
    ],
    ids=str,
)
def test_errors_are_the_sdks_own(
    client: openai.OpenAI,
    fields: dict[str, Any],
    kind: type[openai.APIStatusError],
    param: str | None,
    said: str,
) -> None:
    with pytest.raises(kind) as refusal:
        client.responses.create(**{"model": "any", "input": "x", "max_output_tokens": 1, **fields})
    assert refusal.value.code and said in refusal.value.message
    if param is not None:
        assert refusal.value.param == param


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_response_can_be_continued(client: openai.OpenAI, stream: bool) -> None:
    first = client.responses.create(
        model="any", input="Count: 1, 2, 3", instructions="Be brief.", max_output_tokens=8, temperature=0
    )
    assert first.to_dict()["store"] is True and client.responses.retrieve(first.id) == first
    more: dict[str, Any] = {"model": "any", "max_output_tokens": 4, "temperature": 0}
    said: Any
    if stream:
        events = list(
            client.responses.create(input="And then?", previous_response_id=first.id, stream=True, **more)
        )
        said = events[-1].response
    else:
        said = client.responses.create(input="And then?", previous_response_id=first.id, **more)
    whole: Any = [
        {"role": "user", "content": "Count: 1, 2, 3"},
        *(item.to_dict() for item in first.output),
        {"role": "user", "content": "And then?"},
    ]
    again = client.responses.create(input=whole, store=False, **more)
    assert (said.output_text, said.usage.input_tokens) == (again.output_text, again.usage.input_tokens)
    assert said.previous_response_id == first.id and client.responses.retrieve(said.id).id == said.id
    with pytest.raises(openai.NotFoundError, match="whole conversation"):
        client.responses.retrieve(again.id)
    client.responses.delete(first.id)
    for gone in (lambda: client.responses.retrieve(first.id), lambda: client.responses.delete(first.id)):
        with pytest.raises(openai.NotFoundError, match="not stored"):
            gone()
    with pytest.raises(openai.NotFoundError, match="whole conversation"):
        client.responses.create(input="x", previous_response_id=said.id, **more)


def test_stored_responses_go_with_the_cache(client: openai.OpenAI, tiny: Server) -> None:
    answer = client.responses.create(model="any", input="x", max_output_tokens=1)
    assert tiny.post("/admin/cache/clear", {}).json()["responses"] >= 1
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.retrieve(answer.id)


def test_an_answer_outlives_its_engine(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--parallel", "1", "--threads", "1", *EXACT)
    body: dict[str, Any] = {"model": "any", "input": "x", "max_output_tokens": 600, "temperature": 0}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        expected = client.responses.create(**body)
        kinds: list[str] = []
        for event in client.responses.create(**body, stream=True):
            if event.type == "response.output_text.delta" and event.type not in kinds:
                server.kill_worker("engine")
            kinds.append(event.type)
    assert kinds[-1] == "response.incomplete" and "error" not in kinds
    assert event.response.output[0].content[0].text == expected.output_text
    assert server.metrics()["cllm_engine_restarts_total"] == 1
