"""OpenAI's conversations: items that are kept, and that responses continue."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest

from cllm.limits import MAX_MESSAGES, check
from cllm.server.body import Body, about
from cllm.server.dialects.openai import bodies, openai
from cllm.server.dialects.openai.batches import FULL, get_ends, get_jobs, read_page
from cllm.server.dialects.responses_body import Metadata, ResponseItem, take_items
from cllm.server.job_store import JobDatabase, StoredObject

ROUTE = "/v1/conversations"
_NOT_FOUND = {404: ("not_found", "there is no conversation with this id", "No such conversation")}
_PREFIXES = {"message": "msg", "reasoning": "rs"}  # of ids; those of calls and their outputs are fc
_encode, _replace = msgspec.json.Encoder().encode, msgspec.structs.replace
_decode = msgspec.json.Decoder(list[dict[str, Any]]).decode
decode_items = msgspec.json.Decoder(list[ResponseItem]).decode


Items = Annotated[
    Annotated[list[ResponseItem], Meta(max_length=MAX_MESSAGES)], about("Items to add", bodies.MESSAGES)
]


class ItemsBody(msgspec.Struct, Body, kw_only=True):
    """`POST /v1/conversations/{conversation_id}/items`."""

    EXAMPLE = {"items": bodies.MESSAGES}

    items: Items

    @classmethod
    def prepare(cls, value: dict[str, Any]) -> dict[str, Any]:
        return value | {name: take_items(value[name]) for name in ("items",) if name in value}


class ConversationBody(ItemsBody, kw_only=True):
    """`POST /v1/conversations`."""

    EXAMPLE = {"metadata": {"topic": "demo"}}
    OPTIONAL = True

    items: Items = []
    metadata: Annotated[
        Metadata, about("Returned unchanged: up to 16 texts", {"topic": "demo"}, max_length=16)
    ] = {}


class ConversationObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(msgspec.Struct):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


class ItemList(msgspec.Struct):
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


CONVERSATION = ConversationObject(id="conv_1", created_at=1767225600, metadata={"topic": "demo"})
_PART = {"type": "input_text", "text": bodies.QUESTION}
_ITEM = {"id": "msg_1", "status": "completed", "type": "message", "role": "user", "content": [_PART]}
_ITEMS = ItemList([_ITEM], "msg_1", "msg_1", False)


def make_items(items: Iterable[Any]) -> list[dict[str, Any]]:
    """Items as they are kept and listed: each with an id, texts as parts."""
    made = []
    for item in items:
        found = msgspec.to_builtins(item)
        prefix = _PREFIXES.get(found["type"], "fc")
        if isinstance(text := found.get("content"), str):
            kind = "output_text" if found.get("role") == "assistant" else "input_text"
            found["content"] = [{"type": kind, "text": text}]
        made.append({"id": f"{prefix}_{uuid.uuid4().hex}", "status": "completed", **found})
    return made


async def add_conversation(http: HttpRequest, body: ConversationBody) -> ConversationObject:
    """Store a new conversation. Raises StorageFailed, NotFound where nothing is stored."""
    store, tenant = get_jobs(http)
    now = time.time()
    new = ConversationObject(id=f"conv_{uuid.uuid4().hex}", created_at=int(now), metadata=body.metadata)
    more, expires = _encode(make_items(body.items)), now + http.app.state.response_ttl
    stored = StoredObject(new.id, tenant, now, expires, record=_encode(new), more=more)
    await store.run(JobDatabase.add, "conversation", stored)
    return new


async def load_items(http: HttpRequest, conversation_id: str) -> list[ResponseItem]:
    """The items of a conversation. Raises NotFound, InvalidRequest for too many."""
    store, tenant = get_jobs(http)
    stored = await store.run(JobDatabase.get, "conversation", tenant, conversation_id)
    items = decode_items(stored.more)
    check(len(items), MAX_MESSAGES, "items", "conversation", "start another one")
    return items


def append_items(database: JobDatabase, tenant: str, conversation_id: str, new: bytes, ttl: float) -> None:
    """Add encoded items to a conversation, which is kept for `ttl` from now on. Raises NotFound."""

    def append(old: StoredObject) -> StoredObject:
        joint = b"," if len(old.more) > 2 and len(new) > 2 else b""
        return _replace(old, expires=time.time() + ttl, more=old.more[:-1] + joint + new[1:])

    database.change("conversation", tenant, conversation_id, append)


@openai.post(ROUTE, CONVERSATION, errors={507: FULL})
async def create_conversation(body: ConversationBody, http: HttpRequest) -> ConversationObject:
    """Store a conversation, which responses continue by its id."""
    return await add_conversation(http, body)


@openai.get(f"{ROUTE}/{{conversation_id}}", CONVERSATION, errors=_NOT_FOUND)
async def retrieve_conversation(conversation_id: str, http: HttpRequest) -> ConversationObject:
    """Return what is known of a conversation."""
    store, tenant = get_jobs(http)
    stored = await store.run(JobDatabase.get, "conversation", tenant, conversation_id)
    return msgspec.json.decode(stored.record, type=ConversationObject)


@openai.delete(f"{ROUTE}/{{conversation_id}}", DeletedConversation("conv_1"), errors=_NOT_FOUND)
async def delete_conversation(conversation_id: str, http: HttpRequest) -> DeletedConversation:
    """Forget a conversation and its items."""
    store, tenant = get_jobs(http)
    await store.run(JobDatabase.delete, "conversation", tenant, conversation_id)
    return DeletedConversation(conversation_id)


@openai.get(f"{ROUTE}/{{conversation_id}}/items", _ITEMS, errors=_NOT_FOUND)
async def list_items(conversation_id: str, http: HttpRequest) -> ItemList:
    """List the items of a conversation, the newest first."""
    store, tenant = get_jobs(http)
    limit, after, oldest = read_page(http, 20)
    stored = await store.run(JobDatabase.get, "conversation", tenant, conversation_id)
    items = _decode(stored.more)[:: 1 if oldest else -1]
    begin = next((index + 1 for index, item in enumerate(items) if item["id"] == after), 0)
    data = items[begin : begin + limit]
    return ItemList(data, *get_ends([each["id"] for each in data]), len(items) > begin + limit)


@openai.post(f"{ROUTE}/{{conversation_id}}/items", _ITEMS, errors={**_NOT_FOUND, 507: FULL})
async def create_items(conversation_id: str, body: ItemsBody, http: HttpRequest) -> ItemList:
    """Add items to a conversation."""
    store, tenant = get_jobs(http)
    data, ttl = make_items(body.items), http.app.state.response_ttl
    encoded = _encode(data)

    def add(database: JobDatabase) -> None:
        database.check(len(encoded), tenant)
        append_items(database, tenant, conversation_id, encoded, ttl)

    await store.run(add)
    return ItemList(data, *get_ends([each["id"] for each in data]), False)
