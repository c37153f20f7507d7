"""One server for each file; after every failure mode it must be alive and its KV empty."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.driver.http import unharmed
from tests.driver.server import Server, StartServer
from tests.tiny_models import make_dense


def pytest_itemcollected(item: pytest.Item) -> None:
    """`-k engine-killed` selects the tests of that failure mode."""
    item.extra_keyword_matches.update(mark.args[0] for mark in item.iter_markers("failure_mode"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model of 0.7 MB; greedy, it never ends by itself."""
    return make_dense(tmp_path_factory.mktemp("models") / "secretfolder-canary-dense.gguf")


@pytest.fixture(scope="module")
def start_for_module(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[StartServer]:
    """Start a server on the tiny model; all are stopped after the file's last test, cleanly."""
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("servers")
        started = 0

        def start_one(*arguments: str, model: Path = tiny_model, **options: object) -> Server:
            nonlocal started
            started += 1
            log = folder / f"log{started}"
            server = Server(log, str(model), "--threads", "1", *arguments, **options)  # type: ignore[arg-type]
            return stack.enter_context(server)

        yield start_one


@pytest.fixture(scope="module")
def shared(start_for_module: StartServer) -> Server:
    """The file's own server, with defaults."""
    return start_for_module()


@pytest.fixture
def tiny(shared: Server) -> Iterator[Server]:
    """The shared server, which every test must leave as it found it."""
    yield shared
    unharmed(shared)
