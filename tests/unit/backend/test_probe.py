"""The record of a probe: kept whole, and one that cannot be read only means another probe."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from cllm.backend.llama import probe
from cllm.backend.llama.probe import ProbeResult, find_working
from cllm.config import EngineConfig


class Machine:
    """A library on which the first `failing` settings crash; counts the probes."""

    def __init__(self, failing: int = 0) -> None:
        self.failing = failing
        self.probes = 0

    def run_probe(self, config: EngineConfig) -> ProbeResult:
        self.probes += 1
        return ProbeResult(passed=self.probes > self.failing, detail="it was ended by SIGILL")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    library = tmp_path / "library"
    library.mkdir()
    (library / "libllama.so").write_bytes(b"one build")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("CLLM_LIBRARY", str(library))
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path / "cache"))
    return EngineConfig(model=str(tmp_path / "model.gguf"))


def start(config: EngineConfig, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setattr(probe, "run_probe", machine.run_probe)
    return find_working(config, lambda _: None)


def test_what_passed_is_remembered(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(failing=1)
    first = start(config, machine, monkeypatch)
    assert not first.extra_buffers and machine.probes == 2
    assert start(config, machine, monkeypatch) == first
    assert machine.probes == 2
    (record,) = (Path(os.environ["CLLM_CACHE_DIR"]) / "probes").iterdir()
    assert record.suffix == ".json", "nothing half-written stays"


@pytest.mark.parametrize(
    "content",
    [b"", b'{"chosen": 1, "tok', b"\xff\xfe", b"null", b"[1]", b'{"chosen": 7}', b'{"chosen": -1}', b"{}"],
)
def test_a_half_written_record_means_another_probe(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine()
    start(config, machine, monkeypatch)
    (record,) = (Path(os.environ["CLLM_CACHE_DIR"]) / "probes").iterdir()
    whole = record.read_bytes()
    record.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert start(config, machine, monkeypatch) == config
    assert machine.probes == 2
    assert [line.message.partition(":")[0] for line in caplog.records] in (
        ["an unreadable probe record is ignored"],
        [],  # well-formed, of settings that there are not
    )
    assert record.read_bytes() == whole


def test_a_probe_cut_short_while_it_writes_leaves_the_old_record(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        assert start(config, machine, patch) == config, "the server starts all the same"
    assert not list((Path(os.environ["CLLM_CACHE_DIR"]) / "probes").iterdir())
    assert start(config, machine, monkeypatch) == config and machine.probes == 2
