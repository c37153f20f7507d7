"""Servers shared by the whole run, and a way to start one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.e2e.thinking import make_thinking
from tests.tiny_models import make_dense

StartServer = Callable[..., Server]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model of 0.7 MB; greedy, it never ends by itself."""
    return make_dense(tmp_path_factory.mktemp("models") / "dense.gguf")


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model, served with defaults."""
    with Server(tmp_path_factory.mktemp("embedded") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    """The tiny model on eight sequences."""
    log = tmp_path_factory.mktemp("tiny") / "log"
    with Server(log, str(tiny_model), "--parallel", "8", "--threads", "1") as server:
        yield server


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartServer]:
    """Start a server of one's own; whatever still runs afterwards is killed."""
    with ExitStack() as stack:
        started = 0

        def start_one(*arguments: str, **options: object) -> Server:
            nonlocal started
            started += 1
            server = Server(tmp_path / f"log{started}", *arguments, **options)  # type: ignore[arg-type]
            stack.callback(server.kill)
            return server.__enter__()

        yield start_one


@pytest.fixture(scope="session")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny model that begins every answer with thoughts."""
    folder = tmp_path_factory.mktemp("thinking")
    model = make_thinking(folder / "thinking.gguf")
    with Server(folder / "log", str(model), "--parallel", "2", "--threads", "1") as server:
        yield server
