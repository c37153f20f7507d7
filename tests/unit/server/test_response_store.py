"""Stored responses: what a conversation that continues one reads back."""

from __future__ import annotations

import json

import msgspec
import pytest

from cllm.errors import InvalidRequest
from cllm.limits import MAX_CONTAINERS, MAX_MESSAGES
from cllm.server.dialects.responses import EXAMPLE, decode_items, make_conversation, make_stored
from cllm.server.dialects.responses_body import (
    OutputCustomCall,
    OutputFunctionCall,
    OutputReasoning,
    OutputReasoningItem,
    ResponsesBody,
)


def test_every_kind_of_item_is_read_back_as_it_was_stored() -> None:
    items = [
        {"role": "developer", "content": "In English."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "nothing"},
        {"type": "local_shell_call", "call_id": "2", "action": {"command": ["ls"], "env": None}},
        {"type": "local_shell_call_output", "call_id": "2", "output": {"code": 0}},
    ]
    body = ResponsesBody.parse({"input": items})
    output = [
        OutputReasoningItem("rs_1", "completed", [OutputReasoning("hm")]),
        *EXAMPLE.output,
        OutputFunctionCall("fc_1", "completed", "call_1", "look", '{"a": 1}'),
        OutputCustomCall("fc_2", "completed", "call_2", "patch", "*** Begin"),
    ]
    stored = make_stored(body, msgspec.structs.replace(EXAMPLE, output=output), "", 60)
    found = decode_items(stored.more)
    assert found[: len(items)] == body.items and stored.previous is None
    sent = msgspec.to_builtins(output)
    assert found[len(items) :] == ResponsesBody.parse({"input": sent}).items
    *_, last = ResponsesBody.parse({"input": "b"}).to_conversation(found).messages[:-1]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in last["tool_calls"]]
    assert (last["content"], last["reasoning_content"]) == ("AI is …", "hm")
    assert calls == [("look", '{"a": 1}'), ("patch", '{"input": "*** Begin"}')]


def test_history_comes_between_instructions_and_input() -> None:
    text = ResponsesBody.parse({"input": "a"})
    later = ResponsesBody.parse({"input": "b", "instructions": "c"})
    assert [message["content"] for message in later.to_conversation(text.items).messages] == ["c", "a", "b"]


TEXT = {"type": "input_text", "text": "a"}


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        ([{"role": "user", "content": "a"}] * (MAX_MESSAGES // 2), f"{MAX_MESSAGES + 1} items"),
        (
            [{"role": "user", "content": [TEXT] * (MAX_CONTAINERS // 8)}] * 4,
            "objects and lists, the limit is",
        ),
    ],
)
def test_stored_histories_are_counted_as_one_body(items: list[dict[str, object]], reason: str) -> None:
    """Sixteen small requests made a chain whose decoding stopped all streams for over a second."""
    half, body = json.dumps(items).encode(), ResponsesBody.parse({"input": "b"})
    with pytest.raises(InvalidRequest, match=f"previous_response_id: .*{reason}"):
        make_conversation(body, [half, half], "previous_response_id")
