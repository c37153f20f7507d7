"""Job store: files, batches, responses and conversations in SQLite and in files, apart for each tenant.

One thread owns the database. Calls that wait for it run in one transaction, so a commit serves many of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Concatenate, Literal, ParamSpec, TypeVar

import msgspec

from cllm.config import ServerConfig
from cllm.errors import CllmError, ConfigError, InvalidRequest, NotFound, StorageFailed
from cllm.workers.executor import settle

log = logging.getLogger(__name__)
Kind = Literal["file", "batch", "response", "conversation"]
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
RESERVED_DISK = 64 << 20  # bytes that new jobs leave free, so that accepted ones can end
PURGE_S = 60.0  # between two looks at what has expired
PENDING, DONE, FAILED = range(3)  # states of a line
NOT_STORED = (
    "this response is not stored here: it was made with store false, or deleted, or has expired "
    "(--response-ttl, --job-store-mb); send the whole conversation as input items"
)
STORES_NOTHING = (
    "this server stores no files, batches or responses (--job-store-mb 0); send the whole conversation as "
    "input items, and requests one by one"
)
_SCHEMA = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")
_COLUMNS = "id, tenant, created, expires, active, record, more, previous"


class StoredObject(msgspec.Struct, frozen=True):
    """A row: `record` is the object as clients see it, in JSON; `more` is what they do not see."""

    id: str
    tenant: str
    created: float
    expires: float | None = None  # None keeps it until it is deleted
    active: int = 0  # attempts at work that is left; while there is some, it neither expires nor is dropped
    record: bytes = b"{}"
    more: bytes = b""
    previous: str | None = None  # the response that this one continues


class BatchLine(msgspec.Struct, frozen=True):
    """A line of a batch: where it is in the input file, and the text by which lines are ordered."""

    number: int
    begin: int
    size: int
    opening: bytes = b""


class LineCounts(msgspec.Struct, frozen=True):
    total: int
    completed: int
    failed: int


class LineTokens(msgspec.Struct, frozen=True):
    """Tokens of a batch, of prompts and answers."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0


def find_folder(config: ServerConfig) -> Path | None:
    """The folder of a server's jobs, one for each port.

    None for any free port, where nothing is stored, and where the home cannot be written to, as in many
    containers: such a server keeps its jobs until it ends.
    """
    if config.state_dir:
        return Path(config.state_dir).expanduser()
    if not config.port or not config.job_store_mb:
        return None
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    folder = Path(state, "cllm", f"jobs-{config.port}").expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        lost = "files, batches and responses are kept until the server ends"
        log.warning("%s: %s cannot be made (%s); --state-dir names another", lost, folder, error.strerror)
        return None
    return folder


class JobDatabase:
    """The tables and files. Its methods run on the store's thread: `await store.run(JobDatabase.get, …)`.

    Every read names its tenant; what is another's is not found. A tenant holds at most its part of
    `max_bytes`. For what is new, responses of its tenant that were not used for longest make room, and it is
    refused where that does not suffice. Answers of accepted batches are always taken.
    """

    def __init__(self, folder: Path, max_bytes: int, shares: Callable[[], int]) -> None:
        """Raises OSError, sqlite3.Error; both if another server uses the folder."""
        self.files = folder / "files"
        self._max_bytes = max_bytes
        self._shares = shares
        self.sizes: Counter[str] = Counter()  # bytes of each tenant
        self._removed: list[Path] = []  # files whose rows are gone when the transaction is committed
        self._purge_at = 0.0
        self.files.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        path = folder / "jobs.sqlite"
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        self.sql = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
        try:
            # One server owns the folder: two would answer the same lines.
            for setting in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
                self.sql.execute(f"PRAGMA {setting}")
            self.sql.executescript(_SCHEMA)
            with contextlib.suppress(sqlite3.OperationalError):  # a folder of an earlier version
                self.sql.execute("ALTER TABLE lines ADD COLUMN input INTEGER NOT NULL DEFAULT 0")
            self._read_sizes()
        except BaseException:
            self.sql.close()
            raise
        known = {row[0] for row in self.sql.execute("SELECT id FROM objects WHERE kind = 'file'")}
        for file in self.files.iterdir():
            if file.name not in known:  # left by a server that was killed
                file.unlink(missing_ok=True)

    def run_all(self, calls: Iterable[Callable[[], Any]]) -> list[Any]:
        """The result or the error of each call, in one transaction. Raises what makes all of them fail."""
        try:
            self.sql.execute("BEGIN IMMEDIATE")
            self._purge(time.time())
            results = [self._run(call) for call in calls]
            self.sql.execute("COMMIT")
            for path in self._removed:
                path.unlink(missing_ok=True)
            return results
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                if self.sql.in_transaction:
                    self.sql.execute("ROLLBACK")
                self._read_sizes()
            raise
        finally:
            self._removed.clear()

    def _run(self, call: Callable[[], Any]) -> Any:
        """The result of a call, or its error; a call that fails changes nothing."""
        sizes = self.sizes.copy()
        self.sql.execute("SAVEPOINT one")
        try:
            result = call()
        except CllmError as error:
            self.sql.execute("ROLLBACK TO one")
            self.sizes, result = sizes, error
        self.sql.execute("RELEASE one")
        return result

    def _read_sizes(self) -> None:
        rows = self.sql.execute("SELECT tenant, sum(size) FROM objects GROUP BY tenant")
        self.sizes = Counter(dict(rows.fetchall()))

    # Objects -----------------------------------------------------------------------------------------

    @property
    def _limit(self) -> int:
        """Bytes that one tenant may hold."""
        return self._max_bytes // max(1, self._shares())

    def check(self, size: int, tenant: str) -> None:
        """Make room for a new job of `size` bytes. Raises StorageFailed if there is none."""
        if not self._make_room(size, tenant):
            used = f"{self.sizes[tenant]} of {self._limit} bytes are in use (--job-store-mb)"
            raise StorageFailed(f"{size} bytes do not fit: {used}; delete files or batches")
        if size > shutil.disk_usage(self.files).free - RESERVED_DISK:
            raise StorageFailed(f"{size} bytes do not fit on the disk: free some, then try again")

    def add(self, kind: Kind, new: StoredObject, content: int = 0, lines: Iterable[BatchLine] = ()) -> None:
        """Accept a job: a file with `content` bytes, a batch with its lines, or another. StorageFailed."""
        rows = [(new.id, line.number, line.opening, line.begin, line.size) for line in lines]
        size = content + len(new.record) + len(new.more) + sum(len(row[2]) + 64 for row in rows)
        self.check(size, new.tenant)
        self._insert(kind, new, size)
        query = "INSERT INTO lines(batch, number, opening, begin, size) VALUES (?, ?, ?, ?, ?)"
        self.sql.executemany(query, rows)

    def _insert(self, kind: Kind, new: StoredObject, size: int) -> None:
        old = self.sql.execute("SELECT size FROM objects WHERE id = ?", (new.id,)).fetchone()
        self.sizes[new.tenant] += size - (old[0] if old else 0)
        row = (new.id, new.tenant, kind, new.created, time.time(), new.expires, new.active, size)
        query = "INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        self.sql.execute(query, (*row, new.record, new.more, new.previous))

    def get(self, kind: Kind, tenant: str, object_id: str) -> StoredObject:
        """Raises NotFound."""
        query = f"SELECT {_COLUMNS} FROM objects WHERE id = ? AND kind = ? AND tenant = ?"
        if (row := self.sql.execute(query, (object_id, kind, tenant)).fetchone()) is None:
            raise NotFound(NOT_STORED if kind == "response" else f"there is no {kind} with this id")
        return StoredObject(*row)

    def list_objects(
        self,
        kind: Kind,
        tenant: str,
        limit: int,
        after: str | None = None,
        *,
        oldest: bool = False,
        purpose: str | None = None,
    ) -> list[StoredObject]:
        """Objects of a tenant, the newest first or the `oldest`, from the one `after` an id. NotFound.

        Of files, those of a `purpose`.
        """
        sign, order = (">", "ASC") if oldest else ("<", "DESC")
        query, values = f"SELECT {_COLUMNS} FROM objects WHERE kind = ? AND tenant = ?", [kind, tenant]
        if after is not None:
            values.append(self.get(kind, tenant, after).id)
            query += f" AND (created, id) {sign} (SELECT created, id FROM objects WHERE id = ?)"
        if purpose is not None:
            values.append(purpose)
            query += " AND json_extract(CAST(record AS TEXT), '$.purpose') = ?"
        query += f" ORDER BY created {order}, id {order} LIMIT ?"
        return [StoredObject(*row) for row in self.sql.execute(query, (*values, limit))]

    def list_active(self, kind: Kind) -> list[StoredObject]:
        """Objects of all tenants with work left, the oldest first."""
        query = f"SELECT {_COLUMNS} FROM objects WHERE kind = ? AND active ORDER BY created, id"
        return [StoredObject(*row) for row in self.sql.execute(query, (kind,))]

    def change(
        self, kind: Kind, tenant: str, object_id: str, change: Callable[[StoredObject], StoredObject]
    ) -> StoredObject:
        """Replace an object by what `change` makes of it. Raises NotFound."""
        new = change(old := self.get(kind, tenant, object_id))
        grown = len(new.record) + len(new.more) - len(old.record) - len(old.more)
        self.sizes[tenant] += grown
        query = "UPDATE objects SET expires = ?, active = ?, size = size + ?, record = ?, more = ?"
        values = (new.expires, new.active, grown, new.record, new.more, object_id)
        self.sql.execute(f"{query} WHERE id = ?", values)
        return new

    def delete(self, kind: Kind, tenant: str, object_id: str) -> None:
        """Raises NotFound."""
        self._remove([self.get(kind, tenant, object_id).id])

    def _remove(self, ids: Iterable[str]) -> None:
        for object_id in ids:
            query = "DELETE FROM objects WHERE id = ? RETURNING tenant, kind, size"
            for tenant, kind, size in self.sql.execute(query, (object_id,)).fetchall():
                self.sizes[tenant] -= size
                if kind == "file":
                    self._removed.append(self.files / object_id)
            for table in ("lines", "answers"):
                self.sql.execute(f"DELETE FROM {table} WHERE batch = ?", (object_id,))

    def _purge(self, now: float) -> None:
        """Remove what has expired. What is active stays until its work has ended."""
        if now >= self._purge_at:
            self._purge_at = now + PURGE_S
            query = "SELECT id FROM objects WHERE expires <= ? AND NOT active"
            self._remove([row[0] for row in self.sql.execute(query, (now,)).fetchall()])

    # Responses ---------------------------------------------------------------------------------------

    def put_response(self, new: StoredObject) -> None:
        """Keep a response; older ones of its tenant make room. Raises StorageFailed if there is none."""
        size = len(new.record) + len(new.more)
        if not self._make_room(size, new.tenant, new.id):
            log.warning("a response was not stored: there is no room for it (--job-store-mb)")
            raise StorageFailed("the response does not fit (--job-store-mb); delete files or batches")
        self._insert("response", new, size)

    def _make_room(self, size: int, tenant: str, kept: str = "") -> bool:
        """Remove responses of a tenant, those not used for longest first; False if `size` does not fit."""
        query = (
            "SELECT id FROM objects WHERE tenant = ? AND kind = 'response' AND NOT active AND id != ? "
            "ORDER BY used, created LIMIT 1"
        )
        while self.sizes[tenant] + size > self._limit:
            if (oldest := self.sql.execute(query, (tenant, kept)).fetchone()) is None:
                return False
            self._remove(oldest)
        return True

    def get_chain(self, tenant: str, response_id: str) -> list[StoredObject]:
        """A response and all it continues, the oldest first. Using it counts for all of them. NotFound.

        Raises InvalidRequest if it is a background answer that has not ended.
        """
        chain: list[StoredObject] = []
        following: str | None = response_id
        while following is not None:
            chain.append(self.get("response", tenant, following))
            if chain[-1].active:
                message = "this response has not ended: continue it later, or cancel it"
                raise InvalidRequest(f"previous_response_id: {message}", "previous_response_id")
            following = chain[-1].previous
        rows = [(time.time(), each.id) for each in chain]
        self.sql.executemany("UPDATE objects SET used = ? WHERE id = ?", rows)
        return chain[::-1]

    def clear_responses(self) -> int:
        """Forget the responses of all tenants that are not being made; returns their number."""
        rows = self.sql.execute("SELECT id FROM objects WHERE kind = 'response' AND NOT active").fetchall()
        self._remove([row[0] for row in rows])
        return len(rows)

    # Lines of batches --------------------------------------------------------------------------------

    def count_lines(self, batch: str) -> tuple[LineCounts, LineTokens]:
        query = "SELECT state, count(*), sum(input), sum(tokens) FROM lines WHERE batch = ? GROUP BY state"
        counts: Counter[int] = Counter()
        prompts = total = 0
        for state, count, read, used in self.sql.execute(query, (batch,)):
            counts[state], prompts, total = count, prompts + read, total + used
        tokens = LineTokens(prompts, total - prompts, total)
        return LineCounts(counts.total(), counts[DONE], counts[FAILED]), tokens

    def next_lines(self, batch: str, last: BatchLine | None, count: int) -> list[BatchLine]:
        """Lines without an answer that follow `last`, in the order of their openings."""
        query = (
            "SELECT number, begin, size, opening FROM lines WHERE batch = ? AND state = ? "
            "AND (opening, number) > (?, ?) ORDER BY opening, number LIMIT ?"
        )
        after = (last.opening, last.number) if last is not None else (b"", -1)
        return [BatchLine(*row) for row in self.sql.execute(query, (batch, PENDING, *after, count))]

    def add_answer(
        self, batch: str, number: int, answer: bytes, state: int = DONE, prompt: int = 0, tokens: int = 0
    ) -> None:
        """Keep the answer to a line, its state and its tokens, in all and of the prompt. Once a line."""
        query = (
            "UPDATE lines SET state = ?, input = ?, tokens = ? WHERE batch = ? AND number = ? AND state = ?"
        )
        if self.sql.execute(query, (state, prompt, tokens, batch, number, PENDING)).rowcount:
            self.sql.execute("INSERT INTO answers VALUES (?, ?, ?)", (batch, number, answer))
            query = "UPDATE objects SET size = size + ? WHERE id = ? RETURNING tenant"
            for (tenant,) in self.sql.execute(query, (len(answer), batch)).fetchall():
                self.sizes[tenant] += len(answer)

    def finish_batch(
        self,
        batch: StoredObject,
        make_file: Callable[[str, int], StoredObject],
        change: Callable[[StoredObject, dict[int, str], LineCounts, LineTokens], StoredObject],
        describe: Callable[[BatchLine], bytes],
    ) -> None:
        """Write the output and error files from the answers, and end a batch: all of it, or nothing.

        `make_file` describes a file by its id and bytes; one without lines is not made. `change` gets the ids
        by the state of their lines. `describe` makes the answer of a line that has none.
        """
        while left := self.next_lines(batch.id, None, 1000):
            for line in left:
                self.add_answer(batch.id, line.number, describe(line), FAILED)
        counts, tokens = self.count_lines(batch.id)
        query = (
            "SELECT answer FROM answers JOIN lines USING (batch, number) "
            "WHERE batch = ? AND state = ? ORDER BY number"
        )
        files: dict[int, str] = {}
        for state, name, count in ((DONE, "output", counts.completed), (FAILED, "error", counts.failed)):
            if count:
                rows = self.sql.execute(query, (batch.id, state))
                file_id = files[state] = f"file-{batch.id.removeprefix('batch_')}-{name}"
                size = write_file(self.files / file_id, (row[0] + b"\n" for row in rows))
                file = make_file(file_id, size)
                self._insert("file", file, size + len(file.record))
        new = change(self.get("batch", batch.tenant, batch.id), files, counts, tokens)
        self._remove([batch.id])
        self._insert("batch", new, len(new.record) + len(new.more))


class JobStore:
    """The thread of the database. It is opened by its first call, without a folder in a temporary one."""

    def __init__(self, folder: Path | None, max_bytes: int, shares: Callable[[], int] = lambda: 1) -> None:
        """`shares` is the number of tenants. 0 bytes store nothing: then nothing is found."""
        self._folder = folder
        self._clean_up: Callable[[], object] = lambda: None
        self._make = partial(JobDatabase, max_bytes=max_bytes, shares=shares)
        self.enabled = max_bytes > 0
        self._thread = ThreadPoolExecutor(1, "cllm-jobs")
        self._lock = threading.Lock()
        self._calls: list[tuple[Callable[[JobDatabase], Any], Future[Any]]] = []
        self._database: JobDatabase | None = None

    async def run(
        self,
        call: Callable[Concatenate[JobDatabase, Parameters], Result],
        *arguments: Parameters.args,
        **more: Parameters.kwargs,
    ) -> Result:
        """Run a method of the database. Raises what it raises, StorageFailed; NotFound if not `enabled`."""
        return await asyncio.wrap_future(self.submit(call, *arguments, **more))

    def submit(
        self,
        call: Callable[Concatenate[JobDatabase, Parameters], Result],
        *arguments: Parameters.args,
        **more: Parameters.kwargs,
    ) -> Future[Result]:
        """The same without waiting, from any thread. Calls run in their order."""
        future: Future[Result] = Future()
        if not self.enabled:
            future.set_exception(NotFound(STORES_NOTHING))
            return future
        with self._lock:
            self._calls.append((lambda database: call(database, *arguments, **more), future))
            first = len(self._calls) == 1
        if first:
            self._thread.submit(self._run_calls)
        return future

    def _run_calls(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        begun = [(call, future) for call, future in calls if future.set_running_or_notify_cancel()]
        try:
            database = self._open()
            results = database.run_all([partial(call, database) for call, _ in begun])
        except BaseException as error:
            results = [_make_failure(error)] * len(begun)
        for (_, future), result in zip(begun, results, strict=True):
            settle(future, result)

    def _open(self) -> JobDatabase:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="cllm-jobs-"))
            self._clean_up = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._database = self._database or self._make(self._folder)
        return self._database

    def open(self) -> None:
        """Open the database now. Raises ConfigError if it cannot be used, or another server uses it."""
        try:
            if self.enabled:
                self.submit(JobDatabase.list_active, "batch").result()
        except StorageFailed as error:
            raise ConfigError(f"{self._folder}: {error.message} (--state-dir)") from None

    def close(self) -> None:
        """Run what waits, then close the database. Idempotent."""
        self._thread.shutdown()
        if self._database is not None:
            self._database.sql.close()
            self._database = None
        self._clean_up()

    async def add_file(self, new: StoredObject, content: BinaryIO, size: int) -> None:
        """Store a file. Raises StorageFailed, and keeps no part of it then."""
        await self.run(JobDatabase.check, size, new.tenant)
        path, pieces = self.get_path(new.id), iter(lambda: content.read(1 << 20), b"")
        try:
            await asyncio.to_thread(write_file, path, pieces)
            await self.run(JobDatabase.add, "file", new, size)
        except BaseException as error:
            path.unlink(missing_ok=True)
            raise (_make_failure(error) if isinstance(error, OSError) else error) from None

    def get_path(self, file_id: str) -> Path:
        """Where the content of a file lies that `get` has found."""
        assert self._database is not None
        return self._database.files / file_id


def write_file(path: Path, pieces: Iterator[bytes]) -> int:
    """Write a file to the disk, for its owner alone; returns its bytes. Raises OSError."""
    with open(path, "wb", opener=partial(os.open, mode=0o600)) as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _make_failure(error: BaseException) -> CllmError:
    if not isinstance(error, OSError | sqlite3.Error):
        log.error("the job store failed", exc_info=error)
    busy = isinstance(error, sqlite3.Error) and "locked" in str(error)
    reason = "another server uses it" if busy else getattr(error, "strerror", None) or str(error)
    return StorageFailed(f"the job store failed: {reason}")
