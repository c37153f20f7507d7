"""Tool calls as the families of models write them: one file each, chosen by the chat template."""

from __future__ import annotations

from cllm.text.tool_formats.base import Dialect, Tool
from cllm.text.tool_formats.declared import Hermes, Llama3, Mistral
from cllm.text.tool_formats.generic import Generic

__all__ = ["Dialect", "Tool", "dialect_of"]


def dialect_of(template: str | None) -> Dialect:
    """The first dialect that the template was written for; the generic one suits any."""
    template = template or ""
    dialects: tuple[Dialect, ...] = (Mistral(), Hermes(), Llama3(), Generic(template))
    return next(dialect for dialect in dialects if dialect.suits(template))
