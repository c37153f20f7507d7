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
from functools import partial
from typing import Any, NamedTuple, TypeVar

from cllm.adapters import Adapter
from cllm.backend.base import ModelRunner, Sampler
from cllm.text.structured_output import Constraint, GrammarCompiler
from cllm.types import Request

Made = TypeVar("Made")


class RequestParts(NamedTuple):
    """What a request needs beside its slot."""

    constraint: Constraint | None
    sampler: Sampler | None  # None: cheap enough to be built when it starts


class FairThread:
    """One thread whose tasks are fair between tenants: a line for each tenant, and the tenants take turns."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._lock = threading.Lock()
        self._lines: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}  # in the order of turns
        self._served = ""  # the tenant whose turn was the last one

    def submit(self, tenant: str, task: Callable[[], Made]) -> Future[Made]:
        """Queue a task. Its future may be cancelled while it waits."""
        future: Future[Made] = Future()
        with self._lock:
            self._lines.setdefault(tenant, deque()).append((future, task))
        self.executor.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        with self._lock:
            tenant = next((each for each in self._lines if each != self._served), self._served)
            self._served, line = tenant, self._lines.pop(tenant)
            future, task = line.popleft()
            if line:
                self._lines[tenant] = line  # the next turn is after all others'
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)


class Preparation:
    """Threads for grammars, for samplers, and for those with DRY, which take seconds of a large vocabulary.

    `wake` is called when something is done.
    """

    def __init__(
        self,
        runner: ModelRunner,
        wake: Callable[[], None],
        new_executor: Callable[[str], Executor] | None = None,
    ) -> None:
        """`new_executor` replaces the threads, for tests."""
        self._runner = runner
        self._wake = wake
        new_executor = new_executor or partial(ThreadPoolExecutor, 1, initializer=_yield_to_others)
        names = ("cllm-grammars", "cllm-samplers", "cllm-dry")
        self._threads = [FairThread(new_executor(name)) for name in names]
        self._grammars, self._others, self._dry = self._threads
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()
        self.unused: deque[Sampler] = deque()  # of requests that ended before they started

    def submit(self, request: Request) -> Future[RequestParts]:
        """Begin to prepare a request that has a grammar, or a sampler that looks back."""
        sampling = request.sampling
        thread = self._dry if sampling.dry_multiplier else self._others
        thread = thread if sampling.looks_back else self._grammars
        return self._watched(thread.submit(request.tenant, partial(self._prepare, request)))

    def warm_up(self) -> None:
        """Build the grammar compiler now: it takes half a second, much of it under Python's one lock."""
        self._grammars.submit("", self._get_compiler)

    def open_embedding(self) -> Future[None]:
        return self._watched(self._others.submit("", self._runner.open_embedding))

    def check_adapter(self, adapter: Adapter) -> Future[Adapter]:
        """Begin to read the file of an adapter."""
        return self._watched(self._others.submit("", partial(self._runner.check_adapter, adapter)))

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
        for thread in self._threads:
            thread.executor.shutdown(cancel_futures=True)
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
            sampler.accept(request.prompt.text)
        return RequestParts(constraint, sampler)

    def _get_compiler(self) -> GrammarCompiler:
        with self._lock:
            self._compiler = self._compiler or GrammarCompiler(self._runner.vocabulary)
            return self._compiler


def _yield_to_others() -> None:
    """This thread gets its share of the cores, but does not push the threads of a step off them."""
    if sys.platform == "linux":  # elsewhere a thread has no policy of its own
        with contextlib.suppress(OSError):
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))
