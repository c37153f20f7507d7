"""cllm: GGUF models for many users at once, on llama.cpp, from Python.

`LLM` and `AsyncLLM` are the Python API; they are imported on first use, so that `import cllm` is
cheap and the build of the native library can run before the dependencies are installed.
"""

from __future__ import annotations

import atexit
import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

# The interpreter's last collection may crash in msgspec, when it frees types with `Meta` (its issue 717).
atexit.register(gc.freeze)
__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from cllm.llm import LLM, AsyncLLM
    from cllm.types import SamplingParams


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("cllm.types" if name == "SamplingParams" else "cllm.llm"), name)
    raise AttributeError(f"module 'cllm' has no attribute {name!r}")
