"""Tool-call formats of model families; the chat template decides which one applies."""

from __future__ import annotations

from cllm.text.tool_formats.base import Tool, ToolFormat
from cllm.text.tool_formats.declared import Hermes, Llama3, Mistral
from cllm.text.tool_formats.generic import Generic

__all__ = ["Tool", "ToolFormat", "get_tool_format"]


def get_tool_format(template: str | None) -> ToolFormat:
    """The format that the chat template was written for; templates without tools get the generic one."""
    template = template or ""
    formats: tuple[ToolFormat, ...] = (Mistral(), Hermes(), Llama3(), Generic(template))
    return next(tool_format for tool_format in formats if tool_format.matches(template))
