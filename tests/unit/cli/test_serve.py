"""Served models: arguments and sections of the file become the models of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cllm.cli import main, serve
from cllm.cli.prepare import PrepareTask
from cllm.cli.serve import choose_models, is_several
from cllm.config import Config, EngineConfig, ModelConfig, PreparedModel, ServerConfig
from cllm.errors import ConfigError

FILE = """
parallel = 3
[server]
sleep-idle-s = 60
[models.fast]
model = "hf:USER/REPO:Q4_K_M"
aliases = ["gpt-4o-mini", "small"]
context = 8192
keep = true
defaults = { temperature = 0.2 }
[models.coder]
ttl = 600
parallel = 2
cache-type-k = "q8_0"
"""
Served = list[tuple[list[ModelConfig], Config]]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """What `cllm serve` was asked for."""
    found: Served = []

    def run(config: Config, more: tuple[str, ...]) -> None:
        found.append((choose_models(config, more), config))

    monkeypatch.setattr(serve, "run", run)
    monkeypatch.delenv("CLLM_MODEL", raising=False)
    return found


def ask(served: Served, *arguments: str, **variables: str) -> tuple[list[ModelConfig], Config]:
    result = CliRunner().invoke(main.app, ["serve", *arguments], env=variables)
    assert result.exit_code == 0, result.output
    return served.pop()


def names(models: list[ModelConfig]) -> list[str]:
    return [model.name or model.engine.model for model in models]


def test_arguments(served: Served, tmp_path: Path) -> None:
    models, config = ask(served)
    assert names(models) == [""] and not is_several(models, config), "the embedded one"
    for arguments, variables in ((["a b"], {}), ([], {"CLLM_MODEL": "a b"})):
        models, config = ask(served, *arguments, **variables)
        assert names(models) == ["a b"] and not is_several(models, config)
    models, config = ask(served, "one", "two", "three", "--parallel", "2")
    assert names(models) == ["one", "two", "three"] and is_several(models, config)
    assert {model.engine.parallel for model in models} == {2}
    models, config = ask(served, "--all")
    assert models == [] and is_several(models, config)
    for count in (1, 2):
        (tmp_path / f"{count}.gguf").touch()
        models, config = ask(served, str(tmp_path))
        assert is_several(models, config) == (count == 2), "a folder of several models"


def test_the_first_alias_is_the_name_and_the_others_are_more(served: Served) -> None:
    (model,), _ = ask(served, "--alias", "one, two,three", "--tags", "small,fast")
    assert (model.engine.names[0], model.aliases) == ("one", ("two", "three"))
    assert model.engine.tags == "small,fast"


def test_sections(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(FILE)
    (fast, coder), config = ask(served, "--config", str(file))
    assert is_several([fast, coder], config)
    assert (fast.name, fast.aliases, fast.keep, fast.ttl) == ("fast", ("gpt-4o-mini", "small"), True, 60.0)
    assert fast.engine.model == "hf:USER/REPO:Q4_K_M" and fast.engine.max_request_tokens == 8192
    assert fast.engine.parallel == 3 and fast.defaults == {"temperature": 0.2}
    assert (coder.engine.model, coder.engine.parallel, coder.engine.cache_type_k) == ("coder", 2, "q8_0")
    assert coder.ttl == 600
    models, config = ask(served, "--config", str(file), "SMALL")
    assert names(models) == ["fast"] and not is_several(models, config), "an argument chooses a section"
    models, _ = ask(served, "--config", str(file), "coder", "other.gguf")
    assert names(models) == ["coder", "other.gguf"]


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"kep": True}, r"\[models.x\]: unknown setting .*keep"),
        ({"keep": "yes"}, r"\[models.x\]: .*true or false"),
        ({"parallel": 999}, r"\[models.x\]: parallel"),
        ({"defaults": {"temperature": -1}}, r"\[models.x\] defaults: temperature"),
        ({"ttl": float("nan")}, r"\[models.x\]: ttl"),
        (5, r"\[models.x\] must be a table"),
    ],
)
def test_a_wrong_section_is_refused(table: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        choose_models(Config(models={"x": table}))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--api-keys", "none.toml"], "the keys file none.toml cannot be read"),
        (["--tls-cert", "cert.pem"], "--tls-cert and --tls-key belong together"),
        (["--tls-cert", "cert.pem", "--tls-key", "key.pem"], "--tls-cert and --tls-key cannot be used"),
        (["--defaults", "{"], "defaults"),
    ],
)
def test_settings_are_checked_before_a_model_is_prepared(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], reason: str
) -> None:
    prepared: list[object] = []
    for task in ("PrepareTask", "SurveyTask"):
        monkeypatch.setattr(serve, task, lambda **asked: prepared.append(asked))
    result = CliRunner().invoke(main.app, ["serve", "--port", "0", *arguments])
    assert result.exit_code == 2 and reason in result.output and not prepared


@pytest.mark.parametrize(
    ("several", "poll", "expected"), [(True, None, 0), (True, 50, 50), (False, None, None), (False, 7, 7)]
)
def test_threads_of_several_models_do_not_poll(
    monkeypatch: pytest.MonkeyPatch, several: bool, poll: int | None, expected: int | None
) -> None:
    asked: list[EngineConfig] = []

    def finish(task: PrepareTask, kind: type[PreparedModel]) -> PreparedModel:
        asked.append(task.asked)
        return PreparedModel(config=task.asked)

    monkeypatch.setattr(PrepareTask, "start", lambda task: task)
    monkeypatch.setattr(serve, "finish", finish)
    monkeypatch.setattr(serve, "share_turns", object)
    model = ModelConfig(name="a", engine=EngineConfig(model="a.gguf", poll=poll))
    serve.EngineLoader(ServerConfig(), several=several).prepare(model)
    assert asked[0].poll == expected
