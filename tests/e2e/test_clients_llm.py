"""Simon Willison's `llm`, with the server in `extra-openai-models.yaml` as its documentation says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.driver.server import Server
from tests.e2e.clients import Weather

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::PendingDeprecationWarning", "ignore::ResourceWarning"
)

MODELS = """
- model_id: local-chat
  model_name: any
  api_base: {url}/v1
  api_key_name: none
  supports_schema: true
  supports_tools: true
- model_id: local-completion
  model_name: any
  api_base: {url}/v1
  completion: true
- model_id: local-path
  model_name: ../../etc/passwd
  api_base: {url}/v1
"""


@pytest.fixture(scope="module")
def llm(quiet: pytest.MonkeyPatch, tiny: Server, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("llm")
    (folder / "extra-openai-models.yaml").write_text(MODELS.format(url=tiny.url))
    quiet.setenv("LLM_USER_PATH", str(folder))
    quiet.setenv("OPENAI_API_KEY", "none")
    quiet.setenv("LLM_LOAD_PLUGINS", "")
    import llm

    return llm


def test_a_chat_streamed_and_whole(llm: Any) -> None:
    model = llm.get_model("local-chat")
    long = 300  # tokens: so many that they are not read all at once
    whole = model.prompt("What is AI?", stream=False, temperature=0, max_tokens=long)
    pieces = list(model.prompt("What is AI?", stream=True, temperature=0, max_tokens=long))
    assert "".join(pieces) == whole.text() != "" and len(pieces) > 1
    assert whole.usage().output == long


def test_a_conversation(llm: Any) -> None:
    conversation = llm.get_model("local-chat").conversation()
    for question in ("Name a colour.", "Another one."):
        assert conversation.prompt(question, max_tokens=8, temperature=0).text()


def test_a_completion(llm: Any, tiny: Server) -> None:
    model = llm.get_model("local-completion")
    answer = model.prompt("The capital of France is", stream=False, temperature=0, max_tokens=8)
    assert answer.text() == tiny.generate("The capital of France is", 8)["text"]


def test_a_schema(llm: Any) -> None:
    answer = llm.get_model("local-chat").prompt("Rome?", schema=Weather, stream=False, max_tokens=200)
    assert Weather.model_validate(json.loads(answer.text()))


def test_tools_are_offered(llm: Any) -> None:
    def weather(city: str) -> str:
        """Tell the weather."""
        return f"sunny in {city}"

    answer = llm.get_model("local-chat").prompt("Hi.", tools=[weather], temperature=0, max_tokens=24)
    assert answer.text() or answer.tool_calls()


def test_a_refusal_is_an_error(llm: Any) -> None:
    with pytest.raises(openai.NotFoundError):  # it lets the SDK's own errors through
        llm.get_model("local-path").prompt("x", stream=False).text()
