"""OpenAI's dialect: the shape of its errors. The Responses API has frames of its own."""

from __future__ import annotations

from typing import Any

from cllm.errors import CllmError
from cllm.server.dialect import Dialect, encode_named, get_field, get_status


class OpenAIDialect(Dialect):
    """For OpenAI's SDKs and compatible clients."""

    name = "OpenAI"
    about = "For OpenAI's SDKs and compatible clients."
    prefix = "/v1/"
    types = {429: "rate_limit_error"}

    def make_error(self, error: CllmError) -> Any:
        kind = self.get_type(get_status(error))
        shown = {"message": error.message, "type": kind, "param": get_field(error), "code": error.code}
        return {"error": shown}


class ResponsesDialect(OpenAIDialect):
    """The Responses API: an error in a stream is an event with a name."""

    prefix = "/v1/responses/"

    def frame_error(self, error: CllmError) -> bytes:
        shown = {"code": error.code, "message": error.message, "param": get_field(error)}
        return encode_named("error", {"type": "error", "sequence_number": 0, **shown})


openai = OpenAIDialect()
responses = ResponsesDialect()
