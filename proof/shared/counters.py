"""The server's counters, and what must be zero in one that is idle."""

from __future__ import annotations

from proof.evidence import Bar
from proof.shared.answers import Client

LEFT = ("leases", "cells in use", "waiting", "integrity failures")


def read_counters(client: Client) -> dict[str, float]:
    """Accepted and finished requests, and what must be zero in an idle server."""
    found = client.metrics()

    def total(prefix: str) -> float:  # over all models
        return sum(value for name, value in found.items() if name.startswith(prefix))

    finished = "cllm_requests_finished_total"
    outcomes = {
        outcome: sum(
            value
            for name, value in found.items()
            if name.startswith(finished) and f'outcome="{outcome}"' in name
        )
        for outcome in ("stop", "length", "cancelled")
    }
    return {
        "accepted": total("cllm_requests_accepted_total"),
        "finished": total(finished),
        "answered": outcomes["stop"] + outcomes["length"],
        "cancelled": outcomes["cancelled"],
        "leases": total("cllm_sequence_leases"),
        "cells in use": total("cllm_kv_cells_used"),
        "waiting": total("cllm_queue_requests"),
        "integrity failures": total("cllm_integrity_failures"),
        "restarts": total("cllm_engine_restarts_total"),
    }


def nothing_left(counters: dict[str, float]) -> Bar:
    """No slot, cell or request is left, and the integrity check never fired."""
    found = ", ".join(f"{name} {counters[name]:.0f}" for name in LEFT if counters[name])
    return Bar("leases, cells in use, waiting requests, integrity failures", "0", found or "0", not found)
