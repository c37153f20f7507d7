"""Kernels: what is decided by measured speeds, and what is remembered of them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from cllm.backend.llama import kernels
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.kernels import (
    Speed,
    TypeSpeed,
    choose_buffers,
    count_weights,
    describe_types,
    measure_quiet,
    repacking_pays,
    time_types,
)
from cllm.backend.llama.threads import CpuTimes
from cllm.config import EngineConfig
from cllm.errors import LibraryError
from tests.tiny_models import make_dense

EMBEDDED = {"Q4_1": 106_168_320, "Q8_0": 28_311_552}
Q4_K_M = {"Q4_K": 80, "Q6_K": 20}


def plain(*figures: float) -> TypeSpeed:
    return TypeSpeed(Speed(*figures))


# µs a million weights and token: prompt, 8 rows, one row.
VNNI = {  # one thread of a Xeon with AVX-512 VNNI and without AMX
    "Q4_1": plain(82.2, 84.8, 107.1),
    "Q8_0": plain(35.0, 47.0, 121.1),
    "Q4_0": TypeSpeed(Speed(37.9, 42.2, 93.3), Speed(25.2, 31.7, 63.9)),
    "Q4_K": TypeSpeed(Speed(19.6, 53.8, 83.3), Speed(20.3, 28.4, 61.2)),
    "Q6_K": plain(23.3, 79.3, 116.0),
}
# Not recorded: what would be seen with a kernel for both types, and where memory is the limit of decode.
BOTH = {
    "Q4_1": TypeSpeed(Speed(60.0, 60.0, 60.0), Speed(4.0, 9.0, 40.0)),
    "Q8_0": TypeSpeed(Speed(30.0, 40.0, 60.0), Speed(4.0, 10.0, 55.0)),
}
TILED = {"Q4_K": TypeSpeed(Speed(4.0, 9.0, 20.0), Speed(9.0, 10.0, 20.0)), "Q6_K": plain(5.0, 9.0, 20.0)}


@pytest.mark.parametrize(
    ("weights", "speeds", "repack"),
    [
        ({"Q4_0": 1}, VNNI, True),
        (EMBEDDED, BOTH, True),
        (Q4_K_M, VNNI, True),
        (Q4_K_M, TILED, False),
        ({"Q6_K": 1}, TILED, True),  # none for them, so it makes no difference
        ({"Q6_K": 95, "Q4_K": 5}, TILED, True),
    ],
)
def test_weights_stay_plain_only_where_that_is_faster(
    weights: dict[str, int], speeds: dict[str, TypeSpeed], repack: bool
) -> None:
    assert repacking_pays(weights, speeds) is repack


class Process:
    """The process that measures: each type takes its place in `measured`."""

    def __init__(self, used: int | None = None) -> None:
        self.asked: list[list[str]] = []
        self._used = used

    def run(self, module: str, data: bytes, limit_s: float) -> bytes:
        types, threads = json.loads(data)
        self.asked.append(types)
        speeds = {name: VNNI.get(name, plain(1.0, 1.0, 1.0)) for name in types}
        return json.dumps((speeds, self._used or threads)).encode()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    library = tmp_path / "library"
    library.mkdir()
    monkeypatch.setenv("CLLM_LIBRARY", str(library))
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def test_types_are_timed_together_and_once_for_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process()
    monkeypatch.setattr(kernels, "run_apart", process.run)
    for types, threads in ((["Q8_0"], 2), (["Q8_0", "Q4_1"], 2), (["Q4_1"], 2), (["Q8_0"], 2), (["Q4_1"], 1)):
        speeds = time_types(types, threads)
        assert {name: speeds[name] for name in types} == {name: VNNI[name] for name in types}
    assert process.asked == [["Q8_0"], ["Q4_1", "Q8_0"], ["Q4_1"]]


@pytest.mark.parametrize("content", [b"", b'{"Q8_0": [[1', b"\xff", b"[]", b'{"Q8_0": [[1, 2], null]}'])
def test_an_unreadable_record_is_measured_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    process = Process()
    monkeypatch.setattr(kernels, "run_apart", process.run)
    for _ in range(2):
        time_types(["Q8_0"], 2)
        (record,) = cache.iterdir()
        whole = record.read_bytes()
        record.write_bytes(content)
    assert process.asked == [["Q8_0"]] * 2 and whole


def test_timings_of_a_busy_machine_are_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(used=1)
    monkeypatch.setattr(kernels, "run_apart", process.run)
    for _ in range(2):
        assert time_types(["Q8_0"], 2)["Q8_0"] == VNNI["Q8_0"]
    assert process.asked == [["Q8_0"]] * 2 and not cache.exists()


@pytest.mark.parametrize(("others", "used"), [(0.1, 2), (1.0, 1)])
def test_threads_on_busy_cores_are_not_measured(
    monkeypatch: pytest.MonkeyPatch, others: float, used: int
) -> None:
    times = iter((CpuTimes(10.0, 5.0, 1.0), CpuTimes(11.0, 7.0 + others, 3.0)))
    monkeypatch.setattr(kernels, "read_cpu_times", lambda cores: next(times))
    monkeypatch.setattr(kernels, "measure", lambda types, threads: {types[0]: plain(threads, 1, 1)})
    assert measure_quiet(["Q8_0"], 2) == ({"Q8_0": plain(used, 1, 1)}, used)


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(model=str(make_dense(tmp_path / "dense.gguf")), threads=1)


def test_given_buffers_are_kept_and_nothing_is_timed(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process()
    monkeypatch.setattr(kernels, "run_apart", process.run)
    for given in (True, False):
        asked = EngineConfig(model="none.gguf", extra_buffers=given)
        assert choose_buffers(asked) == asked
    assert not process.asked
    assert choose_buffers(config).extra_buffers is True and process.asked == [["F32"]]


def test_without_timings_weights_are_repacked(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def die(*_: object) -> bytes:
        raise LibraryError("it was ended by SIGILL")

    monkeypatch.setattr(kernels, "run_apart", die)
    with caplog.at_level(logging.WARNING):
        assert choose_buffers(config).extra_buffers is True
    (line,) = caplog.messages
    assert line.endswith("so weights are repacked: it was ended by SIGILL")


def test_types_are_described_with_a_faster_one(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "run_apart", Process().run)
    header = GgufHeader(Path(config.model))
    assert list(count_weights(header)) == ["F32"]
    monkeypatch.setattr(kernels, "count_weights", lambda _: {"Q4_1": 75, "Q4_0": 25})
    slow, fast = describe_types(header, 1)
    assert slow == (
        "Q4_1, 75% of the weights: prompt 82.2, decode 84.8 µs a million weights and token; "
        "Q8_0 would prefill 2.3 × and decode 1.3 × as fast"
    )
    assert fast == "Q4_0, 25% of the weights: prompt 25.2, decode 31.7 µs a million weights and token"
