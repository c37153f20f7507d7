"""Tuning as the entrances use it: for which model, library and machine; what is remembered; measure it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cllm.backend.llama.context import request_share
from cllm.backend.llama.fingerprint import tune_identity
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.memory import MemoryFit
from cllm.backend.llama.threads import cores_used_by_others, default_threads
from cllm.build.build import cache_directory
from cllm.config import EngineConfig
from cllm.tune.process import TrialProcess
from cllm.tune.record import TuneMemory, TuneRecord
from cllm.tune.search import Machine, Progress, Search
from cllm.tune.space import TUNABLE, fixed_settings

TRIAL = (sys.executable, "-m", "cllm.tune.trial_worker")


class Tuning:
    """What can be tuned of a configuration, and what is known of it already.

    `asked` is the configuration as it was given, `ready` what the checks and the probe made of it, `given`
    the fields that somebody set: those stay. Raises SetupError.
    """

    def __init__(
        self,
        asked: EngineConfig,
        ready: EngineConfig,
        given: frozenset[str],
        *,
        trial: Sequence[str] = TRIAL,
    ) -> None:
        header = GgufHeader(Path(ready.model))
        share = request_share(MemoryFit(header, ready).cells, ready.parallel)
        # What the probe had to change is not tried again.
        held = given | {name for name in TUNABLE if getattr(asked, name) != getattr(ready, name)}
        if ready.max_request_tokens > share:
            held |= {"unified_kv"}  # such a request fits into one of the layouts only
        self.config = ready
        self.given = frozenset(held)
        self.fixed = fixed_settings(ready, self.given)
        # The context as it was asked for: what fits into the memory now may not be what fits next time.
        load = msgspec.structs.replace(ready, ctx_size=asked.ctx_size)
        self.identity = tune_identity(load, header, self.fixed)
        self.memory = TuneMemory(cache_directory() / "tune")
        self.record = self.memory.find(self.identity)
        self.generates = f"{header.architecture}.pooling_type" not in header.metadata  # no embedding model
        self._longest = min(share, header.context_train)
        self._trial = tuple(trial)

    @property
    def tuned(self) -> EngineConfig:
        """The configuration with what is remembered, if anything is."""
        if self.record is None:
            return self.config
        held = self.given - ({"threads", "max_threads"} - self.fixed.keys())
        return self.record.applied_to(self.config, held)

    def is_due(self, others: float | None) -> bool:
        """True where nothing is known, or only something from a busy hour and the machine is quiet now."""
        if self.record is None:
            return self.generates
        return bool(self.record.provisional) and not self._machine(others).busy

    def measure(
        self, others: float | None, *, budget_s: float, kv_types: bool = False, progress: Progress
    ) -> TuneRecord:
        """Search, and remember the result. Raises TuneFailed; OSError where it cannot be written."""
        with TrialProcess(self._trial) as trial:
            search = Search(
                self.config,
                self.fixed,
                self._machine(others),
                trial.ask,
                budget_s=budget_s,
                kv_types=kv_types,
                progress=progress,
            )
            self.record = search.run(self.identity)
        self.memory.save(self.record)
        return self.record

    def _machine(self, others: float | None) -> Machine:
        return Machine(default_threads(), others, self._longest)


def with_remembered(asked: EngineConfig, ready: EngineConfig, given: frozenset[str]) -> EngineConfig:
    """`ready` with what an earlier tuning found; nothing is measured. Raises SetupError."""
    return Tuning(asked, ready, given).tuned if asked.tune else ready


def look_around() -> float | None:
    """How many cores other programs use, looked at for a moment."""
    return cores_used_by_others()
