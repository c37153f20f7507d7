"""Jobs on cache files: the prefix cache saved to a file on command, and restored from it.

The engine begins a slice between two steps, and a disk thread does it: a folder on a network may answer late,
or never. The first entry of a file is the one used last.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from cllm.backend.base import ModelRunner
from cllm.core.kv_cache.cache_file import CacheFileReader, CacheFileWriter, Candidate, Moved, strip_states
from cllm.core.kv_cache.disk_thread import DiskThread, Operation, Work, run_slices
from cllm.core.kv_cache.host_cache import HostKVCache
from cllm.core.kv_cache.prefix_index import CachedPrefix, PrefixTier
from cllm.errors import CllmError, EngineError, Forbidden, InvalidRequest, StorageFailed
from cllm.names import is_name, path_below
from cllm.types import Failure
from cllm.workers.messages import Report, StateFileDone, UseStateFile

log = logging.getLogger(__name__)

MAX_JOBS = 8
STALL_LIMIT_S = 60.0  # of one slice; the last one, a sync, may take a slow disk many seconds
CLOSE_LIMIT_S = 2.0
SUFFIX = ".prefixes"


def get_path(folder: str, name: str) -> Path:
    """Where a file of this name lies. Raises Forbidden without a folder, InvalidRequest for a path."""
    if not folder:
        raise Forbidden("no state files are kept: start the server with --state-dir FOLDER")
    if not is_name(name):
        raise InvalidRequest("name: up to 64 letters, digits, '.', '-' and '_', not a path", "name")
    return path_below(Path(folder), name + SUFFIX)


def save(candidates: Iterable[Candidate], path: Path, fingerprint: str) -> Work[Moved]:
    """Write everything that is cached, atomically: the old file stays until the new one is on the disk.

    Raises StorageFailed; then nothing is left of the new one.
    """
    writer = CacheFileWriter(path, path.with_name(f".{path.name}.new"), fingerprint)
    return Work(_save(candidates, writer), writer.close)


def _save(candidates: Iterable[Candidate], writer: CacheFileWriter) -> Generator[Operation, Any, Moved]:
    yield writer.open
    written: PrefixTier[CachedPrefix] = PrefixTier()
    for candidate in candidates:
        entry = candidate.save()
        if entry is not None and not written.has(entry):
            yield from run_slices(writer.write(entry))
            points = strip_states(entry.checkpoints)
            written.insert(CachedPrefix(entry.tenant, entry.tokens, points, entry.min_length))
    moved: Moved = yield writer.finish
    return moved


def restore(host: HostKVCache, path: Path, fingerprint: str) -> Work[Moved]:
    """Put a file's entries behind what the cache holds, as far as there is room; none is evicted for them.

    The whole file is checked before the first of them. Raises StateFileError, NotFound or StorageFailed:
    then nothing has changed.
    """
    reader = CacheFileReader(path, fingerprint)
    return Work(_restore(host, reader), reader.close)


def _restore(host: HostKVCache, reader: CacheFileReader) -> Generator[Operation, Any, Moved]:
    yield reader.open
    for _ in range(reader.entries):
        yield from run_slices(reader.read(max_bytes=0))
    yield reader.rewind
    moved = Moved()
    for _ in range(reader.entries):
        # Checked once more: the file may have been written to since the check.
        entry = yield from run_slices(reader.read(max_bytes=host.room))
        if entry is not None and host.put_last(entry):
            moved = moved.plus(entry)
        else:
            moved = moved._replace(skipped=moved.skipped + 1)
    return moved


class CacheFileJobs:
    """Saves and restores the prefix cache beside the steps; each job ends with one report.

    One job at a time, in the order they came. All fail while the disk does not answer.
    """

    def __init__(
        self,
        runner: ModelRunner,
        host: HostKVCache,
        candidates: Callable[[], Iterable[Candidate]],
        folder: str,
        emit: Callable[[Report], None],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`candidates` are what a file is made of; `wake` is called when the disk has answered."""
        self._wake = wake
        self._runner = runner
        self._host = host
        self._candidates = candidates
        self._folder = folder
        self._emit = emit
        self._jobs: deque[tuple[int, str, Work[Moved]]] = deque()  # call id, label, work
        self._fingerprint = ""  # computed when it is first needed: that reads the model's file
        self._disk = DiskThread("state-files")
        self._operation: Future[Any] | None = None  # of the first job

    @property
    def idle(self) -> bool:
        return not self._jobs

    @property
    def has_work(self) -> bool:
        """There is a job that does not wait for the disk."""
        return bool(self._jobs) and (self._operation is None or self._operation.done())

    def add(self, command: UseStateFile) -> None:
        """Begin a job, or report at once why not."""
        try:
            path = get_path(self._folder, command.name)
            self._check_disk()
            if len(self._jobs) >= MAX_JOBS:
                raise EngineError(f"{MAX_JOBS} state files are being written or read already")
            self._fingerprint = self._fingerprint or self._runner.state_fingerprint()
            if command.save:
                work = save(self._candidates(), path, self._fingerprint)
            else:
                work = restore(self._host, path, self._fingerprint)
            label = f"{'save' if command.save else 'restore'} {command.name}"
            self._jobs.append((command.call_id, label, work))
        except Exception as error:
            self._fail(command.call_id, error)

    def _check_disk(self) -> None:
        if self._disk.busy_s > STALL_LIMIT_S:
            raise StorageFailed(
                f"the folder of the state files has not answered for {self._disk.busy_s:.0f} s: "
                "check its disk or network; state files work again when it answers"
            )

    def slice(self) -> None:
        """Go on with the job at hand: begin its next slice when the last one is done. There must be a job."""
        call_id, label, work = self._jobs[0]
        try:
            if self._operation is None:
                self._begin(next(work.operations))
            elif self._operation.done():
                self._begin(work.operations.send(self._operation.result()))
            else:
                self._check_disk()
            return
        except StopIteration as end:
            moved = end.value
            log.info("%s: %d entries, %d tokens", label, moved.entries, moved.tokens)
            self._emit(StateFileDone(call_id, moved.entries, moved.tokens, moved.size, moved.skipped))
        except Exception as error:
            log.warning("%s failed: %s", label, error)
            self._fail(call_id, error)
        self._operation = None
        self._disk.submit(work.discard)
        self._jobs.popleft()

    def _begin(self, operation: Operation) -> None:
        self._operation = self._disk.submit(operation)
        self._operation.add_done_callback(lambda _: self._wake())

    def _fail(self, call_id: int, error: Exception) -> None:
        if not isinstance(error, CllmError):
            log.exception("a state file failed", exc_info=error)
            error = EngineError("the state file could not be processed; the log has the details")
        self._emit(StateFileDone(call_id, failure=Failure(error.code, error.message)))

    def close(self) -> None:
        """Give up what is left; half-written files are removed, unless the disk does not answer."""
        last = [self._disk.submit(work.discard) for *_, work in self._jobs]
        wait(last, CLOSE_LIMIT_S)
        self._jobs.clear()
