"""What is remembered: by what, and what is not believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cllm.backend.llama.devices import Device
from cllm.backend.llama.fingerprint import cpu_name, tune_fingerprint
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.memory import MemoryFit, prepare
from cllm.config import EngineConfig
from cllm.errors import ConfigError
from cllm.tune.record import TuneMemory, TuneRecord
from cllm.tune.search import Tuning
from cllm.tune.space import fixed_settings
from cllm.tune.trial import sample_text
from tests.tiny_models import make_dense

FINGERPRINT = {"cpu": "c", "cores": "2", "library": "l", "model": "m", "parallel": "8", "fixed": ""}


def make_record(fingerprint: dict[str, str] = FINGERPRINT, **fields: object) -> TuneRecord:
    values: dict[str, object] = {
        "settings": {"flash_attention": False},
        "options": (),
        "seconds": {"prefill": 0.001},
        "speedup": 1.2,
        "noise": 0.02,
        "requests": 8,
        "short": 32,
        "long": 800,
        "created": "2026-01-01T00:00:00+00:00",
    }
    return TuneRecord(fingerprint=fingerprint, **{**values, **fields})  # type: ignore[arg-type]


@pytest.fixture
def memory(tmp_path: Path) -> TuneMemory:
    return TuneMemory(tmp_path / "tune")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that passes for a library: a fingerprint is made without loading it."""
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "libllama.so").write_bytes(b"one build")
    monkeypatch.setenv("CLLM_LIBRARY", str(folder))
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def test_what_is_saved_is_found_again(memory: TuneMemory) -> None:
    record = make_record()
    assert memory.find(FINGERPRINT) is None
    path = memory.save(record)
    assert memory.find(FINGERPRINT) == record
    assert memory.find({**FINGERPRINT, "parallel": "4"}) is None
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing half-written stays"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[1, 2]",
        b"null",
        b"{}",
        b"[" * 100_000,
    ],
)
def test_a_corrupt_file_is_not_there(memory: TuneMemory, content: bytes) -> None:
    memory.save(make_record()).write_bytes(content)
    assert memory.find(FINGERPRINT) is None
    assert memory.find_similar(FINGERPRINT) is None


@pytest.mark.parametrize(
    "change",
    [
        {"version": 99},
        {"identity": {**FINGERPRINT, "cpu": "another"}},
        {"settings": {"model": "/etc/passwd"}},
        {"settings": {"max_threads": -3}},
        {"settings": {"cache_type_k": "q99"}},
        {"settings": {"flash_attention": "perhaps"}},
        {"speedup": "fast"},
    ],
)
def test_a_foreign_or_impossible_record_is_not_believed(
    memory: TuneMemory, change: dict[str, object]
) -> None:
    path = memory.save(make_record())
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert memory.find(FINGERPRINT) is None


def test_the_newest_of_the_same_machine_and_model(memory: TuneMemory) -> None:
    for parallel, created in (("1", "2026-01-01"), ("4", "2026-03-01"), ("2", "2026-02-01")):
        memory.save(make_record({**FINGERPRINT, "parallel": parallel}, created=created))
    memory.save(make_record({**FINGERPRINT, "model": "other"}, created="2026-09-01"))
    found = memory.find_similar(FINGERPRINT)
    assert found is not None and found.fingerprint["parallel"] == "4"


def test_what_was_given_stays(tmp_path: Path, library: Path) -> None:
    asked = EngineConfig(model=str(make_dense(tmp_path / "a.gguf")), poll=70)
    tuning = Tuning(asked, asked, frozenset({"poll", "threads"}))
    tuning.record = make_record(settings={"flash_attention": False, "poll": 0, "max_threads": 1})
    assert (tuning.tuned.flash_attention, tuning.tuned.poll, tuning.tuned.max_threads) == (False, 70, 1)


def test_a_fingerprint_knows_the_model_by_its_content(tmp_path: Path, library: Path) -> None:
    first = make_dense(tmp_path / "a.gguf")
    (tmp_path / "elsewhere").mkdir()
    same = tmp_path / "elsewhere" / "b.gguf"
    same.write_bytes(first.read_bytes())
    other = make_dense(tmp_path / "c.gguf", context=2048)

    def fingerprint(path: Path, **settings: Any) -> dict[str, str]:
        fixed = settings.pop("fixed", {})
        return tune_fingerprint(EngineConfig(model=str(path), **settings), GgufHeader(path), fixed)

    assert fingerprint(first) == fingerprint(same)
    assert fingerprint(first) != fingerprint(other)
    assert fingerprint(first) != fingerprint(first, parallel=4) != fingerprint(first, ctx_size=4096)
    assert fingerprint(first, fixed={"threads": 1}) != fingerprint(first)
    before = fingerprint(first)
    (library / "libllama.so").write_bytes(b"another build")
    assert fingerprint(first) != before
    assert str(tmp_path) not in json.dumps(before), "no path is remembered"


def test_the_processors_name(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: A Fine CPU @ 2 GHz\n")
    assert cpu_name(file) == "A Fine CPU @ 2 GHz"
    assert cpu_name(tmp_path / "none")


def test_a_number_of_threads_of_zero_is_no_decision() -> None:
    given = frozenset({"threads", "poll", "host", "model"})
    assert fixed_settings(EngineConfig(threads=0, poll=0), given) == {"poll": 0}
    assert fixed_settings(EngineConfig(threads=3), given) == {"poll": 50, "threads": 3}


def test_a_provisional_result_is_used_and_measured_again_when_it_is_quiet(
    tmp_path: Path, library: Path
) -> None:
    config = EngineConfig(model=str(make_dense(tmp_path / "a.gguf")))
    tuning = Tuning(config, config, frozenset())
    assert tuning.is_due(0.0) and tuning.is_due(3.0), "nothing is known"
    tuning.memory.save(make_record(tuning.fingerprint, provisional="other programs used 1.0 cores"))
    tuning = Tuning(config, config, frozenset())
    assert tuning.tuned.flash_attention is False
    assert tuning.is_due(0.0) and tuning.is_due(None)
    assert not tuning.is_due(1.0), "it would be provisional again"
    tuning.memory.save(make_record(tuning.fingerprint))
    assert not Tuning(config, config, frozenset()).is_due(0.0)


def test_a_layout_that_would_change_which_request_is_refused_is_not_varied(
    tmp_path: Path, library: Path
) -> None:
    model = str(make_dense(tmp_path / "a.gguf"))
    small = EngineConfig(model=model, ctx_size=2048, parallel=4, max_request_tokens=512)
    large = EngineConfig(model=model, ctx_size=2048, parallel=4, max_request_tokens=513)
    assert "unified_kv" not in Tuning(small, small, frozenset()).fixed
    assert Tuning(large, large, frozenset()).fixed == {"unified_kv": False}


def test_what_the_probe_changed_is_not_tried(tmp_path: Path, library: Path) -> None:
    asked = EngineConfig(model=str(make_dense(tmp_path / "a.gguf")))
    ready = EngineConfig(model=asked.model, extra_buffers=False)
    assert Tuning(asked, ready, frozenset()).fixed == {"extra_buffers": False}


def test_values_of_few_bits_need_flash_attention(tmp_path: Path) -> None:
    model = str(make_dense(tmp_path / "a.gguf"))
    with pytest.raises(ConfigError, match="flash attention"):
        prepare(EngineConfig(model=model, cache_type_v="q8_0", flash_attention=False))
    header = GgufHeader(Path(model))
    full = MemoryFit(header, EngineConfig(model=model)).kv
    assert MemoryFit(header, EngineConfig(cache_type_k="f32", cache_type_v="f32")).kv == 2 * full
    assert MemoryFit(header, EngineConfig(cache_type_k="q8_0", cache_type_v="q8_0")).kv == full * 34 // 64


def test_the_sample_is_a_text_of_its_size() -> None:
    assert 900 < len(sample_text().split()) < 1300


def test_a_record_is_of_one_card_and_its_layers(tmp_path: Path, library: Path) -> None:
    asked = EngineConfig(model=str(make_dense(tmp_path / "a.gguf")))

    def tuning(description: str, free: int, **settings: Any) -> Tuning:
        devices = (Device("CUDA0", description, free, free, False),) if description else ()
        config = replace(asked, **settings)
        return Tuning(config, prepare(config, devices), frozenset(), devices=devices)

    card, other = tuning("A card", 1 << 34), tuning("Another", 1 << 34)
    assert card.fingerprint["devices"] == "A card: 3 of 3 layers"
    assert other.fingerprint["devices"] == "Another: 3 of 3 layers"
    assert tuning("A card", 1 << 34, gpu_layers=2).fingerprint["devices"] == "A card: 2 of 3 layers"
    assert tuning("", 0).fingerprint["devices"] == "" == tuning("A card", 1 << 20).fingerprint["devices"]
    record = make_record(card.fingerprint)
    card.memory.save(record)
    assert tuning("A card", 1 << 35).record == record, "free memory does not matter"
    assert tuning("Another", 1 << 34).record is None
    assert card.memory.find_similar(other.fingerprint) is None


@pytest.mark.parametrize(
    ("layers", "use"), [("auto", "all"), (2, "some"), (0, "none")], ids=["all", "some", "none"]
)
def test_a_trial_knows_how_much_lies_on_the_card(
    tmp_path: Path, library: Path, layers: int | str, use: str
) -> None:
    devices = (Device("CUDA0", "A card", 1 << 30, 1 << 30, False),)
    asked = EngineConfig(model=str(make_dense(tmp_path / "a.gguf")), gpu_layers=layers)
    ready = prepare(asked, devices)
    machine = Tuning(asked, ready, frozenset(), devices=devices)._machine(0.0)
    assert machine.gpu == use
    assert machine.fits(ready)
    assert machine.fits(replace(ready, batch_tokens=65536, flash_attention=False)) == (use == "none")
