"""Dry load: llama.cpp's own sums of the memory that a configuration takes, before any of it is allocated.

llama.cpp reads the header only and simulates its allocations (`no_alloc`), in a process that may die of it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec

from cllm.backend.llama.library import LIBRARY_SUFFIX, DeferredFrees, Library, exit_reason, find, load
from cllm.backend.llama.placement import wants_gpu
from cllm.config import EngineConfig
from cllm.errors import CllmError, LibraryError, NotEnoughMemory
from cllm.types import Failure

HOST = "host"
LIMIT_S = 60.0
MAX_CELLS = 1 << 20  # llama.cpp keeps a record of each; beyond them sizes grow in proportion
# The settings on which memory depends.
_OF_MODEL = (
    *("model", "override_kv", "extra_buffers", "gpu_layers", "split_mode", "tensor_split", "main_gpu"),
    *("n_cpu_moe", "override_tensor", "draft"),
)
_OF_CONTEXT = (
    *("parallel", "slots", "ctx_size", "batch_tokens", "flash_attention", "unified_kv", "cache_type_k"),
    *("cache_type_v", "draft_tokens", "draft_rollback"),
)
# llama.cpp returns a std::map from buffer type to sizes (src/llama-ext.h): a tree, with these pointers in the
# map and before the pair of each node.
_BREAKDOWN = "_Z26llama_get_memory_breakdownPK13llama_context"
_LIBCXX = sys.platform == "darwin"
_MAP = ("first", "root", "count") if _LIBCXX else ("compare", "color", "root", "first", "last", "count")
_LINKS = ("left", "right", "parent", "color") if _LIBCXX else ("color", "parent", "left", "right")


class Sizes(NamedTuple):
    """Bytes of one memory, a GPU's or the host's, by their use."""

    model: int = 0
    kv: int = 0
    compute: int = 0


class _Map(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in _MAP)


class _Node(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_LINKS, "buffer_type")),
        *((name, ctypes.c_size_t) for name in Sizes._fields),
    )


def read_sizes(library: Library, context: Any) -> dict[str, Sizes]:
    """Sizes of a context and of the weights of its model, by device."""
    api = library.api
    found = {HOST: Sizes()}
    breakdown = getattr(ctypes.CDLL(str(library.directory / f"libllama.{LIBRARY_SUFFIX}")), _BREAKDOWN)
    breakdown.restype, breakdown.argtypes = _Map, (ctypes.c_void_p,)
    addresses = [breakdown(context).root]
    while addresses:
        if (address := addresses.pop()) is None:
            continue
        node = _Node.from_address(address)
        addresses += node.left, node.right
        device = api.ggml_backend_buft_get_device(node.buffer_type)
        name = api.ggml_backend_dev_name(device).decode() if device else "CPU"
        if name == "CPU" or api.ggml_backend_buft_is_host(node.buffer_type):
            name = HOST
        before = found.get(name, Sizes())
        found[name] = Sizes(*(size + getattr(node, part) for part, size in before._asdict().items()))
    return found


class _Answer(msgspec.Struct):
    sizes: dict[str, Sizes] = {}
    failure: Failure | None = None


class DryLoad(AbstractContextManager["DryLoad"]):
    """Measures configurations, in a process that starts when it is needed; results are remembered."""

    _remembered: ClassVar[dict[tuple[object, ...], dict[str, Sizes]]] = {}

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def measure(self, config: EngineConfig) -> dict[str, Sizes]:
        """Sizes by device. Raises ModelFileError, NotEnoughMemory, or LibraryError where the process dies."""
        if config.ctx_size > MAX_CELLS:
            return self._extrapolate(config)
        asked = {name: getattr(config, name) for name in (*_OF_MODEL, *_OF_CONTEXT)}
        status = Path(config.model).stat()
        key = (*asked.values(), find(), status.st_size, status.st_mtime_ns)
        if key not in self._remembered:
            self._remembered[key] = self._ask(EngineConfig(**asked, threads=1))
        return self._remembered[key]

    def _extrapolate(self, config: EngineConfig) -> dict[str, Sizes]:
        """Sizes of a context with more cells than can be tried, from those of two smaller ones."""
        half = MAX_CELLS // 2
        tried = (msgspec.structs.replace(config, ctx_size=cells) for cells in (half, MAX_CELLS))
        small, large = map(self.measure, tried)
        steps = config.ctx_size / half - 1
        return {
            device: Sizes(*(int(a + steps * (b - a)) for a, b in zip(small[device], sizes, strict=True)))
            for device, sizes in large.items()
        }

    def _ask(self, config: EngineConfig) -> dict[str, Sizes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cllm.backend.llama.dry_load"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # or an abort would start a debugger first
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(config) + b"\n")
            process.stdin.flush()
        if not select.select([process.stdout], [], [], LIMIT_S)[0]:
            raise LibraryError(f"llama.cpp did not sum up the memory of the model within {LIMIT_S:.0f} s")
        if not (line := process.stdout.readline()):
            reason = exit_reason(process.wait(), process.stderr.read() if process.stderr else b"")
            if process.returncode == -signal.SIGKILL:
                raise NotEnoughMemory(
                    "not enough memory for the states of this model; try a smaller --parallel"
                )
            raise LibraryError(f"llama.cpp cannot sum up the memory of the model: {reason}")
        answer = msgspec.json.decode(line, type=_Answer)
        if answer.failure is not None:
            raise answer.failure.error()
        return answer.sizes


def _measure(config: EngineConfig, opened: dict[tuple[object, ...], Any]) -> dict[str, Sizes]:
    """Measure in the process itself. `opened` holds the last model, by its settings."""
    from cllm.backend.llama.context import LlamaContext, used_outputs
    from cllm.backend.llama.gguf import GgufHeader
    from cllm.backend.llama.model import LlamaModel
    from cllm.backend.llama.mtp import MtpContext

    library, frees = load(gpu=wants_gpu(config)), DeferredFrees()
    settings = tuple(getattr(config, name) for name in _OF_MODEL)
    if settings not in opened:
        while opened:
            opened.popitem()[1].close()
        opened[settings] = LlamaModel(library, config, frees, dry=GgufHeader.of(config))
    model = opened[settings]
    # The host's pages for logits that are not asked for are never touched.
    outputs = None if wants_gpu(config) else used_outputs(config, model.vocabulary.size)
    with LlamaContext(library, model, config, frees, outputs=outputs) as context:
        sizes = read_sizes(library, context.pointer)
        if config.drafter != "mtp":
            return sizes
        rows = model.vector_length * config.batch_tokens * 4  # bytes of a step's hidden rows
        with MtpContext(library, model, config, context) as head:
            for name, more in read_sizes(library, head.pointer).items():
                old = sizes.get(name, Sizes())
                compute = old.compute + more.compute + (rows if name == HOST else 0)
                sizes[name] = Sizes(old.model, old.kv + more.kv, compute)
        return sizes


def main() -> int:
    """Answer each line of the input, a configuration, with a line."""
    logging.getLogger("llama.cpp").setLevel(logging.ERROR)
    # Recurrent states are allocated all the same: where they do not fit, this process is the one to end.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    opened: dict[tuple[object, ...], Any] = {}
    for line in sys.stdin.buffer:
        try:
            answer = _Answer(_measure(msgspec.json.decode(line, type=EngineConfig), opened))
        except CllmError as error:
            answer = _Answer(failure=Failure.of(error))
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
