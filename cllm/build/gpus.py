"""GPUs by the word of their drivers: asked through ctypes, with nothing compiled and nothing allocated.

Run as a program (`find_gpus` does), it asks in a process of its own, which a broken driver may end. It
imports nothing of cllm, so that this takes a few hundredths of a second.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

BACKENDS = ("cuda", "vulkan")  # the first that has a GPU is taken
LIMIT_S = 60
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_CPU_TYPE = 4  # VK_PHYSICAL_DEVICE_TYPE_CPU: Mesa's software device
_DEVICE_LOCAL = 1  # VK_MEMORY_HEAP_DEVICE_LOCAL_BIT
_DEVICE_FILES = Path("/dev")
VISIBLE_VULKAN = "GGML_VK_VISIBLE_DEVICES"  # ggml admits what it names, a software device too


class Gpu(NamedTuple):
    """A GPU. `architecture` is CUDA's compute capability without its point, such as `90`."""

    backend: str  # cuda, vulkan
    name: str
    memory: int
    architecture: str
    driver: str

    def __str__(self) -> str:
        return f"{self.name}, {self.memory / 2**30:.0f} GiB, {self.driver}"


class Drivers(NamedTuple):
    """Answers of the drivers: the GPUs, and the problems of drivers that answer without a GPU."""

    gpus: tuple[Gpu, ...] = ()
    problems: tuple[str, ...] = ()

    def of(self, backend: str) -> tuple[Gpu, ...]:
        return tuple(gpu for gpu in self.gpus if gpu.backend == backend)


def find_gpus() -> Drivers:
    """Ask the drivers in a throw-away process."""
    command = [sys.executable, "-I", "-S", __file__]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=True)
        gpus, problems = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return Drivers(problems=(f"a GPU driver did not answer within {LIMIT_S} s",))
    except (subprocess.SubprocessError, ValueError) as error:
        return Drivers(problems=(f"a GPU driver ended the process that asked it ({error})",))
    return Drivers(tuple(Gpu(*gpu) for gpu in gpus), tuple(problems))


def ask_drivers(*backends: str) -> Drivers:
    """Ask these drivers in this process, which uses the GPU anyway, or may end."""
    gpus: list[Gpu] = []
    problems: list[str] = []
    for backend in backends:
        try:
            gpus += {"cuda": _ask_cuda, "vulkan": _ask_vulkan}[backend]()
        except DriverError as error:
            problems.append(str(error))
    return Drivers(tuple(gpus), tuple(problems))


class DriverError(Exception):
    """A driver is there and refuses."""


def _ask_cuda() -> list[Gpu]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    if (error := cuda.cuInit(0)) == _NO_DEVICE:
        return []
    if error:
        raise DriverError(f"the NVIDIA driver does not start: CUDA error {error}{_cuda_reason(cuda, error)}")
    version = _ask(cuda.cuDriverGetVersion)
    supported = f"CUDA {version // 1000}.{version % 1000 // 10}"
    driver = f"driver {_nvidia_version()} ({supported})" if _nvidia_version() else f"driver for {supported}"
    found = []
    for index in range(_ask(cuda.cuDeviceGetCount)):
        device, name = _ask(cuda.cuDeviceGet, index), ctypes.create_string_buffer(256)
        cuda.cuDeviceGetName(name, len(name), device)
        memory = _ask(cuda.cuDeviceTotalMem_v2, device, kind=ctypes.c_size_t)
        major, minor = (_ask(cuda.cuDeviceGetAttribute, key, device) for key in (_MAJOR, _MINOR))
        found.append(Gpu("cuda", name.value.decode("utf-8", "replace"), memory, f"{major}{minor}", driver))
    return found


def _ask(function: Callable[..., Any], *arguments: int, kind: Any = ctypes.c_int) -> int:
    """Call a function of CUDA; returns the number that it writes."""
    value = kind()
    function(ctypes.byref(value), *arguments)
    return int(value.value)


def _cuda_reason(cuda: ctypes.CDLL, error: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorString(error, ctypes.byref(text))
    return f" ({text.value.decode('utf-8', 'replace')})" if text.value else ""


def _nvidia_version() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


class _Properties(ctypes.Structure):
    """VkPhysicalDeviceProperties: its limits, which are not read, are 504 bytes, and 20 follow."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("api", "driver", "vendor", "device", "type")),
        ("name", ctypes.c_char * 256),
        ("rest", ctypes.c_uint64 * 128),
    )


class _Heap(ctypes.Structure):
    _fields_ = (("size", ctypes.c_uint64), ("flags", ctypes.c_uint32))


class _MemoryProperties(ctypes.Structure):
    """VkPhysicalDeviceMemoryProperties."""

    _fields_ = (
        ("type_count", ctypes.c_uint32),
        ("types", ctypes.c_uint32 * 64),
        ("heap_count", ctypes.c_uint32),
        ("heaps", _Heap * 16),
    )


def _has_device_file() -> bool:
    """Return True if the kernel has a GPU. To find none, Vulkan would load all drivers, in half a second."""
    names = ("dri/renderD*", "nvidia[0-9]*", "dxg", "kgsl-3d0", "mali[0-9]*")
    return not sys.platform.startswith("linux") or any(any(_DEVICE_FILES.glob(name)) for name in names)


def _ask_vulkan() -> list[Gpu]:
    named = os.environ.get(VISIBLE_VULKAN)
    if named is None and not _has_device_file():
        return []
    try:
        vulkan = ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return []
    instance, count = ctypes.c_void_p(), ctypes.c_uint32()
    info = (ctypes.c_uint64 * 8)(1)  # VkInstanceCreateInfo with its type, and no layers or extensions
    if vulkan.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance)):
        return []  # no driver: the loader alone is installed with many programs
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
    handles = (ctypes.c_void_p * count.value)()
    if error := vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles):
        raise DriverError(f"the Vulkan driver lists no GPU: Vulkan error {error}")
    found = []
    for index in range(count.value):
        properties, memory = _Properties(), _MemoryProperties()
        device = ctypes.c_void_p(handles[index])
        vulkan.vkGetPhysicalDeviceProperties(device, ctypes.byref(properties))
        vulkan.vkGetPhysicalDeviceMemoryProperties(device, ctypes.byref(memory))
        admitted = properties.type != _CPU_TYPE if named is None else str(index) in named.split(",")
        if not admitted:
            continue
        heaps = (memory.heaps[number] for number in range(memory.heap_count))
        size = sum(heap.size for heap in heaps if heap.flags & _DEVICE_LOCAL)
        driver = f"Vulkan {properties.api >> 22 & 0x7F}.{properties.api >> 12 & 0x3FF}"
        found.append(Gpu("vulkan", properties.name.decode("utf-8", "replace"), size, "", driver))
    vulkan.vkDestroyInstance(instance, None)
    return found


if __name__ == "__main__":
    print(json.dumps(ask_drivers(*BACKENDS)))
