"""Embeddings as vectors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

RAW = -1  # as `norm` of `to_vector`


def to_vector(data: bytes, dimensions: int | None = None, norm: int = 2) -> npt.NDArray[np.float32]:
    """The first `dimensions` elements of an embedding in `RequestOutput.embeddings`, scaled to norm 1.

    `norm` is that of llama-server: RAW scales nothing, 0 makes the largest element 32760, 1 and above are the
    p-norms. A vector of zeros is not scaled.
    """
    vector = np.frombuffer(data, "<f4")[:dimensions].astype(np.float64)
    if norm == RAW:
        length = 1.0
    elif norm == 0:
        length = float(np.abs(vector).max()) / 32760.0
    else:
        length = float((np.abs(vector) ** norm).sum() ** (1.0 / norm))
    return (vector / length if length > 0 else vector).astype("<f4")
