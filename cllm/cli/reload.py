"""Reload: make the engine that replaces the serving one, if its file is allowed and memory suffices."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.memory import MemoryFit, prepare
from cllm.backend.llama.probe import find_working
from cllm.config import Config, EngineConfig
from cllm.errors import Forbidden, NotEnoughMemory, ReloadFailed, SetupError
from cllm.frontend.engine_client import EngineClient
from cllm.tune.search import with_remembered

log = logging.getLogger(__name__)


def model_in(folder: str, name: str) -> Path:
    """A file of the folder, with links resolved. Raises Forbidden for anything outside it."""
    if not folder:
        raise Forbidden("model: no other file may be loaded; start the server with --model-dir FOLDER")
    try:
        root = Path(folder).expanduser().resolve()
        path = (root / name).resolve()
    except (OSError, ValueError, RuntimeError):
        raise Forbidden("model: this is not a file in --model-dir") from None
    if root not in path.parents:
        raise Forbidden("model: this is not a file in --model-dir")
    return path


class Reloader:
    """Checks and makes engines; called in a thread. Remembers which configuration is served."""

    def __init__(
        self,
        config: Config,
        serving: EngineConfig,
        given: frozenset[str],
        make_engine: Callable[[EngineConfig], EngineClient],
    ) -> None:
        self._config = config
        self._serving = serving
        self._given = given
        self._make_engine = make_engine
        self._made: tuple[EngineClient, EngineConfig] | None = None

    def __call__(self, model: str) -> EngineClient:
        """An engine for a file of --model-dir, or for the one that is served. Raises ClientError."""
        self._update_serving()
        path = model_in(self._config.server.model_dir, model) if model else Path(self._serving.model)
        asked = msgspec.structs.replace(self._config.engine, model=str(path))
        if str(path) == self._serving.model:
            # As many cells as now: what fits beside the old one must not change which requests get a 400.
            asked = msgspec.structs.replace(asked, ctx_size=self._serving.ctx_size)
        try:
            fit = MemoryFit(GgufHeader(path), asked)
            if not fit.fits:
                raise NotEnoughMemory(f"not enough memory beside the model that serves: {fit.describe()}")
            ready = with_remembered(asked, find_working(prepare(asked), log.info), self._given)
        except SetupError as error:
            # The client knows the folder; the answer may travel further.
            raise ReloadFailed(str(error).replace(str(path), path.name)) from None
        engine = self._make_engine(ready)
        self._made = engine, ready
        return engine

    def _update_serving(self) -> None:
        """The engine made last has taken over if it could be loaded."""
        if self._made is not None and self._made[0].loaded.exception() is None:
            self._serving = self._made[1]
        self._made = None
