"""Instructor: pydantic models out of answers, by tool calls and by JSON schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.driver.server import Server
from tests.e2e.clients import PATH_LIKE, QUESTION, Weather

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")


@pytest.fixture(scope="module")
def instructor(quiet: pytest.MonkeyPatch) -> Any:
    import instructor

    return instructor


@pytest.fixture(scope="module")
def client(instructor: Any, embedded: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{embedded.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "JSON"])
def test_an_answer_is_a_model(instructor: Any, client: openai.OpenAI, mode: str) -> None:
    asking = instructor.from_openai(client, mode=instructor.Mode[mode])
    if mode == "JSON":  # any JSON object: that it fits is up to the model, so the schema goes along
        extra: dict[str, Any] = {"extra_body": {"response_format": _schema()}}
    else:
        extra = {}
    answer, raw = asking.chat.completions.create_with_completion(
        model="any", messages=QUESTION, response_model=Weather, max_tokens=64, max_retries=0, **extra
    )
    assert isinstance(answer, Weather)
    assert raw.usage.completion_tokens > 0


def _schema() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "w", "schema": Weather.model_json_schema()}}


def test_a_model_comes_in_parts(instructor: Any, client: openai.OpenAI) -> None:
    asking = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    parts = list(
        asking.chat.completions.create_partial(
            model="any", messages=QUESTION, response_model=Weather, max_tokens=64, temperature=0
        )
    )
    assert parts[-1].city in ("Paris", "Rome") and parts[-1].degrees is not None


def test_errors_come_through(instructor: Any, client: openai.OpenAI) -> None:
    asking = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    with pytest.raises(Exception) as refusal:
        asking.chat.completions.create(
            model=PATH_LIKE, messages=QUESTION, response_model=Weather, max_retries=0
        )
    causes = [refusal.value, refusal.value.__cause__, refusal.value.__context__]
    inner = getattr(refusal.value.__cause__, "last_attempt", None)
    causes.append(inner.exception() if inner is not None else None)
    assert any(isinstance(cause, openai.NotFoundError) for cause in causes), repr(refusal.value)
