"""The commands of docs/chat.md, docs/ollama.md and docs/agents.md run as they are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.driver.server import ROOT, Server, environment
from tests.e2e.golden.record import scripted_server

ADDRESS = "http://127.0.0.1:18081"
PAGES = ("chat.md", "ollama.md", "agents.md")
# What needs several models has a test of its own: test_launch.
ELSEWHERE = ("cllm load", "cllm unload")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with scripted_server(tmp_path_factory.mktemp("scripted") / "log", "--step-ms", "0") as opened:
        yield opened


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `cllm`, and programs that only say their names."""
    folder = tmp_path_factory.mktemp("bin")
    scripts = {"cllm": f'exec {sys.executable} -c "from cllm.cli.main import main; main()" "$@"'}
    scripts |= {name: f"echo {name}" for name in ("claude", "codex", "opencode", "aider")}
    for name, line in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    return folder


def find(language: str, page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_every_line_runs(server: Server, programs: Path) -> None:
    lines = [line for page in PAGES for block in find("sh", page) for line in block.splitlines()]
    wanted = [line for line in lines if line and not line.startswith(ELSEWHERE)]
    assert len(wanted) >= 9
    variables = environment(CLLM_URL=server.url, PATH=f"{programs}{os.pathsep}{os.environ['PATH']}")

    def run(line: str) -> tuple[str, subprocess.CompletedProcess[str]]:
        command = line.replace(ADDRESS, server.url).replace("NAME", "fake")
        return line, subprocess.run(
            ["bash", "-ec", command],
            input="a question",
            capture_output=True,
            text=True,
            timeout=60,
            env=variables,
        )

    with ThreadPoolExecutor(2) as pool:
        for line, done in pool.map(run, wanted):
            assert done.returncode == 0, (line, done.stderr)
            assert done.stdout.strip(), line


@pytest.mark.parametrize("page", ["ollama.md"])
def test_python_runs(page: str, server: Server) -> None:
    for snippet in find("python", page):
        code = snippet.replace(ADDRESS, server.url)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment()
        )
        assert done.returncode == 0 and done.stdout, done.stderr
