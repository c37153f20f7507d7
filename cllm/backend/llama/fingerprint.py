"""Fingerprints: the library build, model and settings that a probe or a saved state is valid for."""

from __future__ import annotations

import hashlib
from pathlib import Path

from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.library import find
from cllm.build.build import KERNELS_NAME
from cllm.config import EngineConfig


def state_fingerprint(config: EngineConfig, *, unified: bool) -> str:
    """The fingerprint of saved sequence states: everything their bytes depend on. Raises SetupError."""
    header = GgufHeader(Path(config.model))
    with header.path.open("rb") as file:
        model = _digest(file.read(header.header_bytes))
    info = {
        "model": f"{header.file_bytes}:{model}",
        "weights": " ".join(sample_digest(part.path) for part in header.parts),
        "library": library_digest(find()),
        "keys": config.cache_type_k,
        "values": config.cache_type_v,
        "transposed": str(not config.flash_attention),
        "unified": str(unified),
        "rope": str(config.rope_params),
        "metadata": str(config.metadata),
    }
    if config.drafter == "mtp":  # what its head has is saved, too
        info["drafter"] = "mtp"
    return "\n".join(f"{name}={value}" for name, value in info.items())


def sample_digest(path: Path, pieces: int = 64, piece_bytes: int = 1 << 16) -> str:
    """A digest of pieces of the whole file: a fine-tuned model has the same header, other weights."""
    digest = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        for number in range(pieces):
            file.seek(size * number // pieces)
            digest.update(file.read(piece_bytes))
    return digest.hexdigest()[:16]


def library_digest(folder: Path) -> str:
    """A digest of the library's files: it changes with a rebuild, not when the folder is moved."""
    files = (file for pattern in ("libllama.*", "libggml*") for file in sorted(folder.glob(pattern)))
    info = [f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files]
    info += [str(file.stat().st_size) for file in folder.glob(KERNELS_NAME)]  # compiled anew by each clone
    return _digest("\n".join(info).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
