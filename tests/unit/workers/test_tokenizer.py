"""The memory of a process that reads clients' bytes is bounded."""

from __future__ import annotations

import subprocess
import sys

import pytest

ALLOCATE = """
import mmap
from cllm.workers import tokenizer
tokenizer.MAX_MEMORY = 256 << 20
tokenizer.limit_memory()
reserved = mmap.mmap(-1, 32 << 30, flags=mmap.MAP_PRIVATE, prot=0)
bytearray(100 << 20)
try:
    bytearray(300 << 20)
except MemoryError:
    print("refused")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_memory_limit_counts_writable_memory_not_reserved_addresses() -> None:
    done = subprocess.run([sys.executable, "-c", ALLOCATE], capture_output=True, text=True, timeout=60)
    assert done.stdout == "refused\n", done.stderr
