"""Which setting wins: command line, variable, file, what tuning found, default. The trial is a script."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from cllm.backend.llama.memory import prepare
from cllm.backend.llama.threads import read_cpu_times
from cllm.cli.options import with_options
from cllm.cli.tune import cores_used_by_others, tune_at_start
from cllm.config import Config, EngineConfig
from tests.tiny_models import make_dense

# Flash attention off, a batch of 256 and poll 0 are faster, each by a lot; each task is written down.
SCRIPT = """
import json, sys
for line in sys.stdin:
    task = json.loads(line)
    config, plan = task["config"], task["plan"]
    with open(sys.argv[1], "a") as log:
        log.write(line)
    factor = (0.5 if not config["flash_attention"] else 1) * (0.5 if config["batch_tokens"] == 256 else 1)
    factor *= 0.5 if config["poll"] == 0 else 1
    cases = ("prefill", "one_short", "one_long", "all_short", "ragged", "all_long")
    print(json.dumps({"seconds": {name: 0.001 * factor for name in cases}, "took_s": 0.01}), flush=True)
"""


class Start:
    """`cllm serve`, as far as it has its settings."""

    def __init__(self, folder: Path) -> None:
        script = folder / "trial.py"
        script.write_text(SCRIPT)
        self.log = folder / "tasks"
        self.others: float | None = 0.0
        self.app = typer.Typer()
        self.found: list[EngineConfig] = []

        @with_options(EngineConfig)
        def command(config: Config, given: frozenset[str]) -> None:
            self.found.append(
                tune_at_start(
                    config.engine,
                    prepare(config.engine),
                    given,
                    Console(stderr=True),
                    trial=(sys.executable, str(script), str(self.log)),
                    look=lambda: self.others,
                )
            )

        self.app.command()(command)

    def __call__(self, *arguments: str, **variables: str) -> EngineConfig:
        env: dict[str, str | None] = {"CLLM_THREADS": None, "CLLM_TUNE": None, **variables}
        result = CliRunner().invoke(self.app, list(arguments), env=env)
        assert result.exit_code == 0, result.output
        return self.found.pop()

    @property
    def tasks(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    (tmp_path / "library").mkdir()
    monkeypatch.setenv("CLLM_LIBRARY", str(tmp_path / "library"))
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path / "cache"))
    return Start(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(make_dense(tmp_path / "model.gguf"))


def test_found_once_and_remembered(start: Start, model: str) -> None:
    config = start(model)
    assert (config.flash_attention, config.batch_tokens, config.poll) == (False, 256, 0)
    asked = len(start.tasks)
    assert asked > 10
    assert start(model) == config
    assert len(start.tasks) == asked, "the second start measures nothing"


def test_the_command_line_beats_what_was_found(start: Start, model: str) -> None:
    start(model)
    config = start(model, "--batch-tokens", "512", "--flash-attention")
    assert (config.flash_attention, config.batch_tokens, config.poll) == (True, 512, 0)
    assert {task["config"]["batch_tokens"] for task in start.tasks[-8:]} == {512}, "left out, so not varied"


def test_a_variable_beats_what_was_found(start: Start, model: str) -> None:
    config = start(model, CLLM_POLL="50", CLLM_BATCH_TOKENS="1024")
    assert (config.flash_attention, config.batch_tokens, config.poll) == (False, 1024, 50)


def test_the_file_beats_what_was_found_and_the_variable_beats_the_file(
    start: Start, model: str, tmp_path: Path
) -> None:
    file = tmp_path / "cllm.toml"
    file.write_text("[engine]\npoll = 70\nbatch-tokens = 333\n")
    config = start(model, "--config", str(file), CLLM_BATCH_TOKENS="444")
    assert (config.flash_attention, config.batch_tokens, config.poll) == (False, 444, 70)


@pytest.mark.parametrize("how", ["flag", "variable", "file"])
def test_no_tuning(start: Start, model: str, tmp_path: Path, how: str) -> None:
    start(model)
    asked = len(start.tasks)
    (tmp_path / "cllm.toml").write_text("tune = false\n")
    config = {
        "flag": lambda: start(model, "--no-tune"),
        "variable": lambda: start(model, CLLM_TUNE="0"),
        "file": lambda: start(model, "--config", str(tmp_path / "cllm.toml")),
    }[how]()
    defaults = EngineConfig()
    assert (config.flash_attention, config.batch_tokens, config.poll) == (
        defaults.flash_attention,
        defaults.batch_tokens,
        defaults.poll,
    ), "neither measured nor applied"
    assert len(start.tasks) == asked


def test_a_type_that_does_not_exist_is_refused(start: Start, model: str) -> None:
    result = CliRunner().invoke(start.app, [model, "--cache-type-k", "q9"])
    assert result.exit_code == 2 and "cache_type_k" in result.output
    assert start(model, "--cache-type-k", "q8_0").cache_type_k == "q8_0"


def test_a_busy_hour_is_not_remembered_for_ever(start: Start, model: str) -> None:
    start.others = 1.7
    config = start(model)
    assert config.poll == 0, "used all the same"
    asked = len(start.tasks)
    start(model)
    assert len(start.tasks) == asked, "still busy: it would be no better"
    start.others = 0.0
    start(model)
    assert len(start.tasks) > asked
    asked = len(start.tasks)
    start(model)
    assert len(start.tasks) == asked


def test_types_that_were_asked_for_are_judged_again(start: Start, model: str, tmp_path: Path) -> None:
    start(model)
    (file,) = (tmp_path / "cache" / "tune").iterdir()
    for asked in (False, True):
        record = {**json.loads(file.read_text()), "provisional": "a busy hour", "kv_types": asked}
        file.write_text(json.dumps(record))
        start.log.unlink()
        start(model)
        assert any(task["config"]["cache_type_k"] == "bf16" for task in start.tasks) == asked
        assert json.loads(file.read_text())["kv_types"] == asked


def test_a_trial_that_cannot_run_changes_nothing(start: Start, model: str, tmp_path: Path) -> None:
    (tmp_path / "trial.py").write_text("raise SystemExit(3)")
    assert start(model).batch_tokens == EngineConfig().batch_tokens
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_a_cache_that_cannot_be_written_is_no_reason_not_to_serve(
    start: Start, model: str, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    start(model)
    assert start.tasks


def test_others_are_looked_at_for_a_moment() -> None:
    others = cores_used_by_others(0.05)
    assert others is None if read_cpu_times() is None else others is not None and 0 <= others <= 1024
