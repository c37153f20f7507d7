"""`cllm cluster`: its help, its token, what it says where Ray or a head is missing."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cllm.cli.cluster import make_settings, make_start, make_token, prepare_replica
from cllm.cli.main import app
from cllm.cli.serve import prepare_gateway
from cllm.cluster import deployment
from cllm.cluster.directory import TOKEN_FILE, split_address, use_token
from cllm.config import EngineConfig
from cllm.errors import ConfigError, ServerUnreachable
from cllm.models.store import embedded_model
from tests.driver.server import ROOT

CHECK = """
import pkgutil, sys, cllm
from importlib import import_module
for module in pkgutil.walk_packages(cllm.__path__, "cllm."):
    if not module.name.endswith("__main__"):
        import_module(module.name)
assert "ray" not in sys.modules
"""


def test_ray_is_imported_by_nothing_but_its_use(tmp_path: Path) -> None:
    package = tmp_path / "ray"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('Ray was imported')")
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin"}
    subprocess.run([sys.executable, "-c", CHECK], check=True, timeout=120, env=environment)


def test_a_token_is_made_once_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "token"
    assert make_token(path)
    token = path.read_text()
    assert len(token) == 64 and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not make_token(path) and path.read_text() == token


def test_a_missing_token_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=r"no cluster token .* copy it from the machine of the head"):
        use_token()
    path = Path(TOKEN_FILE).expanduser()
    make_token(path)
    use_token()


def test_addresses() -> None:
    assert split_address("head") == ("head", 6379)
    assert split_address("10.0.0.1:7000") == ("10.0.0.1", 7000)
    for wrong in ("", ":1", "http://head", "head:port"):
        with pytest.raises(ConfigError, match="HOST:PORT of a head"):
            split_address(wrong)


def test_a_head_that_does_not_answer_is_said_at_once() -> None:
    with pytest.raises(ServerUnreachable, match=r"no head answers at 127\.0\.0\.1:1 .*`cllm cluster head`"):
        prepare_gateway(EngineConfig(), "127.0.0.1:1")


@pytest.mark.parametrize("command", ["status", "down x"])
def test_a_command_without_a_head_says_so_before_ray_is_asked(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "connect", lambda address: pytest.fail("Ray waits for a head"))
    result = CliRunner().invoke(app, ["cluster", *command.split(), "--cluster", "127.0.0.1:1"])
    assert result.exit_code == 2 and "no head answers at 127.0.0.1:1" in result.output


def test_ray_gets_its_arguments() -> None:
    assert make_start(4, 0, True)[-3:] == ["--num-cpus=4", "--num-gpus=0", "--block"]
    assert all("num-" not in each for each in make_start(0, -1, False))


def test_settings_of_the_embedded_model_name_it_and_its_digest() -> None:
    settings = make_settings(EngineConfig(threads=2), 5.0)
    assert settings.name.startswith("SmolLM2")
    assert settings.engine.model == "" and len(settings.digest) == 32


def test_a_replica_resolves_its_model() -> None:
    settings = make_settings(EngineConfig(threads=1, parallel=1, ctx_size=512, gpu_layers=0), 5.0)
    found = Path(prepare_replica(settings).model)
    assert found.name == embedded_model().name, "a copy has the name of the shipped file, and passes for it"
