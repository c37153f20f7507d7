"""The memory that a dry load sums up is what llama.cpp allocates and the processes hold."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cllm.backend.llama.dry_load import DryLoad
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.memory import MemoryFit, prepare
from cllm.backend.llama.runner import LlamaRunner
from cllm.config import EngineConfig
from cllm.errors import LibraryError, ModelFileError
from cllm.models.store import embedded_model
from tests.driver.engine import words
from tests.driver.runner import feed
from tests.driver.server import StartServer, find_workers
from tests.tiny_models import make_dense

MIB = 1 << 20
_BUFFER = re.compile(r"(\S+)\s+(KV|RS|model|compute) buffer size = +([\d.]+) MiB")
LAYOUTS: dict[str, dict[str, object]] = {
    "split": {},
    "unified": {"unified_kv": True},
    "noflash": {"flash_attention": False},
    "q8_0": {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
    "slots": {"slots": 20, "batch_tokens": 128},
    "rollback": {"draft_rollback": 4},
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


def allocated(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> dict[str, float]:
    """Bytes of each kind of buffer, as llama.cpp logs them while it loads."""
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="llama.cpp"):
        LlamaRunner(config).close()
    sizes = {"model": 0.0, "repacked": 0.0, "KV": 0.0, "RS": 0.0, "compute": 0.0}
    for buffer, kind, size in _BUFFER.findall(caplog.text):
        extra = kind == "model" and not buffer.endswith("Mapped")
        sizes["repacked" if extra else kind] += float(size) * MIB
    return sizes


@pytest.fixture(scope="module")
def dry() -> Iterator[DryLoad]:
    with DryLoad() as opened:
        yield opened


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", (*KINDS, "embedded"))
def test_a_dry_load_sums_up_what_llama_allocates(
    models: dict[str, Path], dry: DryLoad, kind: str, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = embedded_model() if kind == "embedded" else models[kind]
    settings = {"parallel": 8, "ctx_size": 16384, "threads": 1} | LAYOUTS[layout]
    config = EngineConfig(model=str(model), **settings)  # type: ignore[arg-type]
    found = dry.measure(config)["host"]
    sizes = allocated(config, caplog)
    assert sizes["model"] and (sizes["KV"] or sizes["RS"]), caplog.text
    # Logged with two digits. Beside weights that are laid out anew (AMX) the whole file is mapped, of which
    # only the rest is read.
    if sizes["repacked"]:
        assert sizes["repacked"] < found.model < sizes["repacked"] + sizes["model"]
    else:
        assert found.model == pytest.approx(sizes["model"], rel=0.01, abs=0.02 * MIB)
    assert found.kv == pytest.approx(sizes["KV"] + sizes["RS"], abs=0.02 * MIB)
    assert found.compute == pytest.approx(sizes["compute"], abs=0.02 * MIB)


def test_a_header_is_enough_for_a_dry_load(models: dict[str, Path], dry: DryLoad, tmp_path: Path) -> None:
    whole, head = models["experts"], tmp_path / "head.gguf"
    head.write_bytes(whole.read_bytes()[: GgufHeader(whole).header_bytes])
    os.truncate(head, whole.stat().st_size)
    settings = {"parallel": 2, "ctx_size": 4096}
    found = [dry.measure(EngineConfig(model=str(path), **settings)) for path in (whole, head)]  # type: ignore[arg-type]
    assert found[0] == found[1]


def test_a_model_that_llama_refuses_is_refused(models: dict[str, Path], dry: DryLoad, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(models["dense"].read_bytes().replace(b"llama.attention", b"llama.atention_"))
    with pytest.raises(ModelFileError, match=r"cannot load wrong\.gguf"):
        dry.measure(EngineConfig(model=str(wrong), parallel=1, ctx_size=512))
    assert dry.measure(EngineConfig(model=str(models["dense"]), parallel=1, ctx_size=512)), "it goes on"


def test_a_dry_load_that_dies_is_an_error(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with DryLoad() as dying, pytest.raises(LibraryError, match="it exited with code 1"):
        dying.measure(EngineConfig(model=str(models["dense"]), parallel=3, ctx_size=768))


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


def test_the_sum_is_what_the_processes_hold(start: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    server = start("--parallel", "4", "--ctx-size", "8192", "--threads", "1")
    server.generate("Once upon a time, ", 8)
    pid = server.process.pid
    real = sum(map(resident, (pid, *find_workers(pid, "engine"), *find_workers(pid, "tokenizer"))))
    config = prepare(EngineConfig(model=str(embedded_model()), parallel=4, ctx_size=8192))
    fit = MemoryFit(GgufHeader(Path(config.model)), config)
    # The mapped pages of weights that are laid out anew are not used again: the system can drop them.
    repacked = allocated(config, caplog)["repacked"]
    assert 0.9 < (fit.needed + repacked) / real < 1.15, f"{fit.describe()}; {real / MIB:.0f} MiB"
