"""llama-server's dialect: the shape of its errors."""

from __future__ import annotations

from typing import Any

from cllm.errors import CllmError, ContextLengthExceeded
from cllm.server.dialect import Dialect, get_status


class LlamaServerDialect(Dialect):
    """For scripts written for llama-server."""

    name = "llama-server"
    about = "llama.cpp's own server: scripts written for it run unchanged."
    prefix = "/slots/"
    types = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        501: "not_supported_error",
        503: "unavailable_error",
    }

    def make_error(self, error: CllmError) -> Any:
        status = get_status(error)
        shown = {"code": status, "message": error.message, "type": self.get_type(status)}
        if isinstance(error, ContextLengthExceeded):
            shown["type"] = "exceed_context_size_error"
            shown |= {"n_prompt_tokens": error.prompt_tokens, "n_ctx": error.limit}
        return {"error": shown}


llama_server = LlamaServerDialect()
