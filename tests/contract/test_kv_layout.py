"""The KV layout never changes which request gets a 400; a limited number of threads still adapts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cllm.backend.llama.context import request_share
from cllm.backend.llama.runner import LlamaRunner
from cllm.backend.llama.threads import default_threads
from cllm.config import EngineConfig


@pytest.mark.parametrize(
    ("cells", "parallel"), [(0, 2), (512, 1), (512, 2), (1536, 2), (2000, 3), (1000, 8), (5000, 7)]
)
@pytest.mark.parametrize("kind", ["dense", "sliding"])
def test_a_request_may_have_the_same_size_in_both_layouts(
    models: dict[str, Path], kind: str, cells: int, parallel: int
) -> None:
    allowed = {}
    for unified in (False, True):
        config = EngineConfig(
            model=str(models[kind]), ctx_size=cells, parallel=parallel, unified_kv=unified, threads=1
        )
        runner = LlamaRunner(config)
        allowed[unified] = runner.limits.request_tokens
        runner.close()
    assert allowed[False] == allowed[True]
    if cells:
        assert allowed[False] == request_share(cells, parallel)


def test_max_threads_is_a_limit_and_threads_a_number(models: dict[str, Path]) -> None:
    def context(**settings: Any) -> tuple[int, bool]:
        config = EngineConfig(model=str(models["dense"]), ctx_size=512, parallel=1, **settings)
        runner = LlamaRunner(config)
        governor = runner.workers.governor
        found = runner.api.llama_n_threads(runner.pointer), governor is not None
        runner.close()
        return found

    assert context(max_threads=1) == (1, True), "adapts, within the limit"
    assert context(threads=1) == (1, False)
    assert context(threads=1, max_threads=2) == (1, False)
    threads, adapts = context(max_threads=500)
    assert adapts and threads <= default_threads()
