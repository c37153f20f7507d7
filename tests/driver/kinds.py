"""The kinds of runner every contract is tried on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cllm.backend.base import ModelRunner
from cllm.backend.llama.runner import LlamaRunner
from cllm.config import EngineConfig
from tests.driver.fake_runner import FakeRunner

Opened = Callable[..., ModelRunner]  # the fixture `opened`
THREADS = int(os.environ.get("CLLM_THREADS", "1"))  # two on a busy machine wait for each other


class Kind(NamedTuple):
    """A runner to run a contract on: the fake, or a tiny model on llama.cpp, in one layout of KV."""

    model: str
    unified: bool = False
    flash: bool = True

    @property
    def label(self) -> str:
        layout = "unified" if self.unified else "split"
        return f"{self.model}-{layout}{'' if self.flash else '-noflash'}"

    @property
    def native(self) -> bool:
        return not self.model.startswith("fake")

    @property
    def recurrent(self) -> bool:
        """Memory that cannot be cut: what is cut off is recomputed whole."""
        return self.model in ("recurrent", "fake-uncuttable") or self.model.startswith("hybrid")


FAKES = (Kind("fake"), Kind("fake", unified=True), Kind("fake-uncuttable"))
DENSE = Kind("dense")
SLIDING = Kind("sliding")
RECURRENT = Kind("recurrent")
HYBRID = Kind("hybrid")
HYBRID_ROLLBACK = Kind("hybrid-rollback")  # its states can be rolled back by some tokens
HYBRIDS = (HYBRID, HYBRID_ROLLBACK, Kind("hybrid-delta"))
NATIVE = (
    DENSE,
    Kind("dense", unified=True),
    Kind("dense", flash=False),
    Kind("dense", unified=True, flash=False),
    SLIDING,
    Kind("sliding", unified=True),
    Kind("sliding", flash=False),
    RECURRENT,
    Kind("recurrent", unified=True),
)
KINDS = (*FAKES, *NATIVE)
LAYOUTS = tuple(kind for kind in KINDS if kind.flash)  # for what does not depend on the attention kernel
NATIVE_LAYOUTS = tuple(kind for kind in NATIVE if kind.flash)


def open_runner(
    models: dict[str, Path],
    kind: Kind,
    *,
    sequences: int = 3,
    cells: int = 0,
    batch_tokens: int = 64,
    request_tokens: int = 0,
) -> ModelRunner:
    """A new runner; `cells` are KV cells in all, by default 512 for each sequence."""
    cells = cells or 512 * sequences
    if not kind.native:
        return FakeRunner(
            sequences=sequences,
            cells=cells,
            batch_tokens=batch_tokens,
            request_tokens=request_tokens,
            unified=kind.unified,
            trimmable=not kind.recurrent,
        )
    return LlamaRunner(
        EngineConfig(
            model=str(models[kind.model]),
            parallel=sequences,
            ctx_size=cells,
            max_request_tokens=request_tokens,
            threads=THREADS,
            batch_tokens=batch_tokens,
            flash_attention=kind.flash,
            unified_kv=kind.unified,
            draft_rollback=4 if kind.model in ("hybrid-rollback", "hybrid-delta") else 0,
            # Without flash attention the contracts are exact. Some CPUs (ARM) multiply f16 cells in f16.
            cache_type_k="f16" if kind.flash else "f32",
            cache_type_v="f16" if kind.flash else "f32",
        )
    )
