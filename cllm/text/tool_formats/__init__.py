"""Tool calls as the families of models write them: one file each, chosen by the chat template."""

from __future__ import annotations

from cllm.text.tool_formats.base import Tool, ToolFormat
from cllm.text.tool_formats.declared import Hermes, Llama3, Mistral
from cllm.text.tool_formats.generic import Generic

__all__ = ["Tool", "ToolFormat", "get_tool_format"]


def get_tool_format(template: str | None) -> ToolFormat:
    """The first tool_format that the template was written for; the generic one suits any."""
    template = template or ""
    tool_formats: tuple[ToolFormat, ...] = (Mistral(), Hermes(), Llama3(), Generic(template))
    return next(tool_format for tool_format in tool_formats if tool_format.suits(template))
