"""Conversion: a model as another file type."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
from pathlib import Path

import msgspec

from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.library import load, run_apart
from cllm.errors import LibraryError, ModelFileError

LIMIT_S = 300.0
_SIZE = re.compile(rb"quant size *= *([\d.]+) MiB")


def write_copy(header: GgufHeader, target: Path, file_type: int, limit_s: float = LIMIT_S) -> None:
    """Write a model as another file type: whole, checked and on disk, or not at all.

    Raises SetupError, OSError.
    """
    new = target.with_name(f".new-{os.getpid()}")
    try:
        run_apart(__name__, msgspec.json.encode((str(header.path), str(new), file_type)), limit_s)
        if {tensor.name for tensor in GgufHeader(new).tensors} != {tensor.name for tensor in header.tensors}:
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
