"""The CPU: which instruction sets a library built here may use.

Standard library only: this runs before the dependencies are installed.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

# What a compiler may emit on its own or ggml asks for by name. The rest of /proc/cpuinfo (mitigations,
# virtualisation, power) comes and goes with kernel and microcode, and must not cause a new build.
_X86_INSTRUCTION_SETS = (
    *("sse", "ssse", "pni", "avx", "amx", "apx", "fma", "f16c", "bmi", "abm", "popcnt", "movbe"),
    *("aes", "vaes", "pclmul", "vpclmul", "gfni", "sha", "adx", "cx16", "lahf", "xop", "tbm", "3dnow"),
)


def machine() -> str:
    """Operating system and architecture, such as `linux-x86_64`."""
    return f"{sys.platform}-{platform.machine().lower()}"


def features() -> tuple[str, ...]:
    """The instruction sets of this CPU, sorted, as its system names them; empty where it does not say."""
    names = _sysctl_features() if sys.platform == "darwin" else _cpuinfo_features()
    if platform.machine().lower() in ("x86_64", "amd64", "i386", "i686"):
        names = {name for name in names if name.startswith(_X86_INSTRUCTION_SETS)}
    return tuple(sorted(names))


def usable_cores() -> int:
    """How many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpuinfo_features() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() in ("flags", "features", "isa"):
            return set(value.lower().split())
    return set()


def _sysctl_features() -> set[str]:
    listing = subprocess.run(["sysctl", "machdep.cpu", "hw.optional"], capture_output=True, text=True).stdout
    found: set[str] = set()
    for line in listing.splitlines():
        name, _, value = line.partition(":")
        if name.startswith("machdep.cpu.") and name.endswith("features"):
            found.update(value.lower().replace(".", "_").split())
        elif name.startswith("hw.optional.arm") and value.strip() == "1":
            found.add(name.rpartition(".")[2].lower())
    return found
