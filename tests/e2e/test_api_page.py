"""Every snippet of docs/api.md that can run here, runs; and every route is in its table."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.driver.server import Server, environment

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SHELL = re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
ADDRESS = "http://127.0.0.1:18081"


def package(snippet: str) -> str:
    """The client a snippet is about: the first thing it imports."""
    found = re.match(r"(?:from|import) (\w+)", snippet)
    assert found, snippet
    return found.group(1)


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("snippet", PYTHON, ids=package)
def test_a_python_snippet_runs(snippet: str, embedded: Server) -> None:
    if importlib.util.find_spec(package(snippet)) is None:
        pytest.skip(f"{package(snippet)} is not installed")
    if package(snippet) == "anthropic" and "/v1/messages" not in embedded.get("/openapi.json")["paths"]:
        pytest.skip("/v1/messages is not served")
    assert ADDRESS in snippet
    assert len(run([sys.executable, "-c", snippet.replace(ADDRESS, embedded.url)]).strip()) > 5


@pytest.mark.parametrize("snippet", SHELL, ids=lambda snippet: snippet.split()[2].rpartition("/")[2])
def test_a_shell_snippet_runs(snippet: str, embedded: Server) -> None:
    assert run(["bash", "-ec", snippet.replace(ADDRESS, embedded.url)]).startswith("{")


def test_the_table_holds_every_route(embedded: Server) -> None:
    table = PAGE.partition("## Routes")[2].partition("## Fields")[0]
    for path, methods in embedded.get("/openapi.json")["paths"].items():
        for method in methods:
            assert f"{method.upper()} {path}`" in table


def test_every_client_has_a_snippet() -> None:
    clients = {"openai", "anthropic", "langchain_openai", "litellm", "llm", "instructor", "ollama"}
    assert {package(snippet) for snippet in PYTHON} == clients
    assert "open-webui" in PAGE and SHELL
