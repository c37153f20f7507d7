"""Tuning session: find the record of a configuration, or measure it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cllm.backend.llama.context import request_share
from cllm.backend.llama.fingerprint import tune_fingerprint
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.memory import MemoryFit
from cllm.backend.llama.threads import default_threads
from cllm.build.build import cache_directory
from cllm.config import EngineConfig
from cllm.tune.record import TuneMemory, TuneRecord
from cllm.tune.search import Machine, Progress, Search
from cllm.tune.space import TUNABLE, fixed_settings
from cllm.tune.trial import TrialProcess

TRIAL = (sys.executable, "-m", "cllm.tune.trial_worker")


class Tuning:
    """The tunable part of a configuration, and its record if there is one.

    `asked` is the configuration as it was given, `ready` the same after the checks and the probe, `given` the
    fields that were set explicitly: those stay. Raises SetupError.
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
        # A setting that the probe had to change is not tried again.
        held = given | {name for name in TUNABLE if getattr(asked, name) != getattr(ready, name)}
        if ready.max_request_tokens > share:
            held |= {"unified_kv"}  # such a request fits into one of the layouts only
        self.config = ready
        self.given = frozenset(held)
        self.fixed = fixed_settings(ready, self.given)
        # The context as it was asked for: next time another size may fit into the memory.
        load = msgspec.structs.replace(ready, ctx_size=asked.ctx_size)
        self.fingerprint = tune_fingerprint(load, header, self.fixed)
        self.memory = TuneMemory(cache_directory() / "tune")
        self.record = self.memory.find(self.fingerprint)
        self.generates = f"{header.architecture}.pooling_type" not in header.metadata  # no embedding model
        self._longest = min(share, header.context_train)
        self._trial = tuple(trial)

    @property
    def tuned(self) -> EngineConfig:
        """The configuration with the tuned settings, if there is a record."""
        if self.record is None:
            return self.config
        held = self.given - ({"threads", "max_threads"} - self.fixed.keys())
        return self.record.applied_to(self.config, held)

    def is_due(self, others: float | None) -> bool:
        """True without a record, or with a provisional one while the machine is quiet."""
        if self.record is None:
            return self.generates
        return bool(self.record.provisional) and not self._machine(others).busy

    def measure(
        self, others: float | None, *, budget_s: float, kv_types: bool = False, progress: Progress
    ) -> TuneRecord:
        """Search, and save the record. Raises TuneFailed; OSError where it cannot be written."""
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
            self.record = search.run(self.fingerprint)
        self.memory.save(self.record)
        return self.record

    def _machine(self, others: float | None) -> Machine:
        return Machine(default_threads(), others, self._longest)


def with_remembered(asked: EngineConfig, ready: EngineConfig, given: frozenset[str]) -> EngineConfig:
    """`ready` with the settings of an earlier tuning; nothing is measured. Raises SetupError."""
    return Tuning(asked, ready, given).tuned if asked.tune else ready
