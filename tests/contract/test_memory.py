"""The memory that is predicted from a header is what llama.cpp allocates and the processes hold."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.layers import Layers
from cllm.backend.llama.memory import MemoryFit, embedded_model, prepare
from cllm.backend.llama.runner import LlamaRunner
from cllm.config import EngineConfig
from tests.driver.engine import words
from tests.driver.runner import feed
from tests.driver.server import StartServer, find_workers
from tests.tiny_models import make_dense

MIB = 1 << 20
_BUFFER = re.compile(r"(\S+)\s+(KV|RS|model) buffer size = +([\d.]+) MiB")
LAYOUTS: dict[str, dict[str, object]] = {
    "split": {},
    "unified": {"unified_kv": True},
    "noflash": {"flash_attention": False},
    "q8_0": {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
    "slots": {"slots": 20, "batch_tokens": 128},
}
KINDS = (
    "dense",
    "sliding",
    "recurrent",
    "hybrid",
    "hybrid-rollback",
    "hybrid-delta",
    "experts",
    "compressed",
)
CASES = [(kind, "split") for kind in KINDS]
CASES += [(kind, layout) for kind in ("sliding", "hybrid", "compressed") for layout in list(LAYOUTS)[1:]]


def allocated(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> dict[str, float]:
    """Bytes of each kind of buffer, as llama.cpp logs them while it loads."""
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="llama.cpp"):
        LlamaRunner(config).close()
    sizes = {"model": 0.0, "repacked": 0.0, "KV": 0.0, "RS": 0.0}
    for buffer, kind, size in _BUFFER.findall(caplog.text):
        extra = kind == "model" and not buffer.endswith("Mapped")
        sizes["repacked" if extra else kind] += float(size) * MIB
    return sizes


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_the_sum_is_what_llama_allocates(
    models: dict[str, Path], kind: str, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = models[kind]
    settings = {"parallel": 8, "ctx_size": 16384, "threads": 1} | LAYOUTS[layout]
    config = EngineConfig(model=str(model), **settings)  # type: ignore[arg-type]
    fit = MemoryFit(GgufHeader(model), config)
    sizes = allocated(config, caplog)
    assert sizes["model"] and (sizes["KV"] or sizes["RS"]), caplog.text
    real = sizes["model"] + sizes["KV"] + sizes["RS"]
    assert 0.99 < (fit.model + fit.kv) / real < 1.01, sizes
    states = sum(layer.state for layer in Layers(GgufHeader(model)).layers)
    assert states * fit.slots == pytest.approx(sizes["RS"], abs=0.01 * MIB)


def test_the_sum_of_a_real_model(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(model=str(embedded_model()), parallel=1, ctx_size=512, threads=1)
    fit = MemoryFit(GgufHeader(Path(config.model)), config)
    sizes = allocated(config, caplog)
    assert fit.model == pytest.approx(sizes["model"], rel=0.01)
    assert fit.kv == pytest.approx(sizes["KV"], rel=0.01)


def test_a_model_in_several_files_is_loaded_by_the_name_of_any(
    models: dict[str, Path], tmp_path: Path
) -> None:
    make_dense(tmp_path / "split.gguf", split_tensors=8)
    last = sorted(tmp_path.glob("split-*.gguf"))[-1]
    answers, names = [], []
    for model in (last, models["dense"]):
        config = prepare(EngineConfig(model=str(model), parallel=1, ctx_size=512, threads=1))
        runner = LlamaRunner(config)
        answers.append(feed(runner, 0, words(0, 40), logprobs=4))
        names.append(runner.info.name)
        runner.close()
    assert answers[0] == answers[1] is not None
    assert names == ["split", "dense"]


def test_the_first_message_of_a_coding_agent_is_accepted_by_default(tmp_path: Path) -> None:
    model = make_dense(tmp_path / "long.gguf", context=131072)
    config = prepare(EngineConfig(model=str(model), threads=1))
    runner = LlamaRunner(config)
    assert runner.limits.request_tokens > 16_000 and runner.limits.sequences == config.parallel > 1
    runner.close()


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_the_sum_is_what_the_processes_hold(start: StartServer) -> None:
    # Weights that are repacked lie beside the mapped file, whose pages the system can drop.
    server = start("--parallel", "4", "--ctx-size", "8192", "--threads", "1", "--no-extra-buffers")
    server.generate("Once upon a time, ", 8)
    pid = server.process.pid
    real = sum(map(resident, (pid, *find_workers(pid, "engine"), *find_workers(pid, "tokenizer"))))
    config = prepare(EngineConfig(parallel=4, ctx_size=8192))
    fit = MemoryFit(GgufHeader(Path(config.model)), config)
    assert 0.9 < fit.needed / real < 1.15, f"{fit.describe()}; {real / MIB:.0f} MiB"
