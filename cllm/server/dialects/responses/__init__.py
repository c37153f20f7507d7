"""The dialects of the Responses API: OpenAI's, and llama-server's without the /v1."""

from __future__ import annotations

from cllm.errors import CllmError
from cllm.server.dialect import encode_named, get_field
from cllm.server.dialects.llama_server import LlamaServerDialect
from cllm.server.dialects.openai import OpenAIDialect


class ResponsesDialect(OpenAIDialect):
    """The Responses API: an error in a stream is an event with a name."""

    prefix = "/v1/responses/"

    def frame_error(self, error: CllmError) -> bytes:
        shown = {"code": error.code, "message": error.message, "param": get_field(error)}
        return encode_named("error", {"type": "error", "sequence_number": 0, **shown})


class LlamaResponsesDialect(LlamaServerDialect):
    """The same at llama-server's paths, with the shape of its errors."""

    prefix = "/responses/"

    def frame_error(self, error: CllmError) -> bytes:
        return responses.frame_error(error)


responses = ResponsesDialect()
llama_responses = LlamaResponsesDialect()
