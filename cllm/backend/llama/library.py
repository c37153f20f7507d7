"""Native library: find it, load it, and own its pointers.

No other module imports `llama_cpp`. Its package is bypassed on purpose: importing it would load further
libraries, a second server and a logging hook; only its ctypes declarations are used.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import re
import signal
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from cllm.build.build import find_built
from cllm.build.gpus import BACKENDS, ask_drivers
from cllm.build.module import Module, choose_module, find_modules
from cllm.errors import LibraryError

log = logging.getLogger("llama.cpp")

MAX_THREADS = 512  # GGML_MAX_N_THREADS
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


class ThreadpoolParams(ctypes.Structure):
    """ggml_threadpool_params, which the bindings do not declare."""

    _fields_ = (
        ("cpumask", ctypes.c_bool * MAX_THREADS),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


class BufferOverride(ctypes.Structure):
    """llama_model_tensor_buft_override, which the bindings do not declare: a pattern and a buffer type."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


class Library:
    """The loaded library. `api` holds llama.h's functions, as the bindings declare them."""

    def __init__(self, directory: Path, api: Any) -> None:
        self.api = api
        self._directory = directory
        self._module_looked_for = False
        self._declare_threadpools(directory)
        # llama.cpp keeps the pointer for the life of the process, and so does this object.
        self._log_callback = api.llama_log_callback(_log_line)
        api.llama_log_set(self._log_callback, ctypes.c_void_p(0))
        api.llama_backend_init()

    def _declare_threadpools(self, directory: Path) -> None:
        """Functions that the bindings do not declare. All three libraries are loaded already."""
        names = ("ggml-base", "ggml-cpu", "llama")
        base, cpu, llama = (ctypes.CDLL(str(directory / f"lib{name}.{LIBRARY_SUFFIX}")) for name in names)
        pool, params = ctypes.c_void_p, ctypes.POINTER(ThreadpoolParams)
        declare = ctypes.CFUNCTYPE  # result, arguments
        self.threadpool_params = declare(None, params, ctypes.c_int)(("ggml_threadpool_params_init", base))
        self.threadpool_new = declare(pool, params)(("ggml_threadpool_new", cpu))
        self.threadpool_free = declare(None, pool)(("ggml_threadpool_free", cpu))
        self.cpu_buffer_type = declare(ctypes.c_void_p)(("ggml_backend_cpu_buffer_type", base))
        self.attach_threadpool = declare(None, ctypes.c_void_p, pool, pool)(
            ("llama_attach_threadpool", llama)
        )

    def load_module(self) -> None:
        """Load the GPU module that suits, once. Raises LibraryError if it is of no use here."""
        if self._module_looked_for:
            return
        if (module := find_module(self._directory)) is not None:
            load_module(self._directory, module)
        self._module_looked_for = True

    def system_info(self) -> str:
        """The instruction sets that llama.cpp was compiled for."""
        return str(self.api.llama_print_system_info().decode())


def find() -> Path:
    """The library's folder: `CLLM_LIBRARY`, else the build of `cllm build`, else the bindings' own."""
    if named := os.environ.get("CLLM_LIBRARY"):
        return Path(named)
    if (built := find_built()) is not None:
        return built
    bundled = _bindings_directory() / "lib"
    if any(bundled.glob("libllama.*")):
        return bundled
    raise LibraryError("no native library for this machine: run `cllm build` (about three minutes, once)")


def may_use_gpu() -> bool:
    """Whether a GPU module was built for this library, or the library has a GPU backend. Asks no driver."""
    folder = find()
    has_backend = any(any(folder.glob(pattern)) for pattern in _GPU_LIBRARIES)
    return has_backend or bool(modules_for(folder))


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


def load_module(directory: Path, module: Path) -> None:
    """Load a module beside the library of `directory`. Raises LibraryError if that brings no GPU."""
    names = ("ggml-base", "ggml")
    base, ggml = (ctypes.CDLL(str(directory / f"lib{name}.{LIBRARY_SUFFIX}")) for name in names)
    ggml.ggml_backend_load.restype = ctypes.c_void_p
    base.ggml_backend_reg_dev_count.restype = ctypes.c_size_t
    registry = ctypes.c_void_p(ggml.ggml_backend_load(str(module).encode()))
    if not registry or not base.ggml_backend_reg_dev_count(registry):
        raise LibraryError(
            f"the GPU module {module.parent.name} cannot be loaded or finds no GPU; build it again with "
            "`cllm build --gpu auto --force`, or serve without the GPU (--gpu-layers 0)"
        )


def modules_for(directory: Path) -> list[Module]:
    """The modules that were built for a library. Asks no driver."""
    return find_modules() if takes_modules(directory) else []


def takes_modules(directory: Path) -> bool:
    """Whether modules of `cllm build` fit a library: others may be of another version."""
    return (directory / "build.json").exists()


def load(directory: Path | None = None, *, gpu: bool = False) -> Library:
    """Load the library of `directory` (default: `find()`). One per process: the bindings allow no second.

    With `gpu` also the module for the GPUs that are here, if one was built. Without it no driver is touched.
    """
    directory = directory or find()
    present = sys.modules.get("llama_cpp.llama_cpp")
    if present is None:
        present = _import_bindings(directory)
    elif Path(present._base_path) != directory:
        log.warning("llama_cpp was imported before cllm; using its library in %s", present._base_path)
        directory = Path(present._base_path)
    library: Library | None = getattr(present, "_cllm_library", None)
    if library is None:  # one log callback per process
        library = present._cllm_library = Library(directory, present)  # type: ignore[attr-defined]
    if gpu:
        library.load_module()
    return library


def exit_reason(code: int, stderr: bytes) -> str:
    """The last line that a process with native code wrote, or the signal or code it ended with."""
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    last = stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    return last or f"it exited with code {code}"


def _import_bindings(directory: Path) -> types.ModuleType:
    """Import `llama_cpp.llama_cpp` alone, with its library taken from `directory`."""
    package = types.ModuleType("llama_cpp")
    package.__path__ = [str(_bindings_directory())]
    before = os.environ.get("LLAMA_CPP_LIB_PATH")
    os.environ["LLAMA_CPP_LIB_PATH"] = str(directory)
    sys.modules["llama_cpp"] = package
    try:
        return importlib.import_module("llama_cpp.llama_cpp")
    except (OSError, RuntimeError, AttributeError) as error:
        raise LibraryError(
            f"the native library in {directory} cannot be loaded ({error}); "
            "rebuild it with `cllm build --force`"
        ) from error
    finally:
        # A later import of llama_cpp gets the real package.
        sys.modules.pop("llama_cpp", None)
        if before is None:
            del os.environ["LLAMA_CPP_LIB_PATH"]
        else:
            os.environ["LLAMA_CPP_LIB_PATH"] = before


def _bindings_directory() -> Path:
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise LibraryError("the package llama-cpp-python is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _log_line(level: int, text: bytes, _: Any) -> None:
    line = text.decode("utf-8", "replace").rstrip()
    if not line:
        return
    severity = _LEVELS.get(level, logging.DEBUG)
    if severity > logging.DEBUG and _ABORTED.search(line):
        severity = logging.DEBUG
    log.log(severity, "%s", _FOLDERS.sub("…/", line))


class DeferredFrees:
    """Deferred free list: pointers of garbage-collected owners; the owner thread frees them between steps."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[Any], Any], Any]] = SimpleQueue()

    def put(self, free: Callable[[Any], Any], pointer: Any) -> None:
        """Safe from any thread, and from a finaliser."""
        self._queue.put((free, pointer))

    def free_all(self) -> None:
        """Free all pointers in the list. Owner thread only."""
        while not self._queue.empty():  # only this thread takes out of it
            free, pointer = self._queue.get()
            free(pointer)


class Owned:
    """One native pointer. `close` frees it; a forgotten one is put on the deferred free list."""

    def __init__(self, pointer: Any, free: Callable[[Any], Any], deferred_frees: DeferredFrees) -> None:
        assert pointer, "a native constructor returned NULL"
        self._pointer = pointer
        self._free = free
        self._finalizer = weakref.finalize(self, deferred_frees.put, free, pointer)
        self._finalizer.atexit = False  # at exit the system frees everything

    @property
    def pointer(self) -> Any:
        assert self._pointer is not None, "use of a native resource that was freed"
        return self._pointer

    def close(self) -> None:
        """Free it now. Owner thread only; idempotent."""
        if self._finalizer.detach() is not None:
            pointer, self._pointer = self._pointer, None
            self._free(pointer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
