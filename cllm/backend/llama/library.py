"""Native library: its declarations, how it is found and loaded, and who owns its pointers.

scripts/declarations.py writes the declarations of llama.h, mtmd.h and ggml's headers to `declarations.json`,
each type after those that it is made of. A type is named as ctypes has it (`int32` is `c_int32`); a star
precedes what is pointed to, `[N]` follows an array.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from cllm.build.build import KERNELS_NAME, MEMBERS_NAME, find_built
from cllm.build.gpus import BACKENDS, ask_drivers
from cllm.build.module import Module, choose_module, find_media, find_modules
from cllm.build.toolchain import BINDINGS_VERSION
from cllm.errors import LibraryError

log = logging.getLogger("llama.cpp")
NO_MEDIA = (
    "pictures and sound need libmtmd, which is not built for this library: run `cllm build --media` (about a "
    "minute, once)"
)

PACKAGE = "cllm_native"
LIBRARY_SUFFIX = "dylib" if sys.platform == "darwin" else "so"
_GPU_LIBRARIES = tuple(f"libggml-{name}*" for name in ("cuda", "hip", "metal", "musa", "sycl", "vulkan"))
_LEVELS = {3: logging.WARNING, 4: logging.ERROR}  # of ggml_log_level; its others are for debugging
# A step ended by our abort switch: status 1 (GGML_STATUS_ABORTED), code 2 of llama_decode. Other failures
# have other numbers, and their errors stay.
_ABORTED = re.compile(
    r"graph_compute_async failed with error 1$|compute status: 1$|failed to decode, ret = 2$"
    r"|removing memory module entries for seq_id"
)
_FOLDERS = re.compile(r"(?<![\w.])/(?:[^/\s]+/)+")  # no paths of this machine in the log
_MANGLED = re.compile(r"_Z(\d+)(\w+)")
Functions = dict[str, tuple[Any, ...]]  # result and parameters of each
_loading = threading.Lock()
_loaded: Library | None = None


class Declarations:
    """Structures, callbacks and functions, by their C names."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.types: dict[str, Any] = {}
        for name, declared in document["types"].items():
            if isinstance(declared, list):  # result and parameters of a callback
                self.types[name] = ctypes.CFUNCTYPE(*map(self._find, declared))
            else:
                fields = [(field, self._find(kind)) for field, kind in declared.items()]
                self.types[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
        self.functions = self._read(document["functions"])
        self.cpu = self._read(document["cpu"])  # of the CPU's backend, which hands them out by their names
        self.media = self._read(document["media"])  # of libmtmd, loaded for models that take media

    def _read(self, table: Mapping[str, list[str]]) -> Functions:
        return {name: tuple(map(self._find, signature)) for name, signature in table.items()}

    def _find(self, text: str) -> Any:
        """The type that a text names; None for `void`."""
        if text.startswith("*"):
            return ctypes.POINTER(self._find(text[1:]))
        if text.endswith("]"):
            name, _, size = text[:-1].partition("[")
            return self._find(name) * int(size)
        return None if text == "void" else self.types.get(text) or getattr(ctypes, f"c_{text}")


DECLARED = Declarations(json.loads(Path(__file__).with_name("declarations.json").read_text(encoding="utf-8")))


class Api(SimpleNamespace):
    """Functions of the library, and the structures and callbacks they take, by their C names."""

    def __init__(self, directory: Path) -> None:
        """Load the library of a folder. Raises LibraryError if that fails or a function is missing."""
        super().__init__(**DECLARED.types)
        if "llama_cpp" in sys.modules:  # libraries of the same name are taken for the same: the two would mix
            raise LibraryError("llama_cpp is imported in this process; use cllm in one without it")
        try:
            # What it depends on lies beside it, and is searched for functions, too.
            self.declare(directory / f"libllama.{LIBRARY_SUFFIX}", DECLARED.functions)
        except (OSError, AttributeError) as error:
            raise LibraryError(
                f"the native library in {directory} cannot be loaded ({error}); "
                "rebuild it with `cllm build --force`"
            ) from error

    def declare(self, path: Path, functions: Functions) -> None:
        """Load a library and add its functions. Raises OSError or AttributeError."""
        library = ctypes.CDLL(str(path))
        for name, (result, *parameters) in functions.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, parameters
            if mangled := _MANGLED.match(name):  # what is exported under its C++ name
                name = mangled[2][: int(mangled[1])]
            setattr(self, name, function)

    def load_cpu(self, directory: Path) -> None:
        """Load the backend for this CPU, unless it is a part of the library. Raises LibraryError."""
        if not self.ggml_backend_reg_by_name(b"CPU"):
            self.ggml_backend_load_all_from_path(str(directory).encode())
        if not (registry := self.ggml_backend_reg_by_name(b"CPU")):
            raise LibraryError(f"the native library in {directory} has none for this CPU: use `cllm build`")
        for name, signature in DECLARED.cpu.items():
            address = self.ggml_backend_reg_get_proc_address(registry, name.encode())
            assert address, name
            setattr(self, name, ctypes.CFUNCTYPE(*signature)(address))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Library:
    """The loaded library of a folder."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.api = api = Api(directory)
        self._module_looked_for = False
        # llama.cpp keeps the pointer for the life of the process, and so does this object.
        self._log_callback = api.ggml_log_callback(_log_line)
        api.llama_log_set(self._log_callback, None)
        api.load_cpu(directory)
        self.use_kernels()
        api.llama_backend_init()

    def use_kernels(self, wanted: bool = True) -> bool:
        """Compute by cllm's own kernels on the CPU, where they are, or by ggml's. Is attention among them?"""
        try:
            return bool(ctypes.CDLL(str(self.directory / KERNELS_NAME)).cllm_use_kernels(wanted))
        except (OSError, AttributeError):  # not compiled, or an older one
            return False

    def load_module(self) -> None:
        """Load the GPU module that suits, once. Raises LibraryError if it is of no use here."""
        if self._module_looked_for:
            return
        if (module := find_module(self.directory)) is not None:
            registry = self.api.ggml_backend_load(str(module).encode())
            if not registry or not self.api.ggml_backend_reg_dev_count(registry):
                raise LibraryError(
                    f"the GPU module {module.parent.name} cannot be loaded or finds no GPU; build it again "
                    "with `cllm build --gpu auto --force`, or serve without the GPU (--gpu-layers 0)"
                )
        self._module_looked_for = True

    def load_media(self) -> None:
        """Load libmtmd, once. Raises LibraryError if it is not built or of no use here."""
        if hasattr(self.api, "mtmd_init_from_file"):
            return
        if (path := find_media(self.directory)) is None:
            raise LibraryError(NO_MEDIA)
        try:
            self.api.declare(path, DECLARED.media)
        except (OSError, AttributeError) as error:
            raise LibraryError(
                f"libmtmd in {path.parent} cannot be loaded ({error}); rebuild it with `cllm build --media "
                "--force`"
            ) from error
        self.api.mtmd_helper_log_set(self._log_callback, None)


def find() -> Path:
    """The library's folder: `CLLM_LIBRARY`, else the build of `cllm build`, else the package cllm-native.

    Raises LibraryError if there is none, or the package is of another version.
    """
    if named := os.environ.get("CLLM_LIBRARY"):
        return Path(named)
    if (built := find_built()) is not None:
        return built
    if (spec := importlib.util.find_spec(PACKAGE)) is None or not spec.submodule_search_locations:
        raise LibraryError(
            "no native library for this machine: run `cllm build` (three to four minutes, once), or install "
            "the wheel cllm_native that `make wheel` builds in a clone"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    if (version := read_build_info(folder).get("version")) != BINDINGS_VERSION:
        raise LibraryError(
            f"cllm-native {version} is installed, and this cllm needs {BINDINGS_VERSION}: "
            f"install the wheel cllm_native-{BINDINGS_VERSION} that `make wheel` builds, or run `cllm build`"
        )
    return folder


def read_build_info(folder: Path) -> dict[str, Any]:
    """Read a library's `build.json`; empty for one that `cllm build` has not made."""
    try:
        info: dict[str, Any] = json.loads((folder / "build.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return info


def may_use_gpu() -> bool:
    """True if a GPU module was built for this library, or it has a GPU backend. Asks no driver."""
    folder = find()
    return any(any(folder.glob(pattern)) for pattern in _GPU_LIBRARIES) or bool(modules_for(folder))


def load_members() -> Any:
    """Functions of members.cpp, where `cllm build` has compiled it, else None."""
    try:
        members = ctypes.CDLL(str(find() / MEMBERS_NAME))
    except OSError:
        return None
    members.cllm_plan_due.restype, members.cllm_plan_due.argtypes = ctypes.c_bool, (ctypes.c_void_p,)
    members.cllm_keep_plan.restype, members.cllm_keep_plan.argtypes = None, (ctypes.c_void_p, ctypes.c_size_t)
    members.cllm_swap_graphs.restype, members.cllm_swap_graphs.argtypes = (
        ctypes.c_void_p,
        (ctypes.c_void_p,) * 2,
    )
    members.cllm_free_graphs.restype, members.cllm_free_graphs.argtypes = None, (ctypes.c_void_p,)
    members.cllm_token_table.restype = ctypes.c_void_p
    members.cllm_token_table.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return members


def find_module(directory: Path) -> Path | None:
    """The module to load beside a library: for the GPUs that are here. Asks their drivers in this process.

    Raises LibraryError if a driver that a module was built for does not work.
    """
    modules = modules_for(directory)
    problems: tuple[str, ...] = ()
    for backend in BACKENDS:
        if candidates := [module for module in modules if module.backend == backend]:
            drivers = ask_drivers(backend)
            problems += drivers.problems
            if (chosen := choose_module(candidates, drivers)) is not None:
                return chosen.path
    if problems:
        raise LibraryError("; ".join(problems))
    return None


def modules_for(directory: Path) -> list[Module]:
    """The modules that were built for a library, one of `cllm build`. Asks no driver."""
    return find_modules() if (directory / "build.json").exists() else []


def load(directory: Path | None = None, *, gpu: bool = False) -> Library:
    """Load the library of `directory` (default: `find()`), once: a process has one, and keeps it.

    With `gpu` also the module for the GPUs that are here, if one was built. Without it no driver is touched.
    """
    global _loaded
    directory = directory or find()
    with _loading:
        if _loaded is None:
            _loaded = Library(directory)
        elif _loaded.directory != directory:
            log.warning("another library was loaded before; using that in %s", _loaded.directory)
        if gpu:
            _loaded.load_module()
        return _loaded


def run_apart(module: str, data: bytes, limit_s: float) -> bytes:
    """Run a module in a process that may die of it, and return its output. Raises LibraryError."""
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}  # or an abort would start a debugger first
    command = [sys.executable, "-m", module]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=limit_s, env=environment)
    except subprocess.TimeoutExpired:
        raise LibraryError(f"it did not finish within {limit_s:.0f} s") from None
    if done.returncode != 0:
        raise LibraryError(exit_reason(done.returncode, done.stderr))
    return done.stdout


def exit_reason(code: int, stderr: bytes) -> str:
    """The last line that a process with native code wrote, or the signal or code it ended with."""
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    return stderr.decode("utf-8", "replace").strip().rpartition("\n")[2] or f"it exited with code {code}"


def _log_line(level: int, text: bytes, _: Any) -> None:
    if not (line := text.decode("utf-8", "replace").rstrip()):
        return
    if (severity := _LEVELS.get(level, logging.DEBUG)) > logging.DEBUG and _ABORTED.search(line):
        severity = logging.DEBUG
    log.log(severity, "%s", _FOLDERS.sub("…/", line))


class DeferredFrees(SimpleQueue[tuple[Callable[[Any], Any], Any]]):
    """Deferred free list: pointers of garbage-collected owners; the owner thread frees them between steps."""

    def free_all(self) -> None:
        """Free all pointers in the list. Owner thread only."""
        while not self.empty():  # only this thread takes out of it
            free, pointer = self.get()
            free(pointer)


class Owned:
    """One native pointer. `close` frees it; a forgotten one is put on the deferred free list.

    A freed resource has no `pointer`: use after close fails in Python.
    """

    def __init__(self, pointer: Any, free: Callable[[Any], Any], deferred_frees: DeferredFrees) -> None:
        assert pointer, "a native constructor returned NULL"
        self.pointer = pointer
        self.deferred_frees = deferred_frees
        self._free = free
        self._finalizer = weakref.finalize(self, deferred_frees.put, (free, pointer))
        self._finalizer.atexit = False  # at exit the system frees everything

    def close(self) -> None:
        """Free it now. Owner thread only; idempotent."""
        if self._finalizer.detach() is not None:
            self._free(self.__dict__.pop("pointer"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
