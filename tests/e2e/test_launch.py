"""`cllm launch`, `ps`, `load` and `unload` on a running server."""

from __future__ import annotations

import json
import os
from pathlib import Path

from typer.testing import CliRunner

from cllm.cli.main import app
from tests.driver.server import Server, cllm


def test_a_program_is_run_with_what_it_wants(tiny: Server, tmp_path: Path) -> None:
    program = tmp_path / "claude"
    program.write_text('#!/bin/sh\necho "$ANTHROPIC_BASE_URL $ANTHROPIC_MODEL $1"; exit 7\n')
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = cllm("launch", "claude", "--url", tiny.url, "--", "--help", PATH=path)
    assert (done.returncode, done.stdout) == (7, f"{tiny.url} dense --help\n")
    assert "begins with about 20,000 tokens, and this server takes" in done.stderr


def test_a_program_that_is_not_installed_is_one_line(tiny: Server, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["launch", "aider", "--url", tiny.url], env={"PATH": str(tmp_path)})
    assert (done.exit_code, done.output) == (2, "cllm: aider is not installed: `pip install aider-chat`\n")


def test_models_of_a_server(tiny: Server) -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["ps", "--url", tiny.url]).output.splitlines()
    assert shown[0].split()[:2] == ["name", "state"] and shown[1].split()[:2] == ["dense", "ready"]
    (model,) = json.loads(runner.invoke(app, ["ps", "--url", tiny.url, "--json"]).output)
    assert model["name"] == "dense" and model["context"] > 0
