"""llama.cpp takes the settings of a placement, and puts experts where they say; without a GPU, too."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from cllm.backend.llama.memory import prepare
from cllm.backend.llama.runner import LlamaRunner
from cllm.config import EngineConfig
from cllm.errors import ConfigError
from tests.driver.engine import words
from tests.driver.runner import feed

_OVERRIDDEN = re.compile(r"tensor blk\.(\d+)\.ffn_(\w+)_exps\.weight .* overridden to CPU")


def answer(model: Path, **settings: object) -> object:
    plain = {"parallel": 1, "ctx_size": 512, "threads": 1}
    config = EngineConfig(model=str(model), **plain | settings)  # type: ignore[arg-type]
    runner = LlamaRunner(prepare(config, ()) if "gpu_layers" in settings else config)
    try:
        return feed(runner, 0, words(0, 40), logprobs=4)
    finally:
        runner.close()


def test_experts_of_the_first_layers_go_to_the_cpu(
    models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    expected = answer(models["experts"])
    with caplog.at_level(logging.DEBUG, logger="llama.cpp"):
        assert answer(models["experts"], n_cpu_moe=1) == expected
    assert set(_OVERRIDDEN.findall(caplog.text)) == {("0", "gate"), ("0", "up"), ("0", "down")}


def test_tensors_of_a_pattern_lie_where_it_says(
    models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    expected = answer(models["experts"])
    with caplog.at_level(logging.DEBUG, logger="llama.cpp"):
        assert answer(models["experts"], override_tensor=(r"blk\.1\.ffn_down_exps=CPU",)) == expected
    assert set(_OVERRIDDEN.findall(caplog.text)) == {("1", "down")}
    with pytest.raises(ConfigError, match="no device CUDA7"):
        answer(models["experts"], override_tensor=("ffn=CUDA7",))


def test_parts_and_cards_that_are_not_there_change_nothing(models: dict[str, Path]) -> None:
    settings = {"tensor_split": "3,1", "split_mode": "row", "main_gpu": 0}
    assert answer(models["dense"], **settings) == answer(models["dense"])


@pytest.mark.parametrize("layers", [5, "all", "auto", 0])
def test_without_a_gpu_the_cpu_serves(models: dict[str, Path], layers: int | str) -> None:
    assert answer(models["dense"], gpu_layers=layers) == answer(models["dense"])
