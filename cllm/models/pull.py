"""Pull: from a reference to a hub to verified files on this machine; checked before the first byte."""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from cllm.build.toolchain import locked
from cllm.errors import HubError, ModelFileError, SetupError
from cllm.models.download import Download, RateLimit, describe_disk, has_hash
from cllm.models.files import (
    HubFile,
    HubReference,
    ModelFiles,
    choose_files,
    choose_mmproj,
    format_size,
    group_files,
)
from cllm.models.hub import Hub, make_hub
from cllm.models.store import PART, DownloadPaths, find_stored, is_switched_on, make_destination
from cllm.names import path_below

log = logging.getLogger(__name__)
FIRST_HEAD = 1 << 20  # bytes of a file that are read for its header, four times as many each next time
MAX_HEAD = 256 << 20
DISK_RESERVE = 64 << 20  # bytes that a download leaves free
LINE_S = 15.0  # between lines of progress where there is no terminal
Check = Callable[[Path], object]


class PullOptions(NamedTuple):
    """Options of a pull."""

    folder: Path | None = None  # instead of the hub's cache
    limit: float = 0.0  # bytes a second; 0: none
    connections: int = 4


class HubModel(NamedTuple):
    """A model as a hub lists it, and the others beside it."""

    commit: str
    files: tuple[HubFile, ...]  # its parts, and the mmproj beside them
    chosen: ModelFiles
    models: tuple[ModelFiles, ...]

    @property
    def parts(self) -> tuple[HubFile, ...]:
        return self.files[: len(self.chosen.names)]


def find_model(hub: Hub, reference: HubReference, *, mmproj: bool = True) -> HubModel:
    """List a repository and choose the model that a reference means. Raises HubError or ModelFileError.

    A model's draft goes without `mmproj`: it would wait for that of the model, whose pull has it checked.
    """
    listing = hub.list_files(reference.revision)
    files = {file.path: file for file in listing.files}
    models = group_files({path: file.size for path, file in files.items()}, reference.quant)
    chosen = choose_files(models, reference.quant, str(reference._replace(quant="")))
    if not chosen.whole:
        here = f"{len(chosen.names)} of {chosen.parts} parts"
        raise ModelFileError(f"{reference} has {here} of {chosen.stem}: it is incomplete")
    beside = choose_mmproj(files, chosen.names[0]) if mmproj else []
    parts = tuple(files[name] for name in (*chosen.names, *beside))
    for file in parts:
        if not file.etag:
            raise HubError(f"{file.path} has no hash in the listing of {hub.endpoint}: it cannot be verified")
    return HubModel(listing.commit, parts, chosen, tuple(models))


def is_offline(asked: bool) -> bool:
    return asked or is_switched_on("HF_HUB_OFFLINE")


def ensure(
    reference: HubReference, *, offline: bool = False, check: Check | None = None, mmproj: bool = True
) -> Path:
    """Find the model file of a hub reference, and pull it if it is not here. Raises SetupError."""
    if stored := find_stored(reference):
        return stored.path
    if is_offline(offline):
        raise ModelFileError(f"{reference} is not on this machine, and --offline pulls nothing")
    with make_hub(reference) as hub:
        model = find_model(hub, reference, mmproj=mmproj)
        log.info("pulling %s, %s, from %s", model.chosen.stem, format_size(model.chosen.size), hub.endpoint)
        return Pull(hub, reference, model, PullOptions()).run(check)


class PullProgress(Progress):
    """Progress of a pull: a bar with speed and time left on a terminal, else a line now and then."""

    def __init__(self, name: str, total: int) -> None:
        super().__init__(
            *("{task.description}", BarColumn(bar_width=None), DownloadColumn()),
            *(TransferSpeedColumn(), TimeRemainingColumn()),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self.add_task(name, total=total)
        self._shown = time.monotonic()

    def show(self, before: int, here: int) -> None:
        """Show the bytes that are here, of the files before and of the present one."""
        (task,), now = self.tasks, time.monotonic()
        if not task.completed:  # what was here before does not count as speed
            self.reset(task.id, completed=before + here)
        self.update(task.id, completed=before + here)
        if self.disable and now - self._shown > LINE_S:
            self._shown = now
            done, total, speed = map(format_size, (task.completed, task.total or 0, task.speed or 0))
            left = task.time_remaining or 0.0
            log.warning("%s: %s of %s, %s/s, %.0f s left", task.description, done, total, speed, left)


class Pull:
    """One model of a hub on its way to this machine."""

    def __init__(self, hub: Hub, reference: HubReference, model: HubModel, options: PullOptions) -> None:
        self._hub, self._model, self._options = hub, model, options
        self._destination = make_destination(reference, model.commit, options.folder)
        self.folder = self._destination.folder
        self._limit = RateLimit(options.limit)

    def run(self, check: Check | None = None) -> Path:
        """Pull what is missing; returns the first file. `check` may refuse the model by its header."""
        targets = map(self._destination.paths, self._model.files)
        waiting = partial(log.warning, "another process pulls the same file: waiting for it")
        try:
            with ExitStack() as stack:
                for paths in sorted(targets, key=lambda paths: paths.lock):
                    paths.final.parent.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(locked(paths.lock, waiting))  # as huggingface_hub does
                return self._run(stack, check)
        except OSError as error:
            raise HubError(describe_disk(error, self.folder, self.missing_bytes())) from None

    def _run(self, stack: ExitStack, check: Check | None) -> Path:
        downloads = {}
        for file in self._model.files:
            if not self._is_here(file):
                self._check_disk()
                downloads[file] = stack.enter_context(self._download(file, self._destination.paths(file)))
        if downloads and check is not None:
            self._check(downloads, check)
        with PullProgress(self._model.chosen.stem, sum(file.size for file in self._model.files)) as progress:
            done = sum(file.size for file in self._model.files if file not in downloads)
            for file, download in downloads.items():
                download.fetch(report=partial(progress.show, done))
                download.finish()
                done += file.size
        paths = [self._destination.publish(file) for file in self._model.files]
        self._destination.finish()
        return paths[0]

    def _check(self, downloads: dict[HubFile, Download], check: Check) -> None:
        """Have the model checked by its header. A download that was not begun before leaves nothing then."""
        begun = {file for file, download in downloads.items() if download.done}
        with tempfile.TemporaryDirectory(prefix="cllm-") as folder:
            try:
                if found := self._read_heads(downloads, Path(folder)):
                    check(found)
            except HubError:
                raise
            except SetupError:  # it is no model, or one that is refused
                for file, download in downloads.items():
                    if file not in begun:
                        download.journal.remove()
                raise

    def _download(self, file: HubFile, paths: DownloadPaths) -> Download:
        url, connections = self._hub.file_url(self._model.commit, file.path), self._options.connections
        return Download(self._hub, url, file, paths, connections=connections, limit=self._limit)

    def _is_here(self, file: HubFile) -> bool:
        """Check that a file is complete; one in a plain folder, where names say nothing, is verified."""
        path, paths = self._destination.find(file), self._destination.paths(file)
        if path is None or not (file.etag in (path.name, path.resolve().name) or has_hash(path, file)):
            return False
        paths.journal.unlink(missing_ok=True)
        paths.part.unlink(missing_ok=True)
        return True

    def missing_bytes(self) -> int:
        """Count the bytes that are still to be fetched, by what is on disk."""
        missing = 0
        for file in self._model.files:
            if self._destination.find(file) is None:
                part = self._destination.paths(file).part
                taken = part.stat().st_blocks * 512 if part.is_file() else 0
                missing += max(0, file.size - taken)
        return missing

    def _check_disk(self) -> None:
        missing, free = self.missing_bytes(), free_bytes(self.folder)
        if missing + DISK_RESERVE > free:
            raise HubError(
                f"the disk of {self.folder} is too full: {format_size(missing)} are to be fetched, "
                f"{format_size(free)} are free; --to DIR stores it elsewhere"
            )

    def read_heads(self, folder: Path) -> Path | None:
        """Write files with the headers of the model, read by ranges, into `folder`; returns the first.

        They have the sizes of the model's, so memory can be predicted from them. None if the server knows no
        ranges.
        """
        with ExitStack() as stack:
            downloads = {}
            for number, file in enumerate(self._model.parts):
                name = folder / f"part{number}"
                paths = DownloadPaths(name.with_suffix(PART), name, name)
                downloads[file] = stack.enter_context(self._download(file, paths))
            return self._read_heads(downloads, folder)

    def _read_heads(self, downloads: dict[HubFile, Download], folder: Path) -> Path | None:
        for file in self._model.parts:
            head = path_below(folder, Path(file.path).name)
            here = self._destination.find(file)
            if file not in downloads and here is not None:
                head.symlink_to(here.resolve())
            elif not _fetch_head(downloads[file], file, head):
                return None
        return path_below(folder, Path(self._model.files[0].path).name)


def _fetch_head(download: Download, file: HubFile, head: Path) -> bool:
    """Fetch the beginning of a file until its header is whole, and write that to `head`."""
    from cllm.backend.llama.gguf import GgufFile

    size = FIRST_HEAD
    while True:
        size = min(size, file.size)
        download.fetch(size)
        if (data := download.read(size)) is None:
            return False
        with head.open("wb") as opened:
            opened.write(data)
            opened.truncate(file.size)
        try:
            if GgufFile(head).header_bytes <= size:
                return True
        except ModelFileError:
            if size >= min(file.size, MAX_HEAD):
                raise
        size *= 4


def free_bytes(folder: Path) -> int:
    """Measure the free space of the disk that a folder is on, or would be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
