"""Background answers: routes called without a connection, and answers that an earlier server left."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from cllm.errors import CllmError, NotFound
from cllm.frontend.async_calls import CALLER, Caller
from cllm.frontend.engine_registry import ModelLease
from cllm.server.dialect import Route
from cllm.server.job_store import JobDatabase, JobStore, StoredObject
from cllm.server.keys import KeyRing
from cllm.server.middleware import LEASES, ROUTE_SEND
from cllm.types import TenantLimits

log = logging.getLogger(__name__)
RETRY_S = 1.0  # after a refusal for want of capacity
MAX_ATTEMPTS = 3  # at an answer: one that ends servers must end itself
ATTEMPT_EVENTS = 1_000_000  # an attempt numbers its events from a multiple of this on


class CallRoute(Protocol):
    """Calls a route for a tenant, without a connection."""

    async def __call__(self, route: Route, tenant: str, body: bytes, **state: Any) -> Response: ...


async def call_route(
    app: Any, keys: KeyRing, route: Route, tenant: str, body: bytes, **state: Any
) -> Response:
    """What the route answers to a request of a tenant. There is no connection, and so no disconnect."""
    leases: list[ModelLease] = []
    messages = deque([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        if messages:
            return messages.popleft()
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    limits = keys.tenants.get(tenant) or TenantLimits(name=tenant)
    state = {"tenant": limits, "dialect": route.dialect, **state}
    scope = {"type": "http", "method": "POST", "path": route.path, "path_params": {}, "query_string": b""}
    more = {"headers": [], "app": app, "state": state, LEASES: leases, ROUTE_SEND: None}
    CALLER.set(Caller(tenant))
    try:
        return await route.respond(Request({**scope, **more}, receive))
    finally:
        for lease in leases:
            lease.release()


class BackgroundAnswers:
    """Takes up the background answers that were not made when the server ended."""

    def __init__(self, call: CallRoute, route: Route, store: JobStore, keys: KeyRing) -> None:
        self._call, self._route, self._store, self._keys = call, route, store, keys
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Take up all of them, the oldest first. An answer that cannot be made ends with the reason."""
        for stored in await self._store.run(JobDatabase.list_active, "response"):
            self._tasks[stored.id] = asyncio.ensure_future(self._take_up(stored))
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def stop(self, response_id: str) -> None:
        """Do not take up an answer."""
        if (task := self._tasks.get(response_id)) is not None:
            task.cancel()

    async def _take_up(self, stored: StoredObject) -> None:
        try:
            message = f"the server ended {MAX_ATTEMPTS} times while this response was made"
            if not self._keys.allows(stored.tenant):
                message = "the API key of this response was removed"
            elif stored.active < MAX_ATTEMPTS:
                while True:
                    answer = await self._call(self._route, stored.tenant, stored.more, response=stored)
                    if answer.status_code == 200:
                        return
                    if answer.status_code not in (429, 503):
                        break
                    await asyncio.sleep(RETRY_S)
                message = msgspec.json.decode(answer.body)["error"]["message"]
            fail = partial(end_response, status="failed", message=message)
            await self._store.run(JobDatabase.change, "response", stored.tenant, stored.id, fail)
        except NotFound:
            pass  # it was deleted meanwhile
        except Exception as error:
            unexpected = not isinstance(error, CllmError)
            log.error("response %s was not taken up: %s", stored.id, error, exc_info=unexpected)


def end_response(stored: StoredObject, *, status: str, message: str = "") -> StoredObject:
    """A background answer that ends without having been made."""
    if not stored.active:
        return stored
    record = msgspec.json.decode(stored.record) | {"status": status}
    if message:
        record["error"] = {"code": "server_error", "message": message}
    return msgspec.structs.replace(stored, active=False, record=msgspec.json.encode(record), more=b"[]")
