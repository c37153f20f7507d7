"""Conversion: a model as another file type; the embedded one, once, where this CPU is slow with its own.

That copy lies in the cache under the name of the file, so the model's name and time stay as shipped.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from cllm.backend.llama.fingerprint import sample_digest
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.kernels import count_weights, get_speed, time_types
from cllm.backend.llama.library import load, run_apart
from cllm.backend.llama.placement import list_devices, wants_gpu
from cllm.backend.llama.threads import compute_threads
from cllm.build.toolchain import BINDINGS_VERSION, cache_directory, locked
from cllm.config import EngineConfig
from cllm.errors import LibraryError, ModelFileError

log = logging.getLogger(__name__)
TARGET = "Q8_0"
LIMIT_S = 300.0
MIN_PREFILL, MIN_DECODE = 1.1, 0.9  # times the speed of the file as it is
_TARGET_FILE = 7  # LLAMA_FTYPE_MOSTLY_Q8_0
_SIZE = re.compile(rb"quant size *= *([\d.]+) MiB")


def find_gain(header: GgufHeader, threads: int) -> tuple[float, float]:
    """How many times as fast the model would be as Q8_0: prefill, decode. Raises LibraryError."""
    weights = count_weights(header)
    speeds = time_types({*weights, TARGET}, threads)
    return get_speed(weights, speeds).compare(get_speed({TARGET: 1}, speeds))


def pays(gain: tuple[float, float]) -> bool:
    """Decide by the gain of prefill and of decode."""
    return gain[0] >= MIN_PREFILL and gain[1] >= MIN_DECODE


def choose_file(path: Path, config: EngineConfig) -> Path:
    """The file to serve for a shipped one: itself, or its converted copy. Whatever fails, itself."""
    try:
        if wants_gpu(config) and list_devices():  # which have kernels for all types
            return path
        header = GgufHeader(path)
        gain = find_gain(header, compute_threads(config))
        if not pays(gain):
            return path
        copy = convert(header)
    except (LibraryError, ModelFileError, OSError) as error:
        log.warning("%s is served as it is, since it cannot be converted: %s", path.name, error)
        return path
    log.info("%s is served as %s: here prefill is %.1f × and decode %.1f × as fast", path.stem, TARGET, *gain)
    return copy


def convert(header: GgufHeader) -> Path:
    """Return the converted copy of a model; it is made if it is not there. Raises SetupError, OSError."""
    source = header.path
    folder = cache_directory() / "converted" / f"{sample_digest(source)}-{BINDINGS_VERSION}"
    copy = folder / source.name
    if _is_whole(copy, header):
        return copy
    with locked(folder.with_name(f"{folder.name}.lock"), lambda: log.info("another process converts it")):
        if _is_whole(copy, header):
            return copy
        log.info("converting %s to %s, once (some seconds)", source.name, TARGET)
        folder.mkdir(exist_ok=True)
        write_copy(header, copy, _TARGET_FILE)
        shutil.copystat(source, copy)  # its time is that of the model in lists
    return copy


def write_copy(header: GgufHeader, target: Path, file_type: int, limit_s: float = LIMIT_S) -> None:
    """Write a model as another file type: whole, checked and on disk, or not at all.

    Raises SetupError, OSError.
    """
    new = target.with_name(f".new-{os.getpid()}")
    try:
        run_apart(__name__, msgspec.json.encode((str(header.path), str(new), file_type)), limit_s)
        if not _is_whole(new, header, exact=file_type == _TARGET_FILE):
            raise ModelFileError("the copy has other tensors")
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


def predict_size(header: GgufHeader, file_type: int) -> int:
    """Bytes of a model's file as another file type. Raises LibraryError."""
    output = run_apart(__name__, msgspec.json.encode((str(header.path), "", file_type)), LIMIT_S)
    if (found := _SIZE.search(output)) is None:
        raise LibraryError("llama.cpp does not tell the size")
    return header.file_bytes - header.data_bytes + int(float(found[1]) * 2**20)


def _is_whole(path: Path, source: GgufHeader, *, exact: bool = True) -> bool:
    """True if a file has the tensors of the source; if `exact`, the large ones as the target type."""
    with suppress(ModelFileError):
        found = GgufHeader(path)
        names = [{tensor.name for tensor in header.tensors} for header in (found, source)]
        return names[0] == names[1] and (not exact or TARGET in count_weights(found))
    return False


def main() -> int:
    """Convert, and load what was written with all its tensors checked. In the process itself.

    Without a target the log, which tells the size, is the output, and nothing is written.
    """
    source, target, file_type = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[str, str, int])
    native = logging.getLogger("llama.cpp")
    native.setLevel(logging.ERROR if target else logging.DEBUG)
    if not target:
        native.addHandler(logging.StreamHandler(sys.stdout))
    api = load().api
    params = api.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.dry_run = file_type, True, not target
    if code := api.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        return int(code)  # the log says why
    if not target:
        return 0
    checked = api.llama_model_default_params()
    checked.check_tensors, checked.n_gpu_layers = True, 0
    if not api.llama_model_load_from_file(target.encode(), checked):
        print("llama.cpp cannot load the copy", file=sys.stderr)
        return 1
    with Path(target).open("rb") as file:
        os.fsync(file.fileno())  # a copy that has its name is on disk
    return 0


if __name__ == "__main__":
    sys.exit(main())
