"""The scripted model: it answers by its script, and stop strings cut it as plain text would be cut."""

from __future__ import annotations

import doctest
from typing import Any

from hypothesis import given, settings

from cllm import testing
from cllm.config import EngineConfig
from cllm.core.engine_core import EngineCore
from cllm.messages import Report, StepReport
from cllm.testing import CHAT_TEMPLATE, FakeVocabulary, ScriptedRunner, call_tool, say
from cllm.text.chat_template import ChatTemplate
from cllm.text.prompt import Chat, PromptBuilder
from cllm.types import FinishReason, Prompt, Request, RequestOutput
from tests.profiles import examples
from tests.unit.text.test_detokenizer import oracle, woven


def answer(prompt: list[int], stop: tuple[str, ...] = ()) -> list[RequestOutput]:
    """The deltas of one request, beside another that says something else."""
    reports: list[Report] = []
    loop = EngineCore(ScriptedRunner(sequences=2, cells=4096), EngineConfig(draft_tokens=0), reports.append)
    other = list(say("something else").encode())
    for number, tokens in enumerate((prompt, other)):
        stops = stop if number == 0 else ()
        loop.scheduler.add(Request(id=str(number), prompt=Prompt(tuple(tokens)), max_tokens=500, stop=stops))
    while loop.scheduler.live:
        loop.step()
    loop.scheduler.check_idle()
    deltas = [delta for report in reports if isinstance(report, StepReport) for delta in report.outputs]
    assert "".join(delta.text for delta in deltas if delta.request_id == "1") == "something else"
    return [delta for delta in deltas if delta.request_id == "0"]


@settings(max_examples=examples(60), deadline=None)
@given(woven())
def test_one_byte_a_token_the_text_is_the_oracles(case: tuple[str, list[str], list[int]]) -> None:
    text, stops, _ = case
    deltas = answer(list(say(text).encode()), tuple(stops))
    expected, stopped_by = oracle(text, stops)
    assert "".join(delta.text for delta in deltas) == expected
    assert deltas[-1].stop == stopped_by and deltas[-1].finish_reason is FinishReason.STOP


def test_in_a_conversation_the_last_script_counts() -> None:
    prompts = PromptBuilder(FakeVocabulary(), ChatTemplate(CHAT_TEMPLATE))
    messages = (
        {"role": "user", "content": say("first")},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": say("second, é")},
    )
    deltas = answer([*prompts.tokenize(Chat(messages))[0].items])
    assert "".join(delta.text for delta in deltas) == "second, é"


def test_a_script_goes_on_with_each_turn_that_has_none() -> None:
    prompts = PromptBuilder(FakeVocabulary(), ChatTemplate(CHAT_TEMPLATE))
    call = call_tool("read", {"path": "é.txt"})
    function = {"name": "read", "arguments": {"path": "é.txt"}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{say('old')} then {say(call, 'done')}"}]
    spoken = []
    for _ in range(3):
        deltas = answer([*prompts.tokenize(Chat(tuple(messages)))[0].items])
        spoken.append("".join(delta.text for delta in deltas))
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]},
            {"role": "tool", "content": "text", "tool_call_id": "1"},
        ]
    assert spoken == [call, "done", "done"]


def test_a_failing_script_fails_alone_after_its_text() -> None:
    deltas = answer(list(say("so far", fails=True).encode()))
    assert "".join(delta.text for delta in deltas) == "so far"
    assert deltas[-1].finish_reason is FinishReason.ERROR and deltas[-1].error is not None


def test_the_documented_example_works() -> None:
    result = doctest.testmod(testing)
    assert result.attempted == 3 and result.failed == 0
