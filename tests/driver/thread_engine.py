"""An engine in a thread of the test, over a runner that the test makes; read without an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import Any, TypeVar, cast
from unittest import mock

import pytest

from cllm import LLM, AsyncLLM
from cllm.backend.base import ModelRunner
from cllm.config import EngineConfig
from cllm.core.engine_core import EngineCore
from cllm.errors import CllmError
from cllm.frontend.async_calls import get_loop
from cllm.frontend.engine_client import EngineClient, StreamKind
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.messages import Command, Died, Stop, TokenizerAnswer, TokenizerCall, TokenizerTask
from cllm.types import Request, RequestOutput, Snapshot, TokenBound
from cllm.workers.executor import ProcessExecutor, ProcessTokenizer, Receive, encode, settle
from cllm.workers.tokenizer import TokenizerWorker

MakeRunner = Callable[[EngineConfig], ModelRunner]
Kind = TypeVar("Kind", LLM, AsyncLLM)


class ThreadExecutor(ProcessExecutor):
    """An executor in a thread. The tokenizer runs in that of its caller."""

    tokenizer: ThreadTokenizer

    def __init__(self, make_runner: MakeRunner, config: EngineConfig | None = None) -> None:
        self._make_runner = make_runner
        self._config = config or EngineConfig()
        self.tokenizer = ThreadTokenizer()
        self._core: EngineCore | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False

    def start(self, receive: Receive, delay_s: float = 0.0) -> None:
        self._thread = threading.Thread(target=self._run, args=(receive,), name="engine", daemon=True)
        self._thread.start()

    def _run(self, receive: Receive) -> None:
        try:
            with closing(self._make_runner(self._config)) as runner:
                self.tokenizer.worker = TokenizerWorker(runner.vocabulary, runner.info.chat_template)
                self._core = core = EngineCore(runner, self._config, receive)
                if self._stopping:
                    core.post(Stop())
                receive(core.ready)
                core.run()
        except CllmError as error:
            receive(Died(error.code, error.message))

    def send(self, command: Command) -> None:
        if self._core is not None:
            self._core.post(command)

    def stop(self) -> None:
        self._stopping = True
        self.send(Stop())
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


class ThreadTokenizer(ProcessTokenizer):
    """A tokenizer whose answer is there at once."""

    worker: TokenizerWorker  # once the engine is ready

    def __init__(self) -> None:
        self.bound = TokenBound()

    def submit(self, task: TokenizerTask, tenant: str = "") -> Future[TokenizerAnswer]:
        encode(TokenizerCall(0, task))  # refuses what no message can carry
        future: Future[TokenizerAnswer] = Future()
        settle(future, self.worker.perform(task))
        return future

    def abort(self, future: Future[TokenizerAnswer]) -> None: ...

    def end(self, why: str = "") -> None: ...


class InlineLoop:
    """An event loop for `BlockingEngine`: calls are made at once, on the caller's thread, one at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def call_soon_threadsafe(self, call: Callable[..., None], *arguments: Any) -> None:
        with self.lock:
            call(*arguments)

    def call_later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> Future[None]:
        timer: Future[None] = Future()  # it can be cancelled until it has fired

        def fire() -> None:
            with self.lock:
                if timer.set_running_or_notify_cancel():
                    call(*arguments)

        loop = get_loop(os.getpid())
        loop.call_soon_threadsafe(loop.call_later, delay_s, fire)
        return timer


class BlockingEngine(EngineClient):
    """An engine client without an event loop: its methods may be called from any thread."""

    def __init__(self, executor: ProcessExecutor, **settings: Any) -> None:
        super().__init__(executor, **settings)
        self.inline = InlineLoop()
        self._loop = cast(asyncio.AbstractEventLoop, self.inline)

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        assert self._loop is not None
        super().start(self._loop)

    def submit(self, request: Request, kind: type[StreamKind]) -> StreamKind:
        with self.inline.lock:
            return super().submit(request, kind)

    def cancel(self, request_id: str) -> None:
        with self.inline.lock:
            super().cancel(request_id)

    def inspect(self) -> Future[Snapshot]:
        with self.inline.lock:
            return super().inspect()


class BlockingOutputStream(AsyncOutputStream):
    """Read with `for`, from any one thread."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self._condition = threading.Condition()

    def push(self, output: RequestOutput) -> None:
        with self._condition:
            super().push(output)
            self._condition.notify_all()

    def take(self) -> RequestOutput:
        """All that is unread; something is."""
        with pytest.raises(StopIteration) as end:
            self.next().send(None)
        output: RequestOutput = end.value.value
        return output

    def __iter__(self) -> Iterator[RequestOutput]:
        while True:
            with self._condition:
                while self._newest is None:
                    self._condition.wait()
                output = self.take()
            yield output
            if output.finish_reason is not None:
                return


def make_llm(kind: type[Kind], make_runner: MakeRunner, **settings: Any) -> Kind:
    """An `LLM` or `AsyncLLM` over a runner of the test, without processes."""
    with mock.patch("cllm.llm.ProcessExecutor", lambda config, **_: ThreadExecutor(make_runner, config)):
        return kind(worker="thread", **settings)
