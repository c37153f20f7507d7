"""Calls on the KV cache: clear all of it, or save, restore or erase a slot. The disk is not waited for."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

from cllm.core.kv_cache.cache_file import get_file_size, get_reason
from cllm.core.kv_cache.disk_cache import STALL_LIMIT_S, DiskKVCache
from cllm.core.kv_cache.prefix_cache import PrefixCache
from cllm.errors import CllmError, EngineError, NotSupported, StorageFailed
from cllm.messages import CacheDone, ClearCache, Report, UseSlot
from cllm.types import Failure

log = logging.getLogger(__name__)

_Work = Generator[Future[Any], Any, CacheDone]


class CacheCalls:
    """Does one call at a time, in the order they came; each ends with one CacheDone."""

    def __init__(self, cache: PrefixCache, disk: DiskKVCache, emit: Callable[[Report], None]) -> None:
        self._cache = cache
        self._disk = disk
        self._emit = emit
        self.calls: deque[tuple[int, _Work]] = deque()
        self._operation: Future[Any] | None = None  # what the first of them waits for

    def add(self, command: ClearCache | UseSlot) -> None:
        """Begin a call, or queue it behind the others."""
        work = self._clear(command) if isinstance(command, ClearCache) else self._use(command)
        self.calls.append((command.call_id, work))
        self.advance()

    def advance(self) -> None:
        """Answer the calls whose operation is done, or whose disk does not answer; begin the next.

        To be called when the disk has answered, and while there are calls at least every `STALL_LIMIT_S`.
        """
        while self.calls:
            call_id, work = self.calls[0]
            try:
                if self._operation is None:
                    self._operation = next(work)
                if self._operation.done():
                    work.send(self._operation.result())
                if self._disk.busy_s > STALL_LIMIT_S:
                    raise StorageFailed("the disk does not answer: check the disk of --cache-dir")
                return
            except StopIteration as end:
                self._emit(end.value)
            except Exception as error:
                self._emit(CacheDone(call_id, failure=_explain(error)))
            self._operation = None
            self.calls.popleft()

    def _clear(self, command: ClearCache) -> _Work:
        prefixes, tokens = self._cache.clear()
        yield self._disk.clear()
        return CacheDone(command.call_id, prefixes, tokens)

    def _use(self, command: UseSlot) -> _Work:
        if command.action == "erase":
            if (content := self._cache.erase(command.slot)) is None:
                return CacheDone(command.call_id)
            yield self._disk.forget(content)
            return CacheDone(command.call_id, tokens=len(content.tokens))
        if not self._disk.limit:
            raise NotSupported(
                "slots are saved in the disk cache, which is off: start the server with --cache-disk-mb N "
                "(cllm llama-server: --slot-save-path DIR)"
            )
        if command.action == "save":
            entry = self._cache.read_slot(command.slot)
            yield self._disk.save_slot(command.name, entry)
        else:
            entry = yield self._disk.load_slot(command.name, self._cache.host.cached_limit)
            if not self._cache.host.put(entry):
                raise StorageFailed("the saved slot finds no room in RAM: raise --cache-ram-mb")
        return CacheDone(command.call_id, tokens=len(entry.tokens), size=get_file_size(entry))


def _explain(error: Exception) -> Failure:
    if isinstance(error, OSError):
        error = StorageFailed(f"the files of the disk cache: {get_reason(error)}")
    if not isinstance(error, CllmError):
        log.error("a call on the KV cache failed", exc_info=error)
        error = EngineError("the KV cache could not be processed; the log has the details")
    return Failure(error.code, error.message)
