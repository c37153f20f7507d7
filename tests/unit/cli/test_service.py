"""`cllm service`: the unit, and what is done with it. systemctl is a script that records its arguments."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cllm.cli.main import app
from cllm.cli.service import make_unit


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with what systemctl was asked for."""
    log, program = tmp_path / "calls", tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\ntest "$2" != restart || test ! -e {tmp_path}/broken\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    log.touch()
    return log


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["service", *arguments])
    return done.exit_code, done.output


def test_printing_changes_nothing(calls: Path, tmp_path: Path) -> None:
    code, output = run("install", "--print", "model.gguf", "--port", "8080")
    assert code == 0
    assert f"ExecStart={sys.executable} -m cllm serve model.gguf --port 8080\n" in output
    assert "# systemctl --user enable cllm\n" in output
    code, output = run("remove", "--print")
    assert code == 0 and f"# rm {tmp_path}/config/systemd/user/cllm.service\n" in output
    assert not calls.read_text() and not (tmp_path / "config").exists()


def test_a_unit_is_installed_and_removed(calls: Path, tmp_path: Path) -> None:
    unit = tmp_path / "config" / "systemd" / "user" / "small.service"
    assert run("install", "--name", "small", "model.gguf")[0] == 0
    assert "serve model.gguf\n" in unit.read_text()
    assert run("status", "--name", "small")[0] == 0
    assert run("remove", "--name", "small")[0] == 0
    assert not unit.exists()
    expected = ["daemon-reload", "enable small", "restart small", "--no-pager status small"]
    expected += ["disable --now small", "daemon-reload"]
    assert calls.read_text().splitlines() == [f"--user {words}" for words in expected]
    code, output = run("remove", "--name", "small")
    assert code == 2 and "no unit small is installed" in output


def test_a_failure_is_one_line(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken").touch()
    code, output = run("install")
    assert code == 2 and "`systemctl --user restart cllm` failed: it ended with code 1" in output
    monkeypatch.setenv("PATH", str(tmp_path))
    code, output = run("install")
    assert code == 2 and "systemd is not here" in output


def test_words_arrive_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLLM_CACHE_DIR", "/data/a cache")
    unit = make_unit(["my model.gguf", "--alias", '100%"$x"', ""], tmp_path)
    assert 'serve "my model.gguf" --alias "100%%\\"$$x\\"" ""\n' in unit
    assert 'Environment="CLLM_CACHE_DIR=/data/a cache"\n' in unit


def test_systemd_accepts_the_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here (Debian: apt install systemd)")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = tmp_path / "cllm.service"
    file.write_text(make_unit(["my model.gguf", "--alias", '100%"$x"'], tmp_path))
    command = ["systemd-analyze", "--user", "--man=no", "verify", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    file.write_text(file.read_text().replace("Type=notify", "Type=nothing"))
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stderr, "it does check"


@pytest.mark.parametrize("name", ["../../../x", "/etc/x", "a/b", ""])
def test_a_unit_has_a_plain_name(calls: Path, tmp_path: Path, name: str) -> None:
    code, output = run("install", "--name", name, "model.gguf")
    assert code == 2 and "--name" in output
    assert not calls.read_text() and not (tmp_path / "config").exists()
