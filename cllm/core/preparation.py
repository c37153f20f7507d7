"""Preparation: what a request waits for before it may start, made off the owner thread.

A grammar is compiled; a sampler that looks back is built: its history is the whole prompt, and DRY walks the
vocabulary for each sequence breaker. The context of embeddings is opened. None of it delays a step.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from cllm.backend.base import ModelRunner, Sampler
from cllm.text.structured_output import Constraint, GrammarCompiler
from cllm.types import Request

Made = TypeVar("Made")


class RequestParts(NamedTuple):
    """What a request needs beside its slot."""

    constraint: Constraint | None
    sampler: Sampler | None  # None: cheap enough to be built when it starts


class Preparation:
    """Two threads, one for grammars alone. `wake` is called when something is done."""

    def __init__(
        self,
        runner: ModelRunner,
        wake: Callable[[], None],
        new_executor: Callable[[str], Executor] | None = None,
    ) -> None:
        """`new_executor` replaces the threads, for tests."""
        self._runner = runner
        self._wake = wake
        new_executor = new_executor or _new_thread
        self._grammars, self._others = new_executor("cllm-grammars"), new_executor("cllm-samplers")
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()
        self.unused: deque[Sampler] = deque()  # of requests that ended before they started

    def submit(self, request: Request) -> Future[RequestParts]:
        """Begin to prepare a request that has a grammar, or a sampler that looks back."""
        thread = self._others if request.sampling.looks_back else self._grammars
        return self._watched(thread.submit(self._prepare, request))

    def warm_up(self) -> None:
        """Build the grammar compiler now: it takes half a second, much of it under Python's one lock."""
        self._grammars.submit(self._get_compiler)

    def open_embedding(self) -> Future[None]:
        return self._watched(self._others.submit(self._runner.open_embedding))

    def discard(self, future: Future[RequestParts]) -> None:
        """The request has ended: what is made for it is not needed."""
        if not future.cancel():
            future.add_done_callback(self._put_aside)

    def close_unused(self) -> None:
        """Free what was discarded. Owner thread only."""
        while self.unused:
            self.unused.popleft().close()

    def close(self) -> None:
        """Wait for what is under way; nothing native is used afterwards."""
        for thread in (self._grammars, self._others):
            thread.shutdown(cancel_futures=True)
        self.close_unused()

    def _watched(self, future: Future[Made]) -> Future[Made]:
        future.add_done_callback(lambda _: self._wake())
        return future

    def _put_aside(self, future: Future[RequestParts]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        if (sampler := future.result().sampler) is not None:
            self.unused.append(sampler)
            self._wake()

    def _prepare(self, request: Request) -> RequestParts:
        constraint = sampler = None
        if request.constraint is not None:
            compiler = self._get_compiler()
            with self._lock:  # it compiles one grammar at a time
                constraint = compiler.compile(request.constraint)
        if request.sampling.looks_back:
            sampler = self._runner.create_sampler(request.sampling)
            sampler.accept(request.prompt.items)
        return RequestParts(constraint, sampler)

    def _get_compiler(self) -> GrammarCompiler:
        with self._lock:
            self._compiler = self._compiler or GrammarCompiler(self._runner.vocabulary)
            return self._compiler


def _new_thread(name: str) -> Executor:
    return ThreadPoolExecutor(1, name, initializer=_yield_to_others)


def _yield_to_others() -> None:
    """This thread gets its share of the cores, but does not push the threads of a step off them."""
    if sys.platform == "linux":  # elsewhere a thread has no policy of its own
        with contextlib.suppress(OSError):
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))
