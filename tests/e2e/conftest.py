"""Servers shared by the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.driver.browser import open_browser
from tests.driver.same_text import EXACT
from tests.driver.server import Server
from tests.e2e.clients import only_loopback
from tests.e2e.golden.record import scripted_server
from tests.e2e.thinking import make_thinking
from tests.tiny_models import make_dense


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model of 0.7 MB; greedy, it never ends by itself."""
    return make_dense(tmp_path_factory.mktemp("models") / "dense.gguf")


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model. CLLM_THREADS is 1 by default: on a busy machine two wait for each other.

    It is quantised: its words, and where an answer ends, differ from one CPU to the next. Tests may use its
    vocabulary, its chat template and its work counters. Where the text matters they take `tiny`.
    """
    arguments = ("--parallel", "8", "--ctx-size", "32768")
    with Server(tmp_path_factory.mktemp("embedded") / "log", *arguments) as server:
        yield server


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    """The tiny model on eight sequences; its greedy text is the same however batches are cut."""
    log = tmp_path_factory.mktemp("tiny") / "log"
    with Server(log, str(tiny_model), "--parallel", "8", *EXACT) as server:
        yield server


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose vocabulary is as large as a real one's."""
    return make_dense(tmp_path_factory.mktemp("models") / "wide.gguf", vocabulary=18_000, context=8192)


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory, wide_model: Path) -> Iterator[Server]:
    """A large vocabulary at little cost: grammars and samplers do their work, the model hardly any."""
    arguments = ("--parallel", "8", "--ctx-size", "65536", *EXACT)
    with Server(tmp_path_factory.mktemp("wide") / "log", str(wide_model), *arguments) as server:
        yield server


@pytest.fixture(scope="session")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny model that begins every answer with thoughts."""
    folder = tmp_path_factory.mktemp("thinking")
    model = make_thinking(folder / "thinking.gguf")
    with Server(folder / "log", str(model), "--parallel", "2") as server:
        yield server


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that answers by script (`cllm.testing.say`), in steps of 4 ms."""
    with scripted_server(tmp_path_factory.mktemp("scripted") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def quiet() -> Iterator[pytest.MonkeyPatch]:
    """Third-party clients may connect to this machine only; other patches are undone, too."""
    with pytest.MonkeyPatch.context() as patch:
        only_loopback(patch)
        yield patch


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser
