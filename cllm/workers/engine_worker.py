"""Engine worker: an EngineCore behind a channel, in a process of its own.

Entry point of all workers: `python -m cllm.workers.engine_worker FD engine|tokenizer|media LOG_LEVEL`.
The first frame is the configuration; after it commands come in and reports go out. End of input ends the
process, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from cllm.backend.base import ModelRunner
from cllm.config import EngineConfig
from cllm.core.engine_core import EngineCore
from cllm.errors import CllmError
from cllm.messages import Command, Died, Heartbeat, LoadProgress, Report, Stop
from cllm.process import configure_logging
from cllm.workers.channel import BAD_COMMAND, Channel, WorkerProcess, read_commands
from cllm.workers.tokenizer import serve_tokenizer

log = logging.getLogger(__name__)
HEARTBEAT_S = 1.0
MakeRunner = Callable[[EngineConfig, Callable[[float], None]], ModelRunner]
ServeTokenizer = Callable[[Channel, EngineConfig], None]


class EngineWorker:
    """An EngineCore wired to a channel: one thread computes, one reads commands, one sends heartbeats."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._encoder = msgspec.msgpack.Encoder()
        self._core: EngineCore | None = None

    def run(self, config: EngineConfig, make_runner: MakeRunner) -> None:
        # It reads before there is a core: end of input ends the process while the model loads, too.
        reading = (self._channel, self._post, self._end)
        threading.Thread(target=read_commands, args=reading, name="commands", daemon=True).start()
        runner = make_runner(config, lambda fraction: self._emit(LoadProgress(fraction)))
        self._core = core = EngineCore(runner, config, self._emit)
        gc.collect()
        gc.freeze()  # a full collection would take as long as a step, unless it leaves out what is here now
        self._emit(core.ready)
        core.preparation.warm_up()
        core.run()
        runner.close()

    @property
    def step_age_s(self) -> float:
        """How long the running step has run; 0 between steps."""
        started = self._core.step_started if self._core is not None else None
        return time.perf_counter() - started if started is not None else 0.0

    def _emit(self, report: Report) -> None:
        with contextlib.suppress(OSError):  # the parent is gone: the end of the commands is noticed, too
            self._channel.send(self._encoder.encode(report))

    def _post(self, command: Command) -> None:
        assert self._core is not None, "commands come after Ready"
        self._core.post(command)

    def _end(self) -> None:
        """The parent is gone, or ends this process: wait for what the disk cache still writes."""
        if self._core is not None and self._core.disk.limit:
            self._core.post(Stop())
            time.sleep(WorkerProcess.END_LIMIT_S)  # the loop ends the process earlier than that


def start_heartbeats(
    channel: Channel, step_age_s: Callable[[], float] = lambda: 0.0, *, exits: bool = True
) -> None:
    """Send a heartbeat every second, from a thread of its own, for as long as the parent lives.

    Then this process `exits`, unless another thread sees to that.
    """

    def beat() -> None:
        while True:
            try:
                channel.send(msgspec.msgpack.encode(Heartbeat(step_age_s())))
            except OSError:  # the parent is gone
                if exits:
                    os._exit(0)
                return
            time.sleep(HEARTBEAT_S)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


def _llama_runner(config: EngineConfig, progress: Callable[[float], None]) -> ModelRunner:
    from cllm.backend.llama.runner import LlamaRunner

    return LlamaRunner(config, progress=progress)


def main(
    arguments: list[str],
    make_runner: MakeRunner = _llama_runner,
    serve_tokenizer: ServeTokenizer = serve_tokenizer,
) -> int:
    descriptor, role, log_level = arguments
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # or an abort would start a debugger first
    configure_logging(log_level)
    channel = Channel(socket.socket(fileno=int(descriptor)))
    if (first := channel.receive()) is None:
        return 0
    config = msgspec.msgpack.decode(first, type=EngineConfig)
    try:
        if role == "engine":
            engine = EngineWorker(channel)
            start_heartbeats(channel, lambda: engine.step_age_s, exits=False)
            engine.run(config, make_runner)
        else:
            start_heartbeats(channel)
            if role == "media":
                from cllm.workers.media import serve_media as serve_tokenizer
            serve_tokenizer(channel, config)
    except msgspec.MsgspecError as error:
        log.critical("a message could not be decoded: %s", type(error).__name__)
        return BAD_COMMAND
    except ConnectionError:
        return 0  # the parent is gone
    except Exception as error:
        if isinstance(error, CllmError):  # it explains itself; others belong in the log
            died = Died(error.code, error.message)
        else:
            log.exception("the %s process failed", role)
            died = Died("engine_died", f"the {role} process failed: {type(error).__name__}")
        channel.send(msgspec.msgpack.encode(died))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
