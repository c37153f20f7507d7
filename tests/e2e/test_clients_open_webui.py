"""What Open WebUI sends to an OpenAI-compatible server, replayed; it is too large to be installed here.

Its runner asks for the models, streams chats, and asks for titles and tags whole. A "direct connection" is
the browser itself, with everything that its page knows of the chat in the body.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.driver.server import Server

KEY = "cllm-of-open-webui"
PAGE = "http://localhost:3000"  # where the browser shows it
CONTAINER = {"Host": "host.docker.internal:18081"}  # as a container calls the machine it runs on
HEADERS = {
    "Authorization": f"Bearer {KEY}",
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "Ann",
    "X-OpenWebUI-User-Id": "8d1c",
    "X-OpenWebUI-User-Email": "ann@example.org",
    "X-OpenWebUI-User-Role": "user",
}
CHAT = "5f0e"
SYSTEM = {"role": "system", "content": "Be brief. Today is Monday."}
USER = {"role": "user", "content": "What is AI?"}
# What the page sends along; none of it is for the model.
BESIDES: dict[str, Any] = {
    "params": {},
    "files": [{"type": "file", "id": "f1", "name": "notes.txt"}],
    "tool_ids": ["clock"],
    "tool_servers": [],
    "features": {"web_search": False, "image_generation": False, "code_interpreter": False},
    "variables": {"{{USER_NAME}}": "Ann"},
    "model_item": {"id": "dense", "owned_by": "openai", "urlIdx": 0, "info": {"meta": {"tags": []}}},
    "session_id": "s1",
    "chat_id": CHAT,
    "id": "m1",
    "background_tasks": {"title_generation": True, "tags_generation": True, "follow_up_generation": True},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Set up as docs/how-to/open-webui.md says."""
    log = tmp_path_factory.mktemp("open-webui") / "log"
    flags = ("--allowed-hosts", "host.docker.internal", "--cors-origins", PAGE, "--threads", "1")
    with Server(log, str(tiny_model), *flags, CLLM_API_KEY=KEY) as server:
        server.client.headers.update(HEADERS)
        yield server


def model_of(server: Server) -> str:
    answer = server.client.get("/v1/models", headers=CONTAINER)
    assert answer.status_code == 200
    return str(answer.json()["data"][0]["id"])


def chat(server: Server, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed chat."""
    given = {"model": model_of(server), "stream": True, "max_tokens": 8, **body}
    answer = server.client.post("/v1/chat/completions", json=given, headers=CONTAINER)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_chat_is_streamed_and_tells_its_usage(server: Server) -> None:
    settings = {"temperature": 0.7, "top_p": 0.9, "seed": 1, "frequency_penalty": 0.1, "stop": ["\n\n\n"]}
    chunks = chat(server, messages=[SYSTEM, USER], stream_options={"include_usage": True}, **settings)
    *spoken, usage = chunks
    assert spoken[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in spoken)
    assert spoken[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] <= 8


def test_what_is_not_for_the_model_changes_nothing(server: Server) -> None:
    def words(**more: Any) -> str:
        chunks = chat(server, messages=[SYSTEM, USER], temperature=0, **more)
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

    assert words(**BESIDES) == words()


def test_native_tools_and_their_results(server: Server) -> None:
    call = {"index": 0, "id": "call_1", "type": "function"}
    history = [
        SYSTEM,
        {"role": "user", "content": [{"type": "text", "text": "What time is it in Bern?"}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "get_time", "arguments": '{"city": "Bern"}'}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    assert chat(server, messages=history[:2], tools=[TOOL])
    assert chat(server, messages=history, tools=[TOOL])
    forced = chat(server, messages=history[:2], tools=[TOOL], tool_choice="required", max_tokens=64)
    named = [call for chunk in forced for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert named[0]["function"]["name"] == "get_time"


@pytest.mark.parametrize("task", ["title_generation", "tags_generation", "follow_up_generation"])
def test_titles_and_tags_are_asked_for_whole(server: Server, task: str) -> None:
    history = [USER, {"role": "assistant", "content": "Machines that learn."}]
    prompt = f"### Task: {task}\n<chat_history>\n{json.dumps(history)}\n</chat_history>"
    body = {
        "model": model_of(server),
        "messages": [{"role": "user", "content": prompt}],
        "stream": False,
        "max_completion_tokens": 8,
        "metadata": {"task": task, "task_body": {"messages": history, "chat_id": CHAT}, "chat_id": CHAT},
    }
    answer = server.client.post("/v1/chat/completions", json=body, headers=CONTAINER)
    assert answer.status_code == 200, answer.text
    assert isinstance(answer.json()["choices"][0]["message"]["content"], str)


def test_documents_are_embedded_in_batches(server: Server) -> None:
    body = {"input": ["first piece", "second piece"], "model": model_of(server)}
    answer = server.client.post("/v1/embeddings", json=body, headers=CONTAINER)
    assert [len(entry["embedding"]) > 1 for entry in answer.json()["data"]] == [True, True]


def test_a_browser_may_connect_directly(server: Server) -> None:
    asks = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    preflight = httpx.options(
        f"{server.url}/v1/chat/completions", headers={"Origin": PAGE, **asks}, trust_env=False
    )
    assert preflight.status_code == 200, "a browser sends no key with it"
    assert preflight.headers["access-control-allow-origin"] == PAGE
    body = {"model": model_of(server), "messages": [USER], "max_tokens": 4, **BESIDES}
    answer = server.client.post("/v1/chat/completions", json=body, headers={"Origin": PAGE})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE


def test_what_goes_wrong_can_be_shown(server: Server) -> None:
    """It shows the `message` of the `error`."""
    refused = server.client.get("/v1/models", headers={**CONTAINER, "Authorization": "Bearer wrong"})
    assert refused.status_code == 401 and "key" in refused.json()["error"]["message"]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Look:"}, image]}]}
    refused = server.client.post("/v1/chat/completions", json=body, headers=CONTAINER)
    assert refused.status_code == 400 and "text only" in refused.json()["error"]["message"]
    refused = server.client.get("/v1/models", headers={"Host": "elsewhere.example"})
    assert refused.status_code == 403 and "--allowed-hosts" in refused.json()["error"]["message"]
