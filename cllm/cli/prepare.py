"""Preparation: check and probe settings in a process of their own (`python -m cllm.cli.prepare`).

So the server does not import the code of the native library. The input is one line of JSON, the output is
what was prepared, or a `Failure`; progress goes to standard error.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from cllm.config import EngineConfig, ModelConfig, PreparedModel
from cllm.errors import CllmError, EngineError, NotEnoughMemory
from cllm.models.survey import Survey
from cllm.process import configure_logging
from cllm.types import Failure

if TYPE_CHECKING:
    from cllm.backend.llama.gguf import GgufHeader
    from cllm.backend.llama.memory import MemoryFit

log = logging.getLogger(__name__)
Answer = TypeVar("Answer", PreparedModel, Survey)
ENOUGH_CELLS = 4096  # of a request: before a model gets less, others that are idle are unloaded


class Task(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Work of a process of its own."""

    log_level: str = "info"

    def start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "cllm.cli.prepare"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is passed on by the parent, once
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self) + b"\n")
        process.stdin.flush()
        return process


class PrepareTask(Task, frozen=True, kw_only=True, tag=True):
    """Settings to prepare. While another model is served (`beside`), memory must suffice for both.

    With `rooms`, bytes by device, the first counts in which the model has a useful context: each has what the
    one before has, and what another model would free.
    """

    asked: EngineConfig
    beside: bool = False
    rooms: tuple[dict[str, int], ...] = ()

    def run(self) -> PreparedModel:
        """In the process itself. Raises SetupError."""
        from cllm.backend.llama.placement import offer_module, wants_gpu
        from cllm.backend.llama.probe import find_ready
        from cllm.build.gpus import find_gpus
        from cllm.models.resolve import resolve_config

        asked = resolve_config(self.asked)
        if self.rooms or self.beside:
            if self.rooms:
                self._choose_room(asked)
            elif not (fit := _fit(asked)[1]).fits:
                raise NotEnoughMemory(f"not enough memory beside the model that serves: {fit.describe()}")
            return describe(find_ready(asked, log.info))
        if wants_gpu(asked) and (offer := offer_module(find_gpus())) is not None:
            log.info("%s", offer)
        return describe(find_ready(asked, partial(print, file=sys.stderr, flush=True)))

    def _choose_room(self, asked: EngineConfig) -> None:
        """From here on memory is that of the first room that suffices, else of the largest."""
        from cllm.backend.llama.gguf import GgufHeader
        from cllm.backend.llama.memory import ROOM, MemoryFit, list_free_devices
        from cllm.backend.llama.placement import wants_gpu

        header = GgufHeader.of(asked)
        for room in self.rooms:
            ROOM.update({name: (size, size - self.rooms[0][name]) for name, size in room.items()})
            fit = MemoryFit(header, asked, list_free_devices() if wants_gpu(asked) else ())
            if fit.fits and (asked.ctx_size or fit.share >= min(ENOUGH_CELLS, header.context_train)):
                return


def _fit(config: EngineConfig) -> tuple[GgufHeader, MemoryFit]:
    from cllm.backend.llama.gguf import GgufHeader
    from cllm.backend.llama.memory import MemoryFit
    from cllm.backend.llama.placement import list_devices, wants_gpu

    header = GgufHeader.of(config)
    return header, MemoryFit(header, config, list_devices() if wants_gpu(config) else ())


def describe(ready: EngineConfig) -> PreparedModel:
    """Describe settings by the memory that they take, at its largest, and the state of their files."""
    header, fit = _fit(ready)
    paths = [part.path for part in header.parts]
    paths += [Path(each) for each in (ready.draft_model, ready.mmproj) if each]
    return PreparedModel(config=ready, memory=fit.by_device, stamps=tuple(map(stamp, paths)))


def stamp(path: Path) -> tuple[str, int, int]:
    """Return a file's path, size and time of change."""
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns


class SurveyTask(Task, frozen=True, kw_only=True, tag=True):
    """Models to find for a server; a hub's are pulled. With `all_models`, every model of the list."""

    models: tuple[ModelConfig, ...]
    common: ModelConfig  # the settings of models that have none of their own
    all_models: bool = False

    def run(self) -> Survey:
        """In the process itself. Raises SetupError."""
        from cllm.models.survey import survey

        return survey(self.models, self.common, all_models=self.all_models)


def finish(process: subprocess.Popen[bytes], kind: type[Answer]) -> Answer:
    """Wait for the answer. Raises SetupError, or KeyboardInterrupt where that ended the process."""
    with process:
        assert process.stdout is not None
        answer = process.stdout.read()  # until it has ended
    if process.returncode in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if not answer:
        raise EngineError(f"the preparation ended with code {process.returncode}")
    if process.returncode:
        raise msgspec.json.decode(answer, type=Failure).error()
    return msgspec.json.decode(answer, type=kind)


def _end_with_parent() -> None:
    os.read(0, 1)  # the input ends with the parent
    os._exit(1)


def main() -> int:
    """Prepare what the input says."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=PrepareTask | SurveyTask)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    configure_logging(task.log_level)
    answer: PreparedModel | Survey | Failure
    try:
        answer = task.run()
    except CllmError as error:
        answer = Failure.of(error)
    except KeyboardInterrupt:
        return 130
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    return 2 if isinstance(answer, Failure) else 0


if __name__ == "__main__":
    sys.exit(main())
