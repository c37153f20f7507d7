"""`cllm launch`: what each program is given, and what is printed."""

from __future__ import annotations

import json
import shlex
import tomllib

import pytest
from typer.testing import CliRunner

from cllm.cli.launch import AGENTS, AgentServer
from cllm.cli.main import app

SERVER = AgentServer("http://127.0.0.1:1", "my model", 65536, "secret-key")


def test_each_program_is_pointed_at_the_server() -> None:
    settings = {name: agent.settings(SERVER) for name, agent in AGENTS.items()}
    variables, _ = settings["claude"]
    assert variables["ANTHROPIC_BASE_URL"] == SERVER.url and variables["ANTHROPIC_MODEL"] == "my model"
    _, words = settings["codex"]
    config = tomllib.loads("\n".join(words[1::2]))
    assert config["model_providers"]["cllm"]["base_url"] == f"{SERVER.url}/v1"
    assert config["model_context_window"] == 65536
    assert config["model_providers"]["cllm"]["env_key"] == "CLLM_API_KEY"
    config = json.loads(settings["opencode"][0]["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == "cllm/my model"
    assert config["provider"]["cllm"]["models"]["my model"]["limit"]["context"] == 65536
    variables, words = settings["aider"]
    assert variables["OPENAI_API_BASE"] == f"{SERVER.url}/v1" and "openai/my model" in words


def run(*arguments: str, key: str = "") -> str:
    variables = {"CLLM_API_KEY": key, "CLLM_URL": "http://127.0.0.1:9"}
    done = CliRunner().invoke(app, ["launch", *arguments], env=variables)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("program", AGENTS)
def test_lines_to_paste_name_the_key_and_do_not_show_it(program: str) -> None:
    lines = run(program, "--print", "--", "--flag", "a b", key=SERVER.key).splitlines()
    assert SERVER.key not in "".join(lines)
    assert all(shlex.split(line) for line in lines)
    assert shlex.split(lines[-1])[0] == AGENTS[program].executable
    assert shlex.split(lines[-1])[-2:] == ["--flag", "a b"]
    assert "CLLM_API_KEY" in "".join(lines)


def test_what_cannot_be_launched_is_one_line() -> None:
    for arguments, said in ((["emacs"], "there are claude, codex"), (["aider"], "no server answers at")):
        done = CliRunner().invoke(app, ["launch", *arguments], env={"CLLM_URL": "http://127.0.0.1:9"})
        assert done.exit_code == 2 and said in done.output and done.output.count("\n") == 1
