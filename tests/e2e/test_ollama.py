"""Ollama's API, used by the `ollama` package and by bare requests as other clients send them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import ollama
import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from cllm.cli.main import app
from cllm.server.keys import add_key
from cllm.testing import call_tool, say
from tests.driver.hub import FakeHub
from tests.driver.server import ROOT, Server, StartServer, environment, wait_for
from tests.tiny_models import make_dense

GREEDY = {"temperature": 0, "num_predict": 16}
REPO = "Example/Tiny-GGUF"


@contextmanager
def connect(server: Server, key: str = "") -> Iterator[ollama.Client]:
    """A client of the package, closed in the end."""
    client = ollama.Client(
        server.url, headers={"Authorization": f"Bearer {key}"} if key else {}, trust_env=False
    )
    try:
        yield client
    finally:
        client._client.close()


@pytest.fixture(scope="module")
def client(scripted: Server) -> Iterator[ollama.Client]:
    with connect(scripted) as opened:
        yield opened


@pytest.fixture(scope="module")
def real(tiny: Server) -> Iterator[ollama.Client]:
    with connect(tiny) as opened:
        yield opened


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_chat_whole_and_streamed(client: ollama.Client) -> None:
    whole = client.chat("fake", ask(say("It is so.")))
    assert (whole.message.role, whole.message.content, whole.done_reason) == (
        "assistant",
        "It is so.",
        "stop",
    )
    assert whole.model == "fake" and whole.done and whole.eval_count == 9
    assert (
        whole.prompt_eval_count
        and whole.prompt_eval_duration
        and whole.eval_duration
        and whole.total_duration
    )
    assert whole.total_duration >= whole.prompt_eval_duration + whole.eval_duration
    parts = list(client.chat("fake:latest", ask(say("It is so.")), stream=True))
    assert "".join(part.message.content or "" for part in parts) == "It is so."
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 2 and parts[-1].eval_count == 9 and parts[-1].model == "fake:latest"


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
      city: Its name.
    """
    return f"Rain in {city}"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_is_answered(client: ollama.Client, stream: bool) -> None:
    script = say(call_tool("get_weather", {"city": "Paris"}), "Take an umbrella.")
    messages: list[Any] = ask(f"The weather? {script}")

    def answer() -> Any:
        if not stream:
            return client.chat("fake", messages, tools=[get_weather])
        parts = list(client.chat("fake", messages, tools=[get_weather], stream=True))
        return next((part for part in parts if part.message.tool_calls), None) or parts[0]

    called = answer()
    (call,) = called.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    messages.append(called.message)
    messages.append({"role": "tool", "content": get_weather("Paris"), "tool_name": "get_weather"})
    whole = client.chat("fake", messages, tools=[get_weather])
    assert whole.message.content == "Take an umbrella." and not whole.message.tool_calls


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    rain: bool


def test_an_answer_has_the_format(real: ollama.Client) -> None:
    options = {**GREEDY, "num_predict": 100}
    answer = real.chat("dense", ask("The weather?"), format=Weather.model_json_schema(), options=options)
    Weather.model_validate_json(answer.message.content or "")
    text = real.generate("dense", "A JSON object.", format="json", options=GREEDY).response
    assert text and text.lstrip().startswith("{")


def test_options_are_taken(real: ollama.Client) -> None:
    answer = real.chat("dense", ask("Count."), options=GREEDY)
    assert (answer.eval_count, answer.done_reason) == (16, "length")
    word = (answer.message.content or "")[3:6]
    stopped = real.chat("dense", ask("Count."), options={**GREEDY, "stop": [word]})
    assert stopped.done_reason == "stop" and word not in (stopped.message.content or "")
    with pytest.raises(ollama.ResponseError, match="temperature") as refused:
        real.chat("dense", ask("Count."), options={"temperature": 99})
    assert refused.value.status_code == 400


def test_generate_raw_system_suffix_and_what_is_refused(client: ollama.Client, scripted: Server) -> None:
    assert client.generate("fake", say("plain")).response == "plain"
    assert client.generate("fake", "hi", system=say("as before")).response == "as before"
    assert client.generate("fake", say("raw"), raw=True).response == "raw"
    parts = list(client.generate("fake", say("piece by piece"), stream=True))
    assert (
        "".join(part.response or "" for part in parts) == "piece by piece" and parts[-1].done_reason == "stop"
    )
    for field, value in (("template", "{{ .Prompt }}"), ("context", [1, 2]), ("images", ["aGk="])):
        answer = scripted.post("/api/generate", {"model": "fake", "prompt": "x", field: value})
        assert answer.status_code == 400
        assert list(answer.json()) == ["error"] and answer.json()["error"].startswith(f"{field}: ")
    with pytest.raises(ollama.ResponseError, match="'image' is not supported"):
        client.chat("fake", [{"role": "user", "content": "?", "images": [b"\x89PNG"]}])
    loaded = client.generate("fake", "")
    assert (loaded.response, loaded.done, loaded.done_reason) == ("", True, "load")


def test_reasoning_is_apart(thinking: Server) -> None:
    with connect(thinking) as client:
        answer = client.chat("thinking", ask("Why?"), options=GREEDY)
        assert answer.message.thinking and not answer.message.content
        parts = list(client.generate("thinking", "Why?", options=GREEDY, stream=True))
        assert "".join(part.thinking or "" for part in parts)
        off = client.chat("thinking", ask("Why?"), options=GREEDY, think=False)
        assert off.message.content and not off.message.thinking


def test_embeddings(real: ollama.Client, tiny: Server) -> None:
    texts = ["The cat sat.", "A feline rested."]
    found = real.embed("dense", texts)
    assert len(found.embeddings) == 2 and found.prompt_eval_count
    assert sum(x * x for x in found.embeddings[0]) == pytest.approx(1, abs=1e-4)
    plain = tiny.post("/v1/embeddings", {"input": texts}).json()["data"][1]["embedding"]
    assert found.embeddings[1] == pytest.approx(plain, abs=1e-5)
    assert len(real.embed("dense", texts[0], dimensions=32).embeddings[0]) == 32
    old = real.embeddings("dense", texts[0]).embedding
    assert len(old) == len(found.embeddings[0])
    long = "cat " * 5000
    assert len(real.embed("dense", long).embeddings) == 1
    with pytest.raises(ollama.ResponseError, match="at most"):
        real.embed("dense", long, truncate=False)


def test_models_are_listed_and_shown(real: ollama.Client, tiny: Server) -> None:
    (listed,) = real.list().models
    assert listed.model == "dense:latest"
    assert listed.digest and listed.size and listed.details and listed.details.family == "llama"
    (running,) = real.ps().models
    assert running.model == listed.model and running.expires_at
    shown = real.show(listed.model or "")
    assert shown.modelinfo and shown.modelinfo["general.architecture"] == "llama"
    (model,) = tiny.get("/v1/models")["data"]
    assert shown.modelinfo["llama.context_length"] == model["context_length"]
    assert {"completion", "tools", "embedding"} <= set(shown.capabilities or ())
    assert [int(part) for part in tiny.get("/api/version")["version"].split(".")] >= [0, 6, 4]


def test_a_failure_inside_a_stream_is_a_line(client: ollama.Client, scripted: Server) -> None:
    body = {"model": "fake", "messages": ask(say("begun", fails=True))}
    answer = scripted.post("/api/chat", body)
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert list(lines[-1]) == ["error"] and lines[0]["message"]["content"]
    with pytest.raises(ollama.ResponseError):
        list(client.chat("fake", ask(say("begun", fails=True)), stream=True))


def test_a_client_that_leaves_cancels_its_request(client: ollama.Client, scripted: Server) -> None:
    parts = client.chat("fake", ask(say("word " * 150)), stream=True)
    next(parts)
    parts.close()  # type: ignore[attr-defined]
    wait_for(scripted.idle)


def test_operators_pull_and_delete_models(start: StartServer, tmp_path: Path) -> None:
    folder, keys = tmp_path / "files", tmp_path / "keys.toml"
    folder.mkdir()
    served = make_dense(folder / "tiny-F32.gguf")
    user, operator = add_key(keys, "ann", admin=False), add_key(keys, "bob", admin=True)
    with FakeHub({REPO: {served.name: served.read_bytes()}}) as hub:
        home = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_CACHE": "", "HF_HUB_OFFLINE": "", "HF_TOKEN": ""}
        options = ("--ctx-size", "512", "--parallel", "1", "--api-keys", str(keys))
        server = start(str(served), *options, **hub.environment, **home)
        with connect(server, operator) as client:
            statuses = [part.status for part in client.pull(f"hf.co/{REPO}:F32", stream=True)]
            assert statuses[0] == "pulling manifest" and statuses[-1] == "success"
            assert client.delete(f"hf:{REPO}:F32").status == "success"
            with pytest.raises(ollama.ResponseError, match="there is no model"):
                client.delete(f"hf:{REPO}:F32")
            for name, said in (("llama3.2", "names of Ollama's own library"), ("hf:Example/None", "None")):
                with pytest.raises(ollama.ResponseError, match=said):
                    client.pull(name)
        with connect(server, user) as client:
            assert client.list().models
            for call in (client.pull, client.delete):
                with pytest.raises(ollama.ResponseError, match="admin") as refused:
                    call(f"hf:{REPO}")
                assert refused.value.status_code == 403
    assert server.client.get("/api/tags").status_code == 401
    shown = CliRunner().invoke(app, ["ps", "--url", server.url], env={"CLLM_API_KEY": user}).output
    assert shown.splitlines()[1].split()[:2] == ["tiny-F32", "ready"], "what any key may see"
    keyless = CliRunner().invoke(app, ["ps", "--url", server.url], env={"CLLM_API_KEY": ""})
    assert keyless.exit_code == 2 and "API key" in keyless.output


def test_the_snippet_of_the_page_runs(scripted: Server) -> None:
    page = (ROOT / "docs" / "ollama.md").read_text()
    (snippet,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    code = snippet.replace("http://127.0.0.1:18081", scripted.url).replace("What is AI?", say("AI is it."))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment()
    )
    assert (done.stdout, done.stderr) == ("AI is it.", "")
