"""Every snippet of docs/api.md that can run here, runs."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.driver.server import Server, environment
from tests.e2e.clients import QUIET

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SHELL = re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
ADDRESS = "http://127.0.0.1:18081"
LENGTH = re.compile(r'(tokens=|num_predict": )64')  # 16 will do here


def package(snippet: str) -> str:
    """The client a snippet is about: the first thing it imports."""
    found = re.match(r"(?:from|import) (\w+)", snippet)
    assert found, snippet
    return found.group(1)


def run(command: list[str], given: str = "") -> str:
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=300, env=environment(**QUIET)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# In one process, one after another: most of them import the same packages, which takes seconds.
RUN_ALL = """
import contextlib, io, json, sys, traceback
results = []
for snippet in json.load(sys.stdin):
    said, fault = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(said):
            exec(compile(snippet, "<snippet>", "exec"), {"__name__": "__main__"})
    except BaseException:
        fault = traceback.format_exc()
    results.append((said.getvalue(), fault))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def said(tiny: Server) -> dict[str, tuple[str, str]]:
    """What each Python snippet printed, and how it failed, if it did."""
    installed = [snippet for snippet in PYTHON if importlib.util.find_spec(package(snippet))]
    local = [LENGTH.sub(r"\g<1>16", snippet.replace(ADDRESS, tiny.url)) for snippet in installed]
    results = json.loads(run([sys.executable, "-c", RUN_ALL], json.dumps(local)).splitlines()[-1])
    return dict(zip(installed, results, strict=True))


@pytest.mark.parametrize("snippet", PYTHON, ids=package)
def test_a_python_snippet_runs(snippet: str, said: dict[str, tuple[str, str]]) -> None:
    if snippet not in said:
        pytest.skip(f"{package(snippet)} is not installed")
    assert ADDRESS in snippet
    printed, fault = said[snippet]
    assert not fault, fault
    assert len(printed.strip()) > 5


@pytest.mark.parametrize("snippet", SHELL, ids=lambda snippet: snippet.split()[2].rpartition("/")[2])
def test_a_shell_snippet_runs(snippet: str, tiny: Server) -> None:
    assert run(["bash", "-ec", snippet.replace(ADDRESS, tiny.url)]).startswith("{")


def test_every_client_has_a_snippet() -> None:
    clients = {"openai", "anthropic", "langchain_openai", "litellm", "llm", "instructor", "ollama"}
    assert {package(snippet) for snippet in PYTHON} == clients
    assert "open-webui" in PAGE and SHELL
