"""Where the step loop runs: in a thread of this process, or in a supervised child process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec

from cllm.backend.base import ModelRunner
from cllm.config import EngineConfig
from cllm.core.engine_core import EngineCore
from cllm.errors import CllmError
from cllm.workers.channel import ChildProcess
from cllm.workers.messages import Command, Died, Heartbeat, Loading, Report, Stop
from cllm.workers.tokenizer_client import LocalTokenizer, ProcessTokenizer, TokenizerClient

log = logging.getLogger(__name__)

Receive = Callable[[Report], None]
MakeRunner = Callable[[Callable[[float], None]], ModelRunner]


class Host(Protocol):
    """Runs one step loop at a time. Its life, as told to `receive`: Loading*, Ready, reports*, Died."""

    restartable: bool

    @property
    def text(self) -> TokenizerClient:
        """Where this model's text work runs; in the thread host only once it is Ready."""

    def start(self, receive: Receive) -> None:
        """Begin to load; returns at once. Only after `Died` may it be called again."""

    def send(self, command: Command) -> None:
        """Pass a command on; to a host that is gone it is dropped (its death is being told)."""

    def stop(self) -> None:
        """End it and wait until nothing native is left. Idempotent."""


class ThreadExecutor:
    """The engine in a thread of this process: for the Python API. Native death takes the process along."""

    restartable = False

    def __init__(self, make_runner: MakeRunner, config: EngineConfig) -> None:
        self._make_runner = make_runner
        self._config = config
        self._loop: EngineCore | None = None
        self._text: LocalTokenizer | None = None
        self._thread: threading.Thread | None = None

    @property
    def text(self) -> TokenizerClient:
        assert self._text is not None, "no text work before the model is loaded"
        return self._text

    def start(self, receive: Receive) -> None:
        self._thread = threading.Thread(target=self._run, args=(receive,), name="cllm-engine", daemon=True)
        self._thread.start()

    def _run(self, receive: Receive) -> None:
        try:
            runner = self._make_runner(lambda fraction: receive(Loading(fraction)))
            try:
                self._loop = loop = EngineCore(runner, self._config, receive)
                info = runner.info
                self._text = LocalTokenizer(
                    runner.vocabulary, info.chat_template, tool_template=info.tool_template
                )
                receive(loop.ready)
                loop.run()
            finally:
                if self._text is not None:
                    self._text.close()  # first: it reads the runner's vocabulary, from any thread
                runner.close()
        except CllmError as error:
            receive(Died(error.code, error.message))
        except Exception as error:
            log.exception("the engine thread died")
            receive(Died("engine_died", f"the engine failed: {type(error).__name__}"))

    def send(self, command: Command) -> None:
        if self._loop is not None:
            self._loop.post(command)

    def stop(self) -> None:
        self.send(Stop())
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


class ProcessExecutor:
    """The engine in a child process: for the server. A watchdog kills a child that has gone quiet."""

    restartable = True

    START_LIMIT_S = 120.0  # until the first heartbeat: a new interpreter on a busy machine
    SILENCE_LIMIT_S = 10.0  # heartbeats come every second from a thread that does nothing else
    STEP_LIMIT_S = 600.0  # no step of any size that fits a batch takes this long

    def __init__(
        self, config: EngineConfig, *, log_level: str = "info", module: str = "cllm.workers.engine_worker"
    ) -> None:
        self._config = config
        self._log_level = log_level
        self._module = module
        self._decoder = msgspec.msgpack.Decoder(Report)
        self._encoder = msgspec.msgpack.Encoder()
        self._child: ChildProcess | None = None
        self._text: ProcessTokenizer | None = None

    @property
    def text(self) -> TokenizerClient:
        assert self._text is not None, "no text work before start"
        return self._text

    @property
    def pid(self) -> int | None:
        """The child's process id, for operators and tests."""
        return self._child.pid if self._child is not None else None

    def start(self, receive: Receive) -> None:
        if self._text is None:
            self._text = ProcessTokenizer(self._config, log_level=self._log_level, module=self._module)
        child = ChildProcess(self._module, "engine", self._log_level, silence_limit_s=self.START_LIMIT_S)
        self._child = child
        child.send(self._encoder.encode(self._config))
        threading.Thread(
            target=self._read, args=(child, receive), name="cllm-engine-reports", daemon=True
        ).start()

    def _read(self, child: ChildProcess, receive: Receive) -> None:
        """Pass the child's reports on until it ends, then tell why. Runs in a thread of its own."""
        last_words: Died | None = None
        for frame in child.frames():
            report = self._decoder.decode(frame)
            match report:
                case Heartbeat(step_age_s):
                    child.silence_limit_s = self.SILENCE_LIMIT_S
                    if step_age_s > self.STEP_LIMIT_S:
                        log.error("the engine has been in one step for %.0f s: killing it", step_age_s)
                        child.kill()
                case Died():
                    last_words = report
                case _:
                    receive(report)
        receive(last_words or Died("engine_died", child.exit_reason()))

    def send(self, command: Command) -> None:
        if self._child is not None:
            self._child.send(self._encoder.encode(command))

    def stop(self) -> None:
        if self._child is not None:
            self._child.close()
        if self._text is not None:
            self._text.close()
