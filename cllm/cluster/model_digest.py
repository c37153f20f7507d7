"""Model digest: by which name and digest the machines of a cluster know that they have the same model."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from cllm.backend.llama.gguf import GgufHeader
from cllm.config import EngineConfig


def name_deployment(engine: EngineConfig, path: Path) -> str:
    """The name of a model in a cluster: its alias, or that of its file."""
    return (engine.alias or path.stem).replace("/", "-")


def digest_model(path: Path) -> str:
    """Of the header and the tensor list of each part, and of their sizes, not of the weights.

    Raises ModelFileError.
    """
    digest = sha256()
    for part in GgufHeader(path).parts:
        digest.update(f"{part.path.stat().st_size} ".encode())
        with part.path.open("rb") as file:
            digest.update(file.read(part.header_bytes))
    return digest.hexdigest()[:32]
