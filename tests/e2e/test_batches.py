"""OpenAI's own SDK against `/v1/files` and `/v1/batches`: unchanged client code, tenants apart, kills."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from tests.driver.same_text import EXACT
from tests.driver.server import Server, StartServer, wait_for

ROUTE = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def make_line(number: int, url: str = ROUTE, **body: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": f"Count to {number}"}], "temperature": 0}
    whole = {"model": "any", "max_tokens": 8, **(asked if url == ROUTE else {}), **body}
    return {"custom_id": f"line {number}", "method": "POST", "url": url, "body": whole}


def upload(client: openai.OpenAI, *lines: dict[str, Any] | str) -> str:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return client.files.create(file=("night.jsonl", text.encode()), purpose="batch").id


def create(client: openai.OpenAI, file: str, endpoint: Any = ROUTE) -> Batch:
    return client.batches.create(input_file_id=file, endpoint=endpoint, completion_window="24h")


def wait(client: openai.OpenAI, batch: Batch) -> Batch:
    def ended() -> Batch | None:
        found = client.batches.retrieve(batch.id)
        return found if found.status in ENDED else None

    return wait_for(ended)


def read(client: openai.OpenAI, file: str | None) -> dict[str, Any]:
    assert file is not None
    lines = [json.loads(line) for line in client.files.content(file).text.splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


@pytest.fixture(scope="module")
def client(tiny: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_batch_answers_as_its_route_does(client: openai.OpenAI) -> None:
    batch = create(client, upload(client, *map(make_line, range(20))))
    assert batch.status == "in_progress" and batch.request_counts is not None
    assert batch.request_counts.total == 20
    batch = wait(client, batch)
    assert batch.status == "completed" and batch.error_file_id is None and batch.completed_at
    answers = read(client, batch.output_file_id)
    assert answers.keys() == {f"line {number}" for number in range(20)}
    alone = client.chat.completions.create(**make_line(7)["body"])
    line = answers["line 7"]
    assert line["response"]["status_code"] == 200 and line["error"] is None
    assert line["response"]["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
    assert batch.id in [each.id for each in client.batches.list(limit=1)]
    assert batch.output_file_id in [each.id for each in client.files.list()]


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"prompt": "Once", "max_tokens": 4}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 4}),
        ("/v1/embeddings", {"input": "Hi"}),
    ],
)
def test_every_endpoint_runs_in_a_batch(client: openai.OpenAI, url: str, body: dict[str, Any]) -> None:
    batch = wait(client, create(client, upload(client, make_line(1, url, **body)), url))
    (answer,) = read(client, batch.output_file_id).values()
    used = batch.usage
    assert used is not None and used.total_tokens == answer["response"]["body"]["usage"]["total_tokens"]
    assert 0 < used.input_tokens == used.total_tokens - used.output_tokens


def test_a_request_that_is_refused_is_in_the_error_file(client: openai.OpenAI) -> None:
    wrong = make_line(2, temperature="warm")
    batch = wait(client, create(client, upload(client, make_line(1), wrong)))
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    (answer,) = read(client, batch.error_file_id).values()
    assert answer["custom_id"] == "line 2" and answer["response"]["status_code"] == 400
    assert answer["response"]["body"]["error"]["param"] == "temperature"


def test_wrong_lines_fail_the_batch_by_number(client: openai.OpenAI) -> None:
    lines = (make_line(1), "{", make_line(1), make_line(4, "/v1/completions"), make_line(5, stream=True))
    batch = create(client, upload(client, *lines))
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    assert [error.line for error in batch.errors.data] == [2, 3, 4, 5]
    assert [error.param for error in batch.errors.data] == [None, "custom_id", "url", "stream"]


def test_a_cancelled_batch_keeps_its_answers(client: openai.OpenAI, tiny: Server) -> None:
    lines = [make_line(number, max_tokens=200) for number in range(200)]
    file = upload(client, *lines)
    batch = create(client, file)
    with pytest.raises(openai.BadRequestError, match="cancel it first"):
        client.files.delete(file)

    def one_is_done() -> bool:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed > 0

    wait_for(one_is_done)
    client.batches.cancel(batch.id)
    ended = wait(client, batch)
    assert ended.status == "cancelled" and ended.cancelled_at and ended.cancelling_at
    done, left = read(client, ended.output_file_id), read(client, ended.error_file_id)
    assert len(done) + len(left) == 200 and not done.keys() & left.keys()
    assert {line["error"]["code"] for line in left.values()} == {"batch_cancelled"}
    assert client.files.delete(file).deleted


def test_what_is_wrong_with_an_upload_is_named(tiny: Server) -> None:
    with httpx.Client(base_url=tiny.url, trust_env=False) as client:
        form = {"purpose": "user_data"}
        assert "file: this field" in client.post("/v1/files", data=form, files={"other": b"x"}).text
        assert "purpose" in client.post("/v1/files", files={"file": b"x"}).text
        page = {"origin": "http://elsewhere.example"}
        assert client.post("/v1/files", data=form, files={"file": b"x"}, headers=page).status_code == 415
        assert client.post("/v1/batches", data=form, files={"file": b"x"}).status_code == 415
        assert client.get("/v1/files", params={"limit": "0"}).status_code == 400
        assert client.get("/v1/files", params={"limit": "9" * 5000}).status_code == 400
        for seconds in ("9" * 5000, "²"):
            late = {**form, "expires_after[seconds]": seconds}
            assert client.post("/v1/files", data=late, files={"file": b"x"}).status_code == 400
        body = {"input_file_id": "file-0", "endpoint": ROUTE, "completion_window": "0h"}
        assert "as 30m, 24h, 7d" in client.post("/v1/batches", json=body).text
        for path in ("/v1/files/file-0", "/v1/files/file-0/content", "/v1/batches/batch_0"):
            assert client.get(path).status_code == 404


def test_another_tenant_gets_404(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--api-key", "one,two", "--parallel", "2", *EXACT)
    one, two = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key) for key in ("one", "two"))
    with one, two:
        file = upload(one, make_line(1))
        batch = wait(one, create(one, file))
        response = one.responses.create(model="any", input="Hi", max_output_tokens=4)
        conversation = one.conversations.create().id
        assert batch.status == "completed" and batch.output_file_id is not None
        calls: list[Any] = [
            lambda: two.files.retrieve(file),
            lambda: two.files.content(batch.output_file_id or ""),
            lambda: two.files.delete(file),
            lambda: create(two, file),
            lambda: two.batches.retrieve(batch.id),
            lambda: two.batches.cancel(batch.id),
            lambda: two.responses.retrieve(response.id),
            lambda: two.responses.delete(response.id),
            lambda: two.conversations.retrieve(conversation),
            lambda: two.conversations.delete(conversation),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                call()
        assert not [*two.files.list()] and not [*two.batches.list()]
        assert one.responses.retrieve(response.id).id == response.id


@contextmanager
def start_and_kill(log: Path, *arguments: str) -> Iterator[openai.OpenAI]:
    """A client of a server that is killed at the end of the block."""
    server = Server(log, *arguments).__enter__()
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            yield client
    finally:
        server.kill()


def test_a_killed_server_answers_every_line_once(
    start: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    arguments = (str(tiny_model), "--parallel", "4", *EXACT, "--state-dir", str(tmp_path / "state"))
    count = 80
    lines = [make_line(number, max_tokens=60) for number in range(count)]
    batch: Batch | None = None
    for kills in range(2):
        with start_and_kill(tmp_path / f"log {kills}", *arguments) as client:
            batch = batch or create(client, upload(client, *lines))
            begun = client.batches.retrieve(batch.id).request_counts
            assert begun is not None and begun.total == count

            def is_further(client: openai.OpenAI = client, begun: Any = begun, name: str = batch.id) -> bool:
                counts = client.batches.retrieve(name).request_counts
                return counts is not None and counts.completed >= min(count, begun.completed + 20)

            wait_for(is_further)
    server = start(*arguments)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        assert batch is not None
        for role in ("engine", "tokenizer"):
            server.kill_worker(role)
        ended = wait(client, batch)
        assert ended.status == "completed" and ended.request_counts is not None
        assert (ended.request_counts.completed, ended.request_counts.failed) == (count, 0)
        answers = read(client, ended.output_file_id)
        assert answers.keys() == {f"line {number}" for number in range(count)}
        for number in (3, 57):
            alone = client.chat.completions.create(**lines[number]["body"])
            content = answers[f"line {number}"]["response"]["body"]["choices"][0]["message"]["content"]
            assert content == alone.choices[0].message.content
