"""Fingerprints: the CPU, library build, model and load that a measurement or a saved state is valid for."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path

from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.library import find
from cllm.backend.llama.placement import Placement
from cllm.backend.llama.threads import default_threads
from cllm.build.options import features, read_cpuinfo
from cllm.config import EngineConfig


def tune_fingerprint(
    config: EngineConfig,
    header: GgufHeader,
    fixed: Mapping[str, int | bool | str],
    *,
    placement: Placement | None = None,
) -> dict[str, str]:
    """The fingerprint of a tune record. The model counts by its content, not by its path.

    `fixed` are the settings that were given, so not varied. Raises SetupError.
    """
    return {
        "cpu": f"{cpu_name()} {_digest(' '.join(features()).encode())}",
        "cores": str(default_threads()),
        "library": library_digest(find()),
        "model": _model(header),
        "parallel": str(config.parallel),
        "ctx_size": str(config.ctx_size),
        "devices": ", ".join(_layers_by_device(placement)) if placement is not None else "",
        "fixed": " ".join(f"{name}={value}" for name, value in sorted(fixed.items())),
    }


def _layers_by_device(placement: Placement) -> Iterator[str]:
    for device, count in zip(placement.devices, placement.counts, strict=True):
        if count:
            yield f"{device.description}: {count} of {placement.total} layers"
    if placement.host_experts:
        yield f"experts of {placement.host_experts} on the CPU"


def state_fingerprint(config: EngineConfig, *, unified: bool) -> str:
    """The fingerprint of saved sequence states: everything their bytes depend on. Raises SetupError."""
    header = GgufHeader(Path(config.model))
    info = {
        "model": _model(header),
        "weights": " ".join(_sample(part.path) for part in header.parts),
        "library": library_digest(find()),
        "keys": config.cache_type_k,
        "values": config.cache_type_v,
        "transposed": str(not config.flash_attention),
        "unified": str(unified),
    }
    return "\n".join(f"{name}={value}" for name, value in info.items())


def _sample(path: Path, pieces: int = 64, piece_bytes: int = 1 << 16) -> str:
    """A digest of pieces of the whole file: a fine-tuned model has the same header, other weights."""
    digest = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        for number in range(pieces):
            file.seek(size * number // pieces)
            digest.update(file.read(piece_bytes))
    return digest.hexdigest()[:16]


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name from the system, else its architecture."""
    return read_cpuinfo(cpuinfo).get("model name") or platform.processor() or platform.machine()


def library_digest(folder: Path) -> str:
    """A digest of the library's files: it changes with a rebuild, not when the folder is moved."""
    files = (file for pattern in ("libllama.*", "libggml*") for file in sorted(folder.glob(pattern)))
    info = [f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files]
    return _digest("\n".join(info).encode())


def _model(header: GgufHeader) -> str:
    with header.path.open("rb") as file:
        return f"{header.file_bytes}:{_digest(file.read(header.header_bytes))}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
