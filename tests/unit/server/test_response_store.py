"""The store of responses: bounded for each tenant, and apart from the others'."""

from __future__ import annotations

import json

import pytest
from pydantic import TypeAdapter

from cllm.errors import NotFound
from cllm.server.protocol.items import Item
from cllm.server.protocol.responses import ResponsesBody
from cllm.server.routes import responses
from cllm.server.routes.responses import ResponseStore, StoredResponse


def make(name: str, previous: str | None = None, size: int = 10) -> StoredResponse:
    return StoredResponse(name, previous, b"x" * size, b"", b"")


def names(store: ResponseStore, *asked: str, tenant: str = "") -> list[str]:
    found = []
    for name in asked:
        try:
            found.append(store.get(tenant, name).id)
        except NotFound:
            continue
    return found


def test_bytes_and_count_are_bounded_for_each_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_STORED", 3)
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
    monkeypatch.setattr(responses, "MAX_STORED", 4)
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
    ]
    body = ResponsesBody.model_validate({"input": items})
    adapter: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
    stored = adapter.dump_json(body.items, by_alias=True, exclude_none=True)
    again = ResponsesBody.model_validate({"input": json.loads(stored)})
    assert again.to_conversation() == body.to_conversation()
    text = ResponsesBody.model_validate({"input": "a"})
    later = ResponsesBody.model_validate({"input": "b", "instructions": "c"})
    assert [message["content"] for message in later.to_conversation(text.items).messages] == ["c", "a", "b"]
