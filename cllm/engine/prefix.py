"""Who has computed this before: beginnings shared between running sequences."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from cllm.backend.base import Backend
from cllm.engine.sequence import Sequence

log = logging.getLogger(__name__)

WORTH_COPYING = 64  # tokens; computing fewer costs no more than copying a stream


def find_donor(sequence: Sequence, running: Iterable[Sequence]) -> Sequence | None:
    """The running sequence that shares the longest beginning with this one, if it is worth a copy."""
    opening = sequence.tokens[:WORTH_COPYING]
    donors = [other for other in running if other.tokens[:WORTH_COPYING] == opening]
    best = max(donors, key=sequence.shared_with, default=None)
    return best if best is not None and sequence.shared_with(best) >= WORTH_COPYING else None


def take_over(backend: Backend, donor: Sequence, sequence: Sequence) -> None:
    """Copy the common beginning into the sequence's own, empty memory; what fails is computed instead."""
    shared = sequence.shared_with(donor)
    try:
        sequence.computed = backend.copy(donor.sequence_id, sequence.sequence_id, shared)
    except Exception:
        log.exception("request %s could not take over what request %s has computed", sequence.id, donor.id)
        backend.truncate(sequence.sequence_id, 0)
        sequence.computed = 0
    sequence.cached_tokens = sequence.computed
