"""Tool calls as the families of models write them: one file each, chosen by the chat template."""

from __future__ import annotations

from cllm.text.dialects.base import Dialect, Tool
from cllm.text.dialects.generic import Generic
from cllm.text.dialects.hermes import Hermes
from cllm.text.dialects.llama3 import Llama3
from cllm.text.dialects.mistral import Mistral

__all__ = ["Dialect", "Tool", "dialect_of"]


def dialect_of(template: str | None) -> Dialect:
    """The first dialect that the template was written for; the generic one suits any."""
    dialects: tuple[Dialect, ...] = (Mistral(), Hermes(), Llama3(), Generic())
    return next(dialect for dialect in dialects if dialect.suits(template or ""))
