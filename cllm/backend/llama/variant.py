"""Variant: the CPU backend that a library for every CPU has loaded, and what this CPU has beyond it."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

# What ggml has kernels for, as the system names it, and as ggml does.
_KERNELS = {
    "avx": "AVX",
    "avx2": "AVX2",
    "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512",
    "avx512vbmi": "AVX512_VBMI",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "amx_int8": "AMX_INT8",
    "bmi2": "BMI2",
    "f16c": "F16C",
    "fma": "FMA",
    "asimddp": "DOTPROD",
    "asimdhp": "FP16_VA",
    "i8mm": "MATMUL_INT8",
    "sve": "SVE",
}


def loaded_variant(maps: Path = Path("/proc/self/maps")) -> str | None:
    """The name of the variant in this process; None where the library has none or the system does not say."""
    try:
        found = re.search(r"/libggml-cpu-(\S+)\.so$", maps.read_text(), re.MULTILINE)
    except OSError:
        return None
    return found and found[1]


def unused_features(features: Collection[str], system_info: str) -> list[str]:
    """The features of this CPU that ggml has kernels for and the library was not compiled for."""
    used = set(re.findall(r"\b(\w+) = ", system_info))
    return [name for name, kernel in _KERNELS.items() if name in features and kernel not in used]
