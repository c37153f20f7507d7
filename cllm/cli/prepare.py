"""Preparation: check, probe and tune settings in a process of their own (`python -m cllm.cli.prepare`).

So the server imports neither the code of the native library nor the tuner. The input is one line of JSON, the
output is the settings that are ready, or a `Failure`; progress goes to standard error.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from cllm.config import EngineConfig
from cllm.errors import CllmError, EngineError, NotEnoughMemory, from_code
from cllm.logs import configure_logging
from cllm.types import Failure

log = logging.getLogger(__name__)


class Preparation(msgspec.Struct, frozen=True, kw_only=True):
    """What to prepare. `given` are the fields that were set explicitly, so are not tuned.

    At a start it measures which settings are the fastest. While another model is served (`beside`), memory
    must suffice for both, and nothing is measured.
    """

    asked: EngineConfig
    given: frozenset[str]
    log_level: str
    beside: bool = False

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

    def run(self) -> EngineConfig:
        """In the process itself. Raises SetupError."""
        from rich.console import Console

        from cllm.backend.llama.devices import list_devices, offer_module, wants_gpu
        from cllm.backend.llama.gguf import GgufHeader
        from cllm.backend.llama.memory import MemoryFit
        from cllm.backend.llama.probe import find_ready
        from cllm.build.gpus import find_gpus
        from cllm.cli.tune import tune_at_start
        from cllm.tune.search import with_remembered

        if self.beside:
            devices = list_devices() if wants_gpu(self.asked) else ()
            fit = MemoryFit(GgufHeader(Path(self.asked.model)), self.asked, devices)
            if not fit.fits:
                raise NotEnoughMemory(f"not enough memory beside the model that serves: {fit.describe()}")
            return with_remembered(self.asked, find_ready(self.asked, log.info), self.given)
        if wants_gpu(self.asked) and (offer := offer_module(find_gpus())) is not None:
            log.info("%s", offer)
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        ready = find_ready(self.asked, console.print)
        return tune_at_start(self.asked, ready, self.given, console)


def finish(process: subprocess.Popen[bytes]) -> EngineConfig:
    """Wait for the settings. Raises SetupError, or KeyboardInterrupt where that ended the process."""
    with process:
        assert process.stdout is not None
        answer = process.stdout.read()  # until it has ended
    if process.returncode in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if not answer:
        raise EngineError(f"the preparation ended with code {process.returncode}")
    if process.returncode:
        failure = msgspec.json.decode(answer, type=Failure)
        raise from_code(failure.code, failure.message)
    return msgspec.json.decode(answer, type=EngineConfig)


def _end_with_parent() -> None:
    os.read(0, 1)  # the input ends with the parent
    os._exit(1)


def main() -> int:
    """Prepare what the input says."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Preparation)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    configure_logging(task.log_level)
    answer: EngineConfig | Failure
    try:
        answer = task.run()
    except CllmError as error:
        answer = Failure(error.code, error.message)
    except KeyboardInterrupt:
        return 130
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    return 2 if isinstance(answer, Failure) else 0


if __name__ == "__main__":
    sys.exit(main())
