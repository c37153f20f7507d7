"""Anthropic's dialect: the shape of its errors."""

from __future__ import annotations

from typing import Any

from cllm.errors import CllmError
from cllm.server.dialect import Dialect, encode_named, get_status


class AnthropicDialect(Dialect):
    """For Anthropic's SDKs and Claude Code."""

    name = "Anthropic"
    about = "For Anthropic's SDKs."
    prefix = "/v1/messages/"
    types = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
    id_header = "request-id"

    def make_error(self, error: CllmError) -> Any:
        return {
            "type": "error",
            "error": {"type": self.get_type(get_status(error)), "message": error.message},
        }

    def frame_error(self, error: CllmError) -> bytes:
        return encode_named("error", self.make_error(error))


anthropic = AnthropicDialect()
