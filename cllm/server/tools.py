"""What the declarations of tools have in common, whichever API they came by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field

from cllm.server.schema import Text

ToolDescription = Annotated[
    Text | None,
    Field(
        max_length=1 << 14,
        description="What it does and when, for the model",
        examples=["The weather in a city, now"],
    ),
]


def check_tools(names: Sequence[str], chosen: Iterable[str], *, demanded: str = "") -> None:
    """Raises ValueError for names that are taken twice, and for a choice that is not there.

    `demanded` is the word by which some call is demanded, whichever it is.
    """
    if len(set(names)) < len(names):
        raise ValueError("tools: two of them have the same name")
    for name in chosen:
        if name not in names:
            raise ValueError(f"tool_choice: {name!r} is not among the tools")
    if demanded and not names:
        raise ValueError(f"tool_choice: {demanded} needs tools")
