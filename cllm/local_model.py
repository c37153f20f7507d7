"""Local model: an engine in a thread of this process, opened once.

One that is still open when the interpreter exits is closed then. A forked child cannot use its parent's.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import msgspec

from cllm.backend.base import ModelRunner
from cllm.backend.llama.probe import find_ready
from cllm.backend.llama.runner import LlamaRunner
from cllm.chat.options import check_names
from cllm.config import EngineConfig, make_config
from cllm.errors import EngineNotReady, ShuttingDown
from cllm.frontend.engine_client import EngineClient
from cllm.types import Health, Limits, ModelInfo
from cllm.workers.engine_worker import ThreadExecutor

log = logging.getLogger(__name__)
EXIT_LIMIT_S = 30.0  # for each open model; a step that runs is interrupted
Result = TypeVar("Result")


class LocalModel:
    """What `LLM` and `AsyncLLM` share: an engine in a thread, opened once and closed once."""

    _entry = "with LLM(...) as llm"
    _tokenizer_threads = 0  # the caller tokenises

    def __init__(
        self,
        model: str | Path = "",
        *,
        config: EngineConfig | None = None,
        make_runner: Callable[[EngineConfig], ModelRunner] | None = None,
        **settings: Any,
    ) -> None:
        """Serve `model` (default: the embedded SmolLM2-135M). `settings` are fields of `EngineConfig`.

        Raises SetupError when the model cannot be served; it is loaded on entry.
        """
        check_names(type(self).__name__, settings, EngineConfig.__struct_fields__)
        asked = msgspec.structs.asdict(config or EngineConfig()) | settings
        if os.fspath(model):
            asked["model"] = model
        paths = {name: str(value) for name, value in asked.items() if isinstance(value, Path)}
        config = make_config(EngineConfig, asked | paths)
        # The library is probed in a child process: if it crashes, the caller's process lives on.
        ready = find_ready(config, log.info) if make_runner is None else config

        def load(progress: Callable[[float], None]) -> ModelRunner:
            return LlamaRunner(ready, progress=progress) if make_runner is None else make_runner(ready)

        self._executor = ThreadExecutor(load, ready, tokenizer_threads=self._tokenizer_threads)
        self._engine = EngineClient(self._executor, queue_size=1_000_000)
        self._engine.shutdown_message = "the model was closed"
        self._entered = threading.Lock()  # taken once, and never released
        self._forks: int | None = None  # of the process that opened it; None: not opened
        self._closed = False

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Raises EngineNotReady before it is opened."""
        return self._check_open()

    @property
    def limits(self) -> Limits:
        """The limits of the loaded model. Raises EngineNotReady before it is opened."""
        self._check_open()
        assert self._engine.limits is not None
        return self._engine.limits

    def _start(self, deliver: Callable[..., Any] | None = None) -> None:
        """Begin to load. Raises RuntimeError on a second entry, or after it was closed."""
        if _exiting:
            raise RuntimeError("the interpreter is shutting down: no model can be opened")
        if not self._entered.acquire(blocking=False):
            state = "closed" if self._closed else "open already"
            name = type(self).__name__
            raise RuntimeError(f"this {name} is {state}: each can be opened once; make another {name}(...)")
        if deliver is not None:
            self._engine.deliver = deliver
        self._forks = _forks
        _open.add(self)
        try:
            self._engine.start()
        except BaseException:  # no thread can be started, or Ctrl-C
            self._stop()
            raise

    def _check_open(self) -> ModelInfo:
        """The loaded model. Raises an error that says why it cannot be used here and now."""
        if self._closed:
            raise ShuttingDown(f"this {type(self).__name__} is closed: open another one")
        if self._forks is None:
            raise EngineNotReady(f"open it first: `{self._entry}`")
        self._check_process()
        if self._engine.health is Health.FAILED:
            self._engine.check_capacity()  # raises what has ended it
        if self._engine.info is None:
            raise EngineNotReady("the model is still loading")
        return self._engine.info

    def _check_process(self) -> None:
        if self._forks != _forks:
            name = type(self).__name__
            raise EngineNotReady(f"this {name} was opened in another process: open one of its own here")

    def _stop(self) -> None:
        """Close the model and wait until nothing native is left."""
        self._closed = True
        self._entered.acquire(blocking=False)
        if self._forks in (None, _forks):  # a forked child has neither the engine's thread nor its locks
            self._engine.stop()
        _open.discard(self)

    @contextmanager
    def _cancel_after(self, *request_ids: str) -> Iterator[None]:
        """Cancel those of these requests that run when their reader leaves."""
        try:
            yield
        finally:
            if self._forks == _forks:
                uninterrupted(self._cancel_all, request_ids)

    def _cancel_all(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._engine.cancel(request_id)


def uninterrupted(call: Callable[..., Result], *arguments: Any) -> Result:
    """Call it; a Ctrl-C meanwhile counts after it, so that it leaves no request table half-changed.

    Python interrupts the main thread only.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        return call(*arguments)
    signals: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *received: signals.append(received))
    try:
        return call(*arguments)
    finally:
        signal.signal(signal.SIGINT, handler)
        if signals:
            handler(*signals[0])


_open: set[LocalModel] = set()  # models to close at exit
_exiting = False
_forks = 0  # how many forks lie between this process and the one that imported this module


def _close_open_models() -> None:
    """Close what is open: a thread in native code while the interpreter is torn down ends it by a signal."""
    global _exiting
    _exiting = True
    for model in tuple(_open):
        model._executor.stop_limit_s = EXIT_LIMIT_S
        model._stop()


def _forget_open_models() -> None:
    """In a forked child: its parent's models are not its own."""
    global _forks
    _forks += 1
    _open.clear()


os.register_at_fork(after_in_child=_forget_open_models)
# Before the threads of pools end, which the engine uses; and again where Ctrl-C has cut that short.
atexit.register(_close_open_models)
if hasattr(threading, "_register_atexit"):
    threading._register_atexit(_close_open_models)
