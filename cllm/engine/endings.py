"""What is said of a request when it leaves the ledger: to its client and in the log."""

from __future__ import annotations

import logging

import msgspec

from cllm.engine.ticket import Ticket
from cllm.types import Delta, Usage

log = logging.getLogger(__name__)


def with_usage(ticket: Ticket, delta: Delta) -> Delta:
    """A terminal delta that says what the request cost; one made in the parent does not know it all."""
    if delta.usage is not None:
        return delta
    usage = Usage(prompt_tokens=ticket.request.input_tokens, completion_tokens=ticket.generated)
    return msgspec.structs.replace(delta, usage=usage)


def log_end(ticket: Ticket, delta: Delta, now: float) -> None:
    """One line per request, with nothing of what was said in it."""
    assert delta.usage is not None and delta.finish_reason is not None
    log.info(
        "request %s: %s%s, %d prompt tokens (%d cached), %d generated, "
        "queued %.3f s, first token %s, total %.3f s",
        delta.request_id,
        delta.finish_reason.value,
        f" ({delta.error.code})" if delta.error else "",
        delta.usage.prompt_tokens,
        delta.usage.cached_tokens,
        delta.usage.completion_tokens,
        (ticket.dispatched or now) - ticket.arrived,
        f"{ticket.first_token - ticket.arrived:.3f} s" if ticket.first_token else "never",
        now - ticket.arrived,
    )
