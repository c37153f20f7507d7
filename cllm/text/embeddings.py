"""Vectors as the engine gives them (float32 bytes) and as clients want them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
L2 = 2
RAW = -1


def to_vector(data: bytes, dimensions: int | None = None, norm: int = L2) -> Vector:
    """The first `dimensions` of a vector, scaled to length 1.

    `norm` is llama-server's: -1 leaves the vector as it is, 0 makes its largest element 32760, 1 and above
    are the p-norms. A vector of zeros stays what it is.
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
