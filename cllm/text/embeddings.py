"""Embeddings: from the float32 bytes of the engine to normalised vectors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
L2 = 2
RAW = -1


def to_vector(data: bytes, dimensions: int | None = None, norm: int = L2) -> Vector:
    """The first `dimensions` elements of an embedding, scaled to norm 1.

    `norm` is that of llama-server: -1 scales nothing, 0 makes the largest element 32760, 1 and above are the
    p-norms. A vector of zeros is not scaled.
    """
    vector = np.frombuffer(data, "<f4")[:dimensions].astype(np.float64)
    match norm:
        case -1:
            length = 1.0
        case 0:
            length = float(np.abs(vector).max()) / 32760.0
        case _:
            length = float((np.abs(vector) ** norm).sum() ** (1.0 / norm))
    return (vector / length if length > 0 else vector).astype("<f4")
