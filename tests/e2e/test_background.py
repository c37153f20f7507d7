"""OpenAI's own SDK against background responses and conversations: unchanged client code, kills, tenants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.driver.same_text import EXACT
from tests.driver.server import Server, StartServer, wait_for

ENDED = ("completed", "failed", "cancelled", "incomplete")
SHORT: Any = {"model": "any", "max_output_tokens": 16, "temperature": 0}
LONG: Any = {"model": "any", "max_output_tokens": 2000, "temperature": 0}
UNNAMED: Any = {}  # a new conversation


@pytest.fixture(scope="module")
def client(tiny: Server) -> Iterator[openai.OpenAI]:
    with connect(tiny) as client:
        yield client


def connect(server: Server, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def wait(client: openai.OpenAI, response_id: str) -> Response:
    def ended() -> Response | None:
        found = client.responses.retrieve(response_id)
        return found if found.status in ENDED else None

    return wait_for(ended)


def test_a_background_response_is_that_of_a_plain_call(client: openai.OpenAI) -> None:
    queued = client.responses.create(input="What is AI?", background=True, **SHORT)
    assert queued.status == "queued" and queued.background and not queued.output
    ended = wait(client, queued.id)
    alone = client.responses.create(input="What is AI?", **SHORT)
    assert ended.output_text == alone.output_text and ended.status == alone.status == "incomplete"
    assert ended.usage is not None and ended.usage.output_tokens == 16
    later = client.responses.create(input="Why?", previous_response_id=queued.id, **SHORT)
    assert later.usage is not None and later.usage.input_tokens > ended.usage.input_tokens
    assert client.responses.cancel(queued.id).status == "incomplete"
    client.responses.delete(queued.id)
    with pytest.raises(openai.NotFoundError, match="not stored here"):
        client.responses.retrieve(queued.id)


def test_the_stream_of_a_background_response_goes_on_from_an_event(client: openai.OpenAI) -> None:
    stream = client.responses.create(input="Tell me", background=True, stream=True, **LONG)
    seen = []
    for event in stream:
        seen.append(event)
        if len(seen) == 20:
            break
    stream.close()
    assert [event.type for event in seen[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    response = seen[0].response.id
    rest = list(client.responses.retrieve(response, stream=True, starting_after=19))
    assert [event.sequence_number for event in rest] == list(range(20, 20 + len(rest)))
    deltas = [event.delta for event in (*seen, *rest) if event.type == "response.output_text.delta"]
    ended = client.responses.retrieve(response)
    assert ended.status == "incomplete" and "".join(deltas) == ended.output_text
    again = list(client.responses.retrieve(response, stream=True))
    assert [event.sequence_number for event in again] == list(range(20 + len(rest)))


def test_a_background_response_is_cancelled_and_deleted(client: openai.OpenAI, tiny: Server) -> None:
    response = client.responses.create(input="Tell me", background=True, **LONG)
    wait_for(lambda: client.responses.retrieve(response.id).status == "in_progress")
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        client.responses.create(input="Why?", previous_response_id=response.id, **SHORT)
    cancelled = client.responses.cancel(response.id)
    assert cancelled.status == "cancelled" and cancelled.output_text
    assert client.responses.retrieve(response.id).status == "cancelled"
    other = client.responses.create(input="Tell me", background=True, **LONG)
    client.responses.delete(other.id)
    wait_for(tiny.idle)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(other.id)
    plain = client.responses.create(input="Hi", **SHORT)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(plain.id)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"background": True, "store": False}, "needs store true"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "not both"),
    ],
)
def test_what_cannot_be_stored_is_refused(client: openai.OpenAI, fields: Any, text: str) -> None:
    with pytest.raises(openai.BadRequestError, match=text):
        client.responses.create(input="Hi", **SHORT, **fields)


def test_a_conversation_is_continued(client: openai.OpenAI) -> None:
    first = client.responses.create(input="My name is Ann.", conversation=UNNAMED, **SHORT)
    assert first.conversation is not None and first.usage is not None
    name = first.conversation.id
    second = client.responses.create(input="Who?", conversation=name, background=True, **SHORT)
    assert second.conversation == first.conversation
    usage = wait(client, second.id).usage
    assert usage is not None and usage.input_tokens > first.usage.input_tokens + 16
    third = client.responses.create(input="Who?", conversation={"id": name}, **SHORT)
    assert third.usage is not None and third.usage.input_tokens > usage.input_tokens + 16
    other = client.responses.create(input="Who?", conversation=UNNAMED, background=True, **SHORT)
    assert other.conversation is not None and other.conversation.id != name
    with pytest.raises(openai.NotFoundError, match="no conversation"):
        client.responses.create(input="Hi", conversation="conv_1", **SHORT)


def test_a_conversation_is_created_and_deleted(client: openai.OpenAI) -> None:
    said: Any = [{"role": "user", "content": "My name is Ann."}]
    created = client.conversations.create(items=said, metadata={"a": "b"})
    assert client.conversations.retrieve(created.id) == created and created.metadata == {"a": "b"}
    counts = []
    for store in (False, True, True):
        answer = client.responses.create(input="Who?", conversation=created.id, store=store, **SHORT)
        assert answer.usage is not None
        counts.append(answer.usage.input_tokens)
    plain = client.responses.create(input="Who?", conversation=UNNAMED, store=False, **SHORT)
    assert plain.conversation is None and plain.usage is not None
    assert plain.usage.input_tokens < counts[0] == counts[1] < counts[2], "store false adds nothing"
    assert client.conversations.delete(created.id).deleted
    for call in (client.conversations.retrieve, client.conversations.delete):
        with pytest.raises(openai.NotFoundError, match="no conversation"):
            call(created.id)


def test_a_killed_server_leaves_its_background_responses_to_the_next(
    start: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    given = (str(tiny_model), *EXACT, "--parallel", "1", "--state-dir", str(tmp_path / "state"))
    server = start(*given)
    asked: Any = {**LONG, "input": "Tell me"}
    with connect(server) as client:
        alone = client.responses.create(**asked)
        responses = [client.responses.create(background=True, **asked) for _ in range(2)]
        wait_for(lambda: client.responses.retrieve(responses[0].id).status == "in_progress")
    server.kill()
    server = start(*given)
    with connect(server) as client:
        for response in responses:
            ended = wait(client, response.id)
            assert ended.status == "incomplete" and ended.output_text == alone.output_text
        events = list(client.responses.retrieve(responses[0].id, stream=True, starting_after=7))
        assert events[0].type == "response.created" and events[0].sequence_number == 1_000_000
    server.stop()


def test_tenants_do_not_see_each_others_answers(start: StartServer, tiny_model: Path, tmp_path: Path) -> None:
    server = start(str(tiny_model), "--api-key", "one,two", "--state-dir", str(tmp_path / "state"))
    with connect(server, "one") as one, connect(server, "two") as two:
        response = one.responses.create(input="Tell me", background=True, **LONG)
        begun = one.responses.create(input="Hi", conversation=UNNAMED, **SHORT)
        assert begun.conversation is not None
        name = begun.conversation.id
        for call in (
            lambda: two.responses.retrieve(response.id),
            lambda: two.responses.retrieve(response.id, stream=True),
            lambda: two.responses.cancel(response.id),
            lambda: two.responses.delete(response.id),
            lambda: two.responses.create(input="Hi", conversation=name, **SHORT),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        headers = {"Authorization": "Bearer two"}
        answer = httpx.get(f"{server.url}/v1/streams/{response.id}", headers=headers, trust_env=False)
        assert answer.status_code == 404
        assert one.responses.cancel(response.id).status == "cancelled"
