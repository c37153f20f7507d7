"""Autoscaling: how many replicas a model is to have, by the KV memory in use and what waits for a slot.

Serve calls `decide` in its controller, by name, with the figures of `Replica.record_autoscaling_stats`. It
applies the delays: none to add a replica, a minute of lower need before one is removed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

MAX_KV_USED = 0.6  # of all cells; beyond it, one more replica
KV_LEFT_FOR_FEWER = 0.3  # one less only where the others would have no more in use than this
SLOTS_LEFT_FOR_FEWER = 0.5  # likewise, of their slots


def count_replicas(
    now: int, kv_used: Collection[float], requests: float, waiting: float, slots: float
) -> int:
    """The replicas that are needed. `kv_used` is a share for each that reports, `slots` those of each."""
    reporting = len(kv_used)
    if not reporting or slots <= 0:
        return now
    needed = reporting
    if sum(kv_used) >= MAX_KV_USED * reporting:
        needed = reporting + 1
    if waiting > 0:
        needed = max(needed, reporting + math.ceil(waiting / slots))
    if needed > reporting:
        return max(now, needed)
    fewer = reporting - 1
    if fewer > 0 and (
        sum(kv_used) <= KV_LEFT_FOR_FEWER * fewer and requests <= SLOTS_LEFT_FOR_FEWER * slots * fewer
    ):
        return min(now, fewer)
    return now


def decide(context: Any) -> tuple[int, dict[str, Any]]:
    """Serve's policy function: the target number of replicas, and the state that it keeps for us."""
    figures: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}

    def total(name: str) -> float:
        return sum(figures.get(name, {}).values())

    slots = figures.get("slots", {})
    needed = count_replicas(
        context.target_num_replicas,
        tuple(figures.get("kv_used", {}).values()),
        total("requests"),
        total("waiting"),
        max(slots.values(), default=0.0),
    )
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(least, min(most, needed)), context.policy_state
