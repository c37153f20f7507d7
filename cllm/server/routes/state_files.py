"""For operators: computed prefixes to a file and back."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from pydantic import ConfigDict, Field

from cllm.engine.engine import Engine
from cllm.engine.messages import StateFileDone
from cllm.server.schema import Body, Text


class StateFileBody(Body):
    """`POST /admin/prefixes/save` and `/admin/prefixes/restore`."""

    name: Text = Field(
        min_length=1,
        max_length=64,
        pattern="^[A-Za-z0-9][A-Za-z0-9_-]*$",
        description="Name of the file in --state-dir: letters, digits, '-' and '_'",
        examples=["warm"],
    )

    model_config = ConfigDict(json_schema_extra={"example": {"name": "warm"}})


def routes(engine: Engine) -> APIRouter:
    """The router over one engine. A large file takes its time: streams go on meanwhile."""
    router = APIRouter(tags=["operation"], prefix="/admin/prefixes")

    @router.post("/save")
    async def save(body: StateFileBody) -> dict[str, int]:
        """Write the computed prefixes in RAM to a file."""
        return _told(await asyncio.wrap_future(engine.save_prefixes(body.name)))

    @router.post("/restore")
    async def restore(body: StateFileBody) -> dict[str, int]:
        """Put the computed prefixes of a file back into RAM, as far as there is room."""
        return _told(await asyncio.wrap_future(engine.restore_prefixes(body.name)))

    return router


def _told(done: StateFileDone) -> dict[str, int]:
    return {"entries": done.entries, "tokens": done.tokens, "bytes": done.size, "skipped": done.skipped}
