"""OpenAI's dialect: the shape of its errors."""

from __future__ import annotations

from typing import Any

from cllm.errors import CllmError
from cllm.server.dialect import Dialect, get_status


class OpenAIDialect(Dialect):
    """For OpenAI's SDKs and compatible clients."""

    name = "OpenAI"
    about = "For OpenAI's SDKs and compatible clients."
    prefix = "/v1/"
    types = {429: "rate_limit_error"}
    id_header = "x-request-id"

    def make_error(self, error: CllmError) -> Any:
        kind, field = self.get_type(get_status(error)), getattr(error, "field", None)
        return {"error": {"message": error.message, "type": kind, "param": field, "code": error.code}}


openai = OpenAIDialect()
