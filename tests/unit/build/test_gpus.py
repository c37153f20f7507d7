"""GPUs by the word of their drivers, which are stand-ins here: the answers of real ones are injected."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cllm.build import gpus
from cllm.build.gpus import BACKENDS, Drivers, Gpu, ask_drivers, find_gpus

LLVMPIPE = ("llvmpipe", 4, 24 << 30)
RADEON = ("AMD Radeon", 2, 16 << 30)


def write(number: int) -> Callable[..., None]:
    """A function of CUDA that writes a number to its first argument."""
    return lambda value, *_: setattr(value._obj, "value", number)


class Cuda:
    """libcuda with `count` H200; `code` is what cuInit returns."""

    cuDriverGetVersion, cuDeviceTotalMem_v2 = map(staticmethod, (write(13010), write(139 << 30)))

    def __init__(self, count: int = 1, code: int = 0) -> None:
        self.cuInit, self.cuDeviceGetCount = lambda flags: code, write(count)

    def cuGetErrorString(self, error: int, text: Any) -> None:
        text._obj.value = b"driver {too} old"

    def cuDeviceGet(self, device: Any, index: int) -> None:
        device._obj.value = index

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> None:
        name.value = b"NVIDIA H200"

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> None:
        value._obj.value = {75: 9, 76: device}[attribute]


class Vulkan:
    """libvulkan with these devices: name, type, memory of its own beside the host's."""

    def __init__(self, *devices: tuple[str, int, int], code: int = 0) -> None:
        self.devices, self.code = devices, code

    def vkCreateInstance(self, info: Any, allocator: None, instance: Any) -> int:
        assert info._obj[0] == 1, "the type, in the lower half"
        return self.code

    def vkDestroyInstance(self, instance: Any, allocator: None) -> None:
        pass

    def vkEnumeratePhysicalDevices(self, instance: Any, count: Any, handles: Any) -> int:
        count._obj.value = len(self.devices)
        for index in range(len(self.devices) if handles is not None else 0):
            handles[index] = index + 1
        return 0

    def vkGetPhysicalDeviceProperties(self, device: Any, properties: Any) -> None:
        found = properties._obj
        name, found.type, _ = self.devices[device.value - 1]
        found.name, found.api = name.encode(), 1 << 22 | 3 << 12

    def vkGetPhysicalDeviceMemoryProperties(self, device: Any, memory: Any) -> None:
        found = memory._obj
        found.heap_count = 2
        found.heaps[0].size, found.heaps[0].flags = self.devices[device.value - 1][2], 1
        found.heaps[1].size = 64 << 30


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Put drivers in the place of this machine's."""
    monkeypatch.delenv(gpus.VISIBLE_VULKAN, raising=False)
    monkeypatch.setattr(gpus, "_nvidia_version", lambda: "580.82")
    monkeypatch.setattr(gpus, "_DEVICE_FILES", tmp_path)
    (tmp_path / "nvidia0").touch()

    def install(**libraries: Any) -> None:
        def open_library(name: str) -> Any:
            found = libraries.get(name.removeprefix("lib").partition(".")[0])
            if found is None:
                raise OSError(f"{name}: cannot open shared object file")
            return found

        monkeypatch.setattr(ctypes, "CDLL", open_library)

    return install


def test_a_machine_without_drivers_has_no_gpu(install: Callable[..., None]) -> None:
    install()
    assert ask_drivers(*BACKENDS) == Drivers()


def test_the_cuda_driver_names_its_gpus(install: Callable[..., None]) -> None:
    install(cuda=Cuda(count=2))
    first = Gpu("cuda", "NVIDIA H200", 139 << 30, "90", "driver 580.82 (CUDA 13.1)")
    assert ask_drivers(*BACKENDS) == Drivers((first, first._replace(architecture="91")))
    assert str(first) == "NVIDIA H200, 139 GiB, driver 580.82 (CUDA 13.1)"


def test_a_driver_without_a_device_is_no_problem_and_one_that_does_not_start_is(
    install: Callable[..., None],
) -> None:
    install(cuda=Cuda(code=100))
    assert ask_drivers(*BACKENDS) == Drivers()
    install(cuda=Cuda(code=803))
    (problem,) = ask_drivers(*BACKENDS).problems
    assert problem == "the NVIDIA driver does not start: CUDA error 803 (driver {too} old)"


def test_vulkans_software_device_is_no_gpu_unless_it_is_named(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(vulkan=Vulkan(LLVMPIPE, RADEON))
    assert ask_drivers(*BACKENDS).gpus == (Gpu("vulkan", "AMD Radeon", 16 << 30, "", "Vulkan 1.3"),)
    monkeypatch.setenv(gpus.VISIBLE_VULKAN, "0")
    assert [gpu.name for gpu in ask_drivers(*BACKENDS).gpus] == ["llvmpipe"]


def test_vulkan_is_not_asked_where_the_kernel_has_no_gpu(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(vulkan=Vulkan(RADEON))
    (tmp_path / "nvidia0").unlink()
    monkeypatch.setattr(sys, "platform", "linux")
    assert ask_drivers("vulkan") == Drivers()
    monkeypatch.setenv(gpus.VISIBLE_VULKAN, "0")
    assert len(ask_drivers("vulkan").gpus) == 1, "unless a device is named"
    monkeypatch.delenv(gpus.VISIBLE_VULKAN)
    (tmp_path / "dri").mkdir()
    (tmp_path / "dri" / "renderD128").touch()
    assert len(ask_drivers("vulkan").gpus) == 1


def test_the_vulkan_loader_alone_is_no_gpu(install: Callable[..., None]) -> None:
    install(vulkan=Vulkan(code=-9))
    assert ask_drivers(*BACKENDS) == Drivers()


def test_one_driver_that_fails_hides_no_other(install: Callable[..., None]) -> None:
    install(cuda=Cuda(code=999), vulkan=Vulkan(RADEON))
    found = ask_drivers(*BACKENDS)
    assert len(found.problems) == 1 and [gpu.name for gpu in found.gpus] == ["AMD Radeon"]
    assert ask_drivers("vulkan").problems == (), "the other is not asked"
    assert found.of("cuda") == () and len(found.of("vulkan")) == 1


def test_a_process_of_its_own_answers() -> None:
    """Whatever this machine has: it is what the drivers say here."""
    assert find_gpus() == ask_drivers(*BACKENDS)


def test_a_driver_that_kills_its_process_is_a_problem_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "__file__", "-c")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (problem,) = find_gpus().problems
    assert problem.startswith("a GPU driver ended the process that asked it")

    def run(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("python", 60)

    monkeypatch.setattr(subprocess, "run", run)
    assert find_gpus().problems == ("a GPU driver did not answer within 60 s",)
