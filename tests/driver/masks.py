"""Masks of single constraints, for tests that write an answer token by token."""

from __future__ import annotations

from cllm.errors import InvalidRequest
from cllm.testing import FakeVocabulary
from cllm.text.structured_output import Constraint, MaskBuilder
from cllm.types import TokenMask


def get_mask(builder: MaskBuilder, constraint: Constraint) -> TokenMask:
    """The tokens that a constraint allows next. Raises InvalidRequest when its grammar is exhausted."""
    (mask,) = builder.masks([constraint])
    if isinstance(mask, InvalidRequest):
        raise mask
    return mask


def takes_text(builder: MaskBuilder, constraint: Constraint, text: str) -> bool:
    """True where an answer may be this text, and end there."""
    for byte in text.encode():
        if constraint.complete or not get_mask(builder, constraint)[byte]:
            return False
        constraint.accept(byte)
    return constraint.complete or any(get_mask(builder, constraint)[end] for end in FakeVocabulary.ends)
