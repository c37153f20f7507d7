"""Entry point of the child processes: `python -m cllm.workers.engine_worker FD engine|text LOG_LEVEL`.

Beside the CLI, the only place that names the llama runner. The first frame is the configuration; after
that commands come in and reports go out. End of input ends the process, whatever it is doing.
"""

from __future__ import annotations

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
from cllm.logs import configure_logging
from cllm.workers.channel import Channel
from cllm.workers.messages import Command, Died, Heartbeat, Loading, Report, Stop

log = logging.getLogger(__name__)
HEARTBEAT_S = 1.0
MakeRunner = Callable[[EngineConfig, Callable[[float], None]], ModelRunner]
ServeTokenizer = Callable[[Channel, EngineConfig], None]


class EngineWorker:
    """A step loop wired to a channel: one thread computes, one reads commands, one beats."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._encoder = msgspec.msgpack.Encoder()
        self._loop: EngineCore | None = None

    def run(self, config: EngineConfig, make_runner: MakeRunner) -> None:
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        runner = make_runner(config, lambda fraction: self._emit(Loading(fraction)))
        self._loop = loop = EngineCore(runner, config, self._emit)
        self._emit(loop.ready)
        threading.Thread(target=self._read_commands, args=(loop,), name="commands", daemon=True).start()
        loop.run()
        runner.close()

    def _emit(self, report: Report) -> None:
        try:
            self._channel.send(self._encoder.encode(report))
        except OSError:
            os._exit(0)  # the parent is gone

    def _beat(self) -> None:
        while True:
            started = self._loop.step_started if self._loop is not None else None
            self._emit(Heartbeat(time.perf_counter() - started if started is not None else 0.0))
            time.sleep(HEARTBEAT_S)

    def _read_commands(self, loop: EngineCore) -> None:
        decoder = msgspec.msgpack.Decoder(Command)
        while (frame := self._channel.receive()) is not None:
            command = decoder.decode(frame)
            loop.post(command)
            if isinstance(command, Stop):
                return
        os._exit(0)  # EOF: nobody is left to compute for


def _llama_runner(config: EngineConfig, progress: Callable[[float], None]) -> ModelRunner:
    from cllm.backend.llama.runner import LlamaRunner

    return LlamaRunner(config, progress=progress)


def _llama_tokenizer(channel: Channel, config: EngineConfig) -> None:
    from cllm.workers.tokenizer_worker import serve_tokenizer

    serve_tokenizer(channel, config)


def main(
    arguments: list[str],
    make_runner: MakeRunner = _llama_runner,
    serve_tokenizer: ServeTokenizer = _llama_tokenizer,
) -> int:
    descriptor, role, log_level = arguments
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # or an abort would start a debugger first
    configure_logging(log_level)
    channel = Channel(socket.socket(fileno=int(descriptor)))
    first = channel.receive()
    if first is None:
        return 0
    config = msgspec.msgpack.decode(first, type=EngineConfig)
    try:
        if role == "engine":
            EngineWorker(channel).run(config, make_runner)
        else:
            serve_tokenizer(channel, config)
    except CllmError as error:
        channel.send(msgspec.msgpack.encode(Died(error.code, error.message)))
        return 1
    except Exception as error:
        log.exception("the %s process failed", role)
        message = f"the {role} process failed: {type(error).__name__}"
        channel.send(msgspec.msgpack.encode(Died("engine_died", message)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
