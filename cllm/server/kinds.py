"""Items that say by their `type` what they are: those that are not served are named in the refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BeforeValidator

NO_EYES = "only text is read: the model has no eyes or ears"


def kinds(*known: str, default: str | None = None, why: Mapping[str, str] | None = None) -> BeforeValidator:
    """Before a union told apart by `type`: one that is not `known` is refused by name.

    Where none is given it is the `default`. `why` gives reasons for types that others serve; the reason of
    `""` stands for all that are not listed.
    """
    reasons = why or {}

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kind = value.get("type")
        if kind is None:
            kind = default
        if isinstance(kind, str) and kind in known:
            return {**value, "type": kind}
        if kind is None:
            raise ValueError(f"'type' is missing in it; it may be {', '.join(known)}")
        reason = reasons.get(str(kind), reasons.get("", f"it may be {', '.join(known)}"))
        raise ValueError(f"type {str(kind)[:64]!r} is not served: {reason}")

    return BeforeValidator(check)
