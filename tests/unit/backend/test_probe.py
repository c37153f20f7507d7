"""The record of a probe: kept whole, and one that cannot be read only means another probe."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import pytest

from cllm.backend.llama import probe
from cllm.backend.llama.placement import Device, wants_gpu
from cllm.backend.llama.probe import (
    ProbeResult,
    find_ready,
    find_working,
    loaded_variant,
    settings_to_try,
    unused_features,
)
from cllm.config import EngineConfig
from cllm.errors import ConfigError, LibraryError, ModelFileError

NEOVERSE = "CPU : NEON = 1 | ARM_FMA = 1 | FP16_VA = 1 | DOTPROD = 1 | LLAMAFILE = 1 | REPACK = 1 | "


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
    return EngineConfig(model=str(tmp_path / "model.gguf"), extra_buffers=True)


def start(config: EngineConfig, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setattr(probe, "run_probe", machine.run_probe)
    return find_working(config, lambda _: None)


def test_what_passed_is_remembered(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(failing=1)
    first = start(config, machine, monkeypatch)
    assert not first.own_kernels and first.extra_buffers and machine.probes == 2
    assert start(config, machine, monkeypatch) == first
    assert machine.probes == 2
    (record,) = (Path(os.environ["CLLM_CACHE_DIR"]) / "probes").iterdir()
    assert record.suffix == ".json", "nothing half-written stays"


def test_a_model_is_known_by_its_content(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, model = Machine(), Path(config.model)
    start(config, machine, monkeypatch)
    moved = model.rename(model.with_name("moved.gguf"))
    start(msgspec.structs.replace(config, model=str(moved)), machine, monkeypatch)
    assert machine.probes == 1
    moved.write_bytes(b"GGML")
    start(msgspec.structs.replace(config, model=str(moved)), machine, monkeypatch)
    assert machine.probes == 2


def test_settings_that_no_library_serves_are_probed_once(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(failing=3)
    failed = ProbeResult(False, f"{probe.WRONG_SETTINGS} draft_model: of another vocabulary")
    monkeypatch.setattr(machine, "run_probe", lambda config: failed)
    with pytest.raises(ConfigError, match=r"^draft_model: of another vocabulary$"):
        start(config, machine, monkeypatch)


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


H200 = Device("CUDA0", "NVIDIA H200", 1, 2, False)


def install_gpu(monkeypatch: pytest.MonkeyPatch, *devices: Device) -> None:
    """A module was built, and the library lists these devices with it."""
    monkeypatch.setattr(probe, "may_use_gpu", lambda: True)
    monkeypatch.setattr(probe, "list_devices", lambda: devices)


def test_a_gpu_that_fails_is_left_out_with_one_warning_and_tried_at_the_next_start(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_gpu(monkeypatch, H200)
    machine = Machine(failing=2)
    for probes in (1, 2):
        assert start(config, machine, monkeypatch) == msgspec.structs.replace(config, gpu_layers=0)
        assert machine.probes == probes
        (line,) = caplog.messages
        assert line.endswith("SIGILL; serving without the GPU (--gpu-layers 0), which is slower")
        caplog.clear()
    for _ in range(2):
        assert start(config, machine, monkeypatch) == config and machine.probes == 3
    assert not caplog.messages


def test_a_gpu_that_cannot_load_the_model_may_not_be_the_files_fault(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_gpu(monkeypatch, H200)
    wrong = ProbeResult(False, "model: llama.cpp cannot load model.gguf")
    tried: list[bool] = []

    def run(attempt: EngineConfig, passes: bool) -> ProbeResult:
        tried.append(wants_gpu(attempt))
        return ProbeResult(True) if passes and not wants_gpu(attempt) else wrong

    monkeypatch.setattr(probe, "prepare", lambda asked: asked)
    monkeypatch.setattr(probe, "run_probe", lambda attempt: run(attempt, False))
    with pytest.raises(ModelFileError, match="cannot load"):
        find_ready(config, lambda _: None)
    assert tried == [True, False], "a file that is wrong is tried no further"
    monkeypatch.setattr(probe, "run_probe", lambda attempt: run(attempt, True))
    assert not wants_gpu(find_ready(config, lambda _: None))


def test_where_the_library_lists_no_gpu_none_is_tried(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_gpu(monkeypatch)
    machine = Machine()
    assert not wants_gpu(start(config, machine, monkeypatch)) and machine.probes == 1
    assert [name for name, _ in settings_to_try(config)] == [
        "as configured",
        "with llama.cpp's kernels (--no-own-kernels)",
        "without repacked weights (--no-extra-buffers)",
        "without flash attention, one thread",
    ]


def test_another_gpu_is_probed_again(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    for device in (H200, H200._replace(description="NVIDIA B200"), H200._replace(free=0)):
        install_gpu(monkeypatch, device)
        start(config, machine, monkeypatch)
    assert machine.probes == 2, "free memory is no part of what a GPU is"


def test_without_the_gpu_the_settings_are_prepared_for_the_hosts_memory(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_gpu(monkeypatch, H200)

    def prepare(asked: EngineConfig) -> EngineConfig:
        return msgspec.structs.replace(asked, ctx_size=1_000_000 if wants_gpu(asked) else 4096)

    monkeypatch.setattr(probe, "prepare", prepare)
    monkeypatch.setattr(probe, "run_probe", lambda attempt: ProbeResult(not wants_gpu(attempt), "SIGABRT"))
    assert find_ready(config, lambda _: None) == msgspec.structs.replace(config, gpu_layers=0, ctx_size=4096)
    monkeypatch.setattr(probe, "run_probe", lambda _: ProbeResult(True))
    big = msgspec.structs.replace(config, threads=2)
    assert find_ready(big, lambda _: None) == msgspec.structs.replace(big, ctx_size=1_000_000)


def test_a_gpu_on_which_a_dry_load_dies_is_left_out(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare(asked: EngineConfig) -> EngineConfig:
        if wants_gpu(asked):
            raise LibraryError("llama.cpp cannot sum up the memory of the model: it was ended by SIGABRT")
        return asked

    monkeypatch.setattr(probe, "prepare", prepare)
    monkeypatch.setattr(probe, "run_probe", lambda _: ProbeResult(True))
    install_gpu(monkeypatch, H200)
    assert (
        not wants_gpu(find_ready(config, lambda _: None))
        and "SIGABRT; serving without the GPU" in caplog.text
    )
    install_gpu(monkeypatch)
    with pytest.raises(LibraryError, match="SIGABRT"):
        find_ready(config, lambda _: None)


def test_the_variant_is_the_one_that_is_mapped(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    assert loaded_variant(maps) is None
    maps.write_text("ffff r-xp 0 fe:00 1   /a/libggml-base.so\nffff r-xp 0 fe:00 1   /a/libggml-cpu.so\n")
    assert loaded_variant(maps) is None
    maps.write_text("ffff r-xp 0 fe:00 1   /a/libggml-cpu-armv8.2_2.so\nffff r-xp 0 fe:00 1   /a/x.so\n")
    assert loaded_variant(maps) == "armv8.2_2"


def test_what_has_kernels_and_was_not_compiled_in_is_unused() -> None:
    assert unused_features({"asimd", "asimddp", "asimdhp", "crc32"}, NEOVERSE) == []
    assert unused_features({"asimddp", "asimdhp", "i8mm", "sve", "bf16"}, NEOVERSE) == ["i8mm", "sve"]
    assert unused_features({"avx", "avx2"}, "CPU : SSE3 = 1 | AVX = 1 | ") == ["avx2"]
