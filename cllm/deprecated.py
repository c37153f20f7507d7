"""Deprecated names that keep working. Old name: new name."""

from __future__ import annotations

from collections.abc import Mapping

METRICS: Mapping[str, str] = {
    "cllm_parks": "cllm_preemptions",
    "cllm_resumes": "cllm_swap_ins",
    "cllm_parked_ram_bytes": "cllm_swapped_ram_bytes",
    "cllm_kv_move_seconds": "cllm_kv_transfer_seconds",
}
FLAGS: Mapping[str, str] = {
    "park_mb": "swap_space_mb",
}
