"""Ollama's dialect: the shape of its errors, and streams of lines of JSON."""

from __future__ import annotations

from typing import Any

from cllm.errors import CllmError
from cllm.server.dialect import Dialect, encode_line


class OllamaDialect(Dialect):
    """For Ollama's clients."""

    name = "Ollama"
    about = "For Ollama's clients that speak no other API; names may end in `:latest`."
    prefix = "/api/"

    def make_error(self, error: CllmError) -> Any:
        return {"error": error.message}

    def frame_error(self, error: CllmError) -> bytes:
        return encode_line(self.make_error(error))


ollama = OllamaDialect()
