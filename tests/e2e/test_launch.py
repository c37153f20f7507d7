"""`cllm launch`, `ps`, `load` and `unload` on a running server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import ollama
import pytest
from typer.testing import CliRunner

from cllm.cli.main import app
from cllm.models.files import format_memory
from tests.driver.server import Server, StartServer, cllm, wait_for


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


def test_the_memory_of_a_model_is_told_the_same_everywhere(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--ctx-size", "512", "--parallel", "1", "--threads", "1")
    (model,) = server.get("/admin/models")["models"]
    memory = sum(model["memory_bytes"].values())
    shown = format_memory(memory)
    assert f"; takes up to {shown} of memory; open http" in server.log_text.replace("\n", " ")
    assert shown in CliRunner().invoke(app, ["ps", "--url", server.url]).output
    assert [each["size"] for each in server.get("/api/ps")["models"]] == [memory]
    assert server.get("/admin/models")["memory_bytes"] == model["memory_bytes"]


def test_models_of_a_server(start: StartServer, tiny_model: Path, tmp_path: Path) -> None:
    for name in ("alpha", "beta"):
        (tmp_path / f"{name}.gguf").symlink_to(tiny_model)
    server = start(str(tmp_path), "--ctx-size", "512", "--parallel", "1", "--threads", "1")
    runner = CliRunner()

    def run(*arguments: str) -> str:
        done = runner.invoke(app, [*arguments, "--url", server.url])
        assert done.exit_code == 0, done.output
        return done.output

    def states() -> dict[str, str]:
        return {model["name"]: model["state"] for model in json.loads(run("ps", "--json"))}

    assert states() == {"alpha": "ready", "beta": "unloaded"}
    assert run("load", "beta:latest").startswith("beta is ready")
    body = {"model": "beta:latest", "messages": [{"role": "user", "content": "?"}], "max_tokens": 2}
    assert server.post("/v1/chat/completions", body).json()["model"] == "beta:latest"
    assert run("unload", "alpha") == "alpha is unloaded\n"
    assert states() == {"alpha": "unloaded", "beta": "ready"}
    shown = run("ps").splitlines()
    assert shown[0].split() == ["name", "state", "size", "takes", "context", "requests", "until"]
    assert shown[2].split()[:2] == ["beta", "ready"]
    refused = runner.invoke(app, ["load", "gamma", "--url", server.url])
    assert refused.exit_code == 2 and "choose one of: alpha, beta" in refused.output

    with ollama.Client(server.url, trust_env=False) as client:
        assert [model.model for model in client.list().models] == ["alpha:latest", "beta:latest"]
        assert [model.model for model in client.ps().models] == ["beta:latest"]
        options = {"num_predict": 4}
        assert client.generate("beta:latest", "x", options=options, keep_alive=0).eval_count == 4
        wait_for(lambda: states()["beta"] == "unloaded")
        assert client.generate("beta", "", keep_alive=0).done_reason == "unload"
        assert client.show("alpha").details
        with pytest.raises(ollama.ResponseError, match="gamma"):
            client.chat("gamma", [{"role": "user", "content": "?"}])
