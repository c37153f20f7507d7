"""The store of responses: bounded for each tenant, and apart from the others'."""

from __future__ import annotations

import sys

import msgspec
import pytest

from cllm.errors import NotFound
from cllm.server.dialects.responses import (
    EXAMPLE,
    OutputCustomCall,
    OutputFunctionCall,
    OutputReasoning,
    OutputReasoningItem,
    ResponseStore,
    StoredResponse,
    decode_items,
    make_stored,
)
from cllm.server.dialects.responses_body import ResponsesBody


def make(name: str, previous: str | None = None, size: int = 10) -> StoredResponse:
    return StoredResponse(name, previous, b"x" * size, b"")


def names(store: ResponseStore, *asked: str, tenant: str = "") -> list[str]:
    found = []
    for name in asked:
        try:
            found.append(store.get(tenant, name).id)
        except NotFound:
            continue
    return found


def test_bytes_and_count_are_bounded_for_each_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[ResponseStore.__module__], "MAX_STORED", 3)
    store = ResponseStore(100)
    for name in "abcd":
        store.put("", make(name))
    store.put("other", make("e", size=100))
    assert names(store, *"abcde") == ["b", "c", "d"]
    assert names(store, *"abcde", tenant="other") == ["e"]
    store.put("", make("f", size=85))
    assert names(store, *"bcdf") == ["d", "f"]
    store.put("", make("too large", size=101))
    assert names(store, "d", "f", "too large") == ["d", "f"]


def test_what_was_deleted_or_cleared_or_never_there_is_not_found() -> None:
    store = ResponseStore(100)
    with pytest.raises(NotFound):
        store.delete("", "a")
    store.put("", make("a"))
    store.put("other", make("b"))
    store.delete("", "a")
    assert store.clear() == 1
    for tenant, name in (("", "a"), ("other", "b")):
        with pytest.raises(NotFound):
            store.delete(tenant, name)


def test_a_store_of_no_size_keeps_nothing() -> None:
    store = ResponseStore(0)
    store.put("", make("a"))
    with pytest.raises(NotFound, match="--response-store-mb"):
        store.get("", "a")


def test_a_chain_is_the_oldest_first_and_is_used_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[ResponseStore.__module__], "MAX_STORED", 4)
    store = ResponseStore(100)
    for name, previous in (("a", None), ("x", None), ("b", "a"), ("c", "b")):
        store.put("", make(name, previous))
    assert [each.id for each in store.get_chain("", "c")] == ["a", "b", "c"]
    store.put("", make("d", "c"))  # x was used before all of them
    assert names(store, *"axbcd") == ["a", "b", "c", "d"]
    with pytest.raises(NotFound):
        store.get_chain("other", "c")
    store.delete("", "a")
    with pytest.raises(NotFound, match="whole conversation"):
        store.get_chain("", "d")
    with pytest.raises(NotFound):
        store.delete("", "a")


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
    stored = make_stored(body, msgspec.structs.replace(EXAMPLE, output=output))
    found = decode_items(stored.items)
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
