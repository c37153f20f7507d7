"""Adapter calls: load and unload LoRA adapters between two steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from cllm.adapters import Adapter, split_key
from cllm.backend.base import ModelRunner
from cllm.core.preparation import Preparation
from cllm.core.sequence import Sequence
from cllm.errors import AdapterBusy, CllmError, EngineError
from cllm.messages import AdapterDone, LoadAdapter, Report, UnloadAdapter
from cllm.types import Failure

log = logging.getLogger(__name__)


class AdapterCalls:
    """Answers each call with one AdapterDone. A file is read beside the steps, and loaded between two."""

    def __init__(
        self,
        runner: ModelRunner,
        preparation: Preparation,
        live: Callable[[], Iterable[Sequence]],
        emit: Callable[[Report], None],
    ) -> None:
        self._runner, self._preparation = runner, preparation
        self._live, self._emit = live, emit
        self._checks: list[tuple[LoadAdapter, Future[Adapter]]] = []

    def add(self, command: LoadAdapter | UnloadAdapter, *, idle: bool) -> None:
        """Begin a call. While the engine is `idle` it is done at once: before the next command."""
        call_id, adapter = command.call_id, command.adapter
        if isinstance(command, UnloadAdapter):
            self._answer(call_id, adapter, self._unload)
        elif idle:
            self._answer(call_id, adapter, self._load)
        else:
            self._checks.append((command, self._preparation.check_adapter(adapter)))

    def advance(self) -> None:
        """Load the adapters whose files have been read."""
        done = [each for each in self._checks if each[1].done()]
        self._checks = [each for each in self._checks if each not in done]
        for command, check in done:
            self._answer(command.call_id, command.adapter, partial(self._load, check=check))

    def _load(self, adapter: Adapter, check: Future[Adapter] | None = None) -> Adapter:
        adapter = self._runner.check_adapter(adapter) if check is None else check.result()
        self._runner.load_adapter(adapter)
        log.info("adapter %s is loaded: %d bytes", adapter.name, adapter.size)
        return adapter

    def _unload(self, adapter: Adapter) -> Adapter:
        if any(adapter.digest in split_key(each.request.prompt.adapter) for each in self._live()):
            raise AdapterBusy(f"adapter {adapter.name} has requests; try again when they have ended")
        self._runner.unload_adapter(adapter.digest)
        return adapter

    def _answer(self, call_id: int, adapter: Adapter, call: Callable[[Adapter], Adapter]) -> None:
        failure: Failure | None = None
        try:
            adapter = call(adapter)
        except Exception as error:
            if not isinstance(error, CllmError):
                log.error("a call for an adapter failed", exc_info=error)
                error = EngineError(f"adapter {adapter.name}: {type(error).__name__}")
            failure = Failure.of(error)
        self._emit(AdapterDone(call_id, adapter, sum(self._runner.adapters.values()), failure))
