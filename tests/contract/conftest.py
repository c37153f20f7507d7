from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cllm.backend.base import Backend
from cllm.backend.llama.backend import LlamaBackend
from tests.contract.alone import Reference
from tests.contract.drawing import Logits
from tests.contract.harness import native
from tests.contract.kinds import DENSE, Kind, Opened, open_backend
from tests.tiny_models import VOCABULARY, make_all

_REFERENCE = pytest.StashKey[Reference]()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny GGUFs, by kind."""
    return make_all(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def reference(models: dict[str, Path], pytestconfig: pytest.Config) -> Iterator[Reference]:
    """What each prompt says alone."""
    reference = pytestconfig.stash[_REFERENCE] = Reference(models)
    yield reference
    reference.close()


@pytest.fixture
def opened(models: dict[str, Path]) -> Iterator[Opened]:
    """Opens backends that are closed when the test is over: `opened(kind, sequences=…, …)`."""
    backends: list[Backend] = []

    def make(kind: Kind, **options: int) -> Backend:
        backends.append(open_backend(models, kind, **options))
        return backends[-1]

    yield make
    for backend in backends:
        backend.close()


@pytest.fixture(scope="module")
def backend(models: dict[str, Path]) -> Iterator[LlamaBackend]:
    """A dense model of three sequences, for tests that leave it empty."""
    backend = open_backend(models, DENSE, sequences=3)
    yield native(backend)
    backend.close()


@pytest.fixture(scope="module")
def logits() -> Logits:
    """A row as a model might give it."""
    return (np.random.default_rng(5).standard_normal(VOCABULARY) * 3).astype(np.float32)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (reference := config.stash.get(_REFERENCE, None)) is not None:
        terminalreporter.write_line(str(reference))
