"""Masks of single constraints, for tests that write an answer token by token."""

from __future__ import annotations

from cllm.errors import InvalidRequest
from cllm.text.structured_output import Constraint, MaskBuilder
from cllm.types import TokenMask


def get_mask(builder: MaskBuilder, constraint: Constraint) -> TokenMask:
    """The tokens that a constraint allows next. Raises InvalidRequest when its grammar is exhausted."""
    (mask,) = builder.masks([constraint])
    if isinstance(mask, InvalidRequest):
        raise mask
    return mask
