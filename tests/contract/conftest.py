from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cllm.backend.llama.library import load
from cllm.backend.llama.runner import LlamaRunner
from cllm.errors import LibraryError
from tests.contract.sampler_draws import Logits
from tests.driver.kinds import DENSE, open_runner
from tests.driver.runner import native
from tests.tiny_media import MAKERS, MediaModel
from tests.tiny_models import VOCABULARY


@pytest.fixture(scope="module")
def runner(models: dict[str, Path]) -> Iterator[LlamaRunner]:
    """A dense model of three sequences, for tests that leave it empty."""
    runner = open_runner(models, DENSE, sequences=3)
    yield native(runner)
    runner.close()


@pytest.fixture(scope="module")
def logits() -> Logits:
    """A row as a model might give it."""
    return (np.random.default_rng(5).standard_normal(VOCABULARY) * 3).astype(np.float32)


@pytest.fixture(scope="module", params=MAKERS)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MediaModel:
    """A tiny model of each kind with its encoder, where the library has encoders."""
    try:
        load().load_media()
    except LibraryError as error:
        pytest.skip(str(error))
    return MAKERS[request.param](tmp_path_factory.mktemp("media"))
