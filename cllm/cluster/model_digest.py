"""Model digest: tells whether two machines have the same model, without reading its weights."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from cllm.backend.llama.gguf import GgufHeader


def digest_model(path: Path) -> str:
    """Of the header and the tensor list of each part, and of their sizes. Raises ModelFileError."""
    digest = sha256()
    for part in GgufHeader(path).parts:
        digest.update(f"{part.path.stat().st_size} ".encode())
        with part.path.open("rb") as file:
            digest.update(file.read(part.header_bytes))
    return digest.hexdigest()[:32]
