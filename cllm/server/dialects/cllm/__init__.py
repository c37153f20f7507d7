"""cllm's own dialect: a prompt in, text out; and what operators need."""

from __future__ import annotations

from typing import Any

from cllm.errors import CllmError
from cllm.server.dialect import Dialect, encode


class CllmDialect(Dialect):
    """cllm's own routes."""

    name = "cLLM"
    about = "cllm's own: a prompt in, text out. No chat template is applied."
    prefix = ""

    def make_error(self, error: CllmError) -> Any:
        return {"success": False, "error": error.code, "message": error.message}

    def frame_error(self, error: CllmError, request_id: str = "") -> bytes:
        return encode({"id": request_id, "error": error.code, "message": error.message, "done": True})


class OperationDialect(CllmDialect):
    """The routes of operators."""

    name = "operation"
    about = "Health, metrics, debugging and administration."
    prefix = "/admin/"


cllm = CllmDialect()
operation = OperationDialect()
