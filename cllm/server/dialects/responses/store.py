"""The store of responses that a later request may continue."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from cllm.errors import NotFound

MAX_STORED = 1024  # responses of one tenant
NOT_STORED = (
    "this response is not stored here: it was made with store false, or deleted, or dropped to make room "
    "(--response-store-mb); send the whole conversation as input items"
)


class StoredResponse(msgspec.Struct, frozen=True):
    """A response as JSON, and what a conversation that continues it needs."""

    id: str
    previous: str | None
    body: bytes
    items: bytes  # of its input and its output, a JSON list

    @property
    def size(self) -> int:
        return len(self.body) + len(self.items)


class ResponseStore:
    """Stored responses in memory, those of each tenant apart, and as many bytes of each. 0 bytes: none.

    Those not used for longest are dropped first. A response refers to the one it continues, so using it
    counts for all before it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tenants: dict[str, OrderedDict[str, StoredResponse]] = {}

    def put(self, tenant: str, stored: StoredResponse) -> None:
        """Keep a response, unless it is larger than the whole store."""
        if stored.size > self._max_bytes:
            return
        kept = self._tenants.setdefault(tenant, OrderedDict())
        kept[stored.id] = stored
        size = sum(each.size for each in kept.values())
        while size > self._max_bytes or len(kept) > MAX_STORED:
            size -= kept.popitem(last=False)[1].size

    def get(self, tenant: str, response_id: str) -> StoredResponse:
        """A response; raises NotFound."""
        kept = self._tenants.get(tenant)
        if kept is None or response_id not in kept:
            raise NotFound(NOT_STORED)
        return kept[response_id]

    def get_chain(self, tenant: str, response_id: str) -> list[StoredResponse]:
        """A response and all it continues, the oldest first; raises NotFound where one of them is gone."""
        chain: list[StoredResponse] = []
        following: str | None = response_id
        while following is not None:
            chain.append(self.get(tenant, following))
            following = chain[-1].previous
        chain.reverse()
        for stored in chain:
            self._tenants[tenant].move_to_end(stored.id)
        return chain

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget a response; raises NotFound."""
        self.get(tenant, response_id)
        del self._tenants[tenant][response_id]

    def clear(self) -> int:
        """Forget the responses of all tenants; returns how many there were."""
        count = sum(map(len, self._tenants.values()))
        self._tenants.clear()
        return count
