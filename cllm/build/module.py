"""Modules: what is loaded beside the CPU library of the same version. Standard library only.

A GPU module is a backend of ggml for one kind of GPU. It is a second configuration of the same source, of
which only the backend is kept: `libggml-cuda.so` in the folder
`CACHE/native/<version>-<machine>-cuda-<digest>/`. The CPU library stays as it is, so one cache folder serves
machines with and without the GPU.

libmtmd turns pictures and sound into rows of embeddings. It takes more than a minute on two cores, so it is
built only for models that need it: as a project of its own, against the finished library. Its folder is
`CACHE/native/<version>-<machine>-media-<digest>/`; one serves all CPUs of an architecture.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cllm.build.gpus import BACKENDS, Drivers, Gpu
from cllm.build.options import OPTIONS, digest, find_builds, machine
from cllm.build.toolchain import BINDINGS_VERSION, BuildError, Compiler, default_jobs, has_header

NVCC_FOLDER = "/usr/local/cuda/bin"  # where NVIDIA's packages have it
GPU_CHOICES = ("auto", *BACKENDS, "none")
BYTES_PER_JOB = {"cpu": 2**30, "cuda": 2**31, "vulkan": 2**30}
_CORE_MINUTES = {"cpu": 8, "cuda": 75, "vulkan": 20}  # about; Vulkan 8 with the glslc of Debian 12
_OPTIONS = (*OPTIONS["common"], *OPTIONS["module"])
# What ggml asks of Vulkan's headers without a check, and those before 1.3.272 (Debian 12) do not declare. It
# is for validation, which is off: a driver skips what it does not know.
OLD_VULKAN = Path(__file__).with_name("old_vulkan.hpp")
_VULKAN_HEADERS = ("vulkan/vulkan.hpp", "spirv/unified1/spirv.hpp")
MEDIA_TARGET = "mtmd"
MEDIA_PROJECT = Path(__file__).with_name("libmtmd")
_SUFFIX = "dylib" if sys.platform == "darwin" else "so"


class Module(NamedTuple):
    """A finished module. `architectures` are the GPUs it was compiled for; empty: any."""

    path: Path
    backend: str
    architectures: frozenset[str]

    def suits(self, gpus: tuple[Gpu, ...]) -> bool:
        """Return True if there are GPUs, and code for each: ggml would use all of them."""
        wanted = {gpu.architecture for gpu in gpus}
        return bool(gpus) and (not self.architectures or wanted <= self.architectures)


@dataclass(frozen=True)
class ModuleOptions:
    """Options of one build of a module. `tool` is its compiler: nvcc, glslc."""

    backend: str
    compiler: Compiler
    tool: Path
    architectures: tuple[str, ...] = ()
    project = None  # it is a part of llama.cpp's

    @property
    def key(self) -> str:
        """The name of its folder: without the CPU's features, which it does not use."""
        words = [module_revision(), *self.architectures]
        return f"{BINDINGS_VERSION}-{machine()}-{self.backend}-{digest(words)}"

    @property
    def target(self) -> str:
        return f"ggml-{self.backend}"

    def cmake_arguments(self) -> list[str]:
        """CMake's arguments without the folders."""
        arguments = [*_OPTIONS, f"-DGGML_{self.backend.upper()}=ON"]
        for language, command in (("C", self.compiler.c), ("CXX", self.compiler.cxx)):
            arguments.append(f"-DCMAKE_{language}_COMPILER={';'.join(command)}")
        folders = ["$ORIGIN"]
        if self.backend == "cuda":
            # cuBLAS is found without LD_LIBRARY_PATH, wherever CMake has found it.
            folders += [f"{_toolkit(self.tool)}/{name}" for name in ("lib64", "lib")]
            arguments.append("-DCMAKE_INSTALL_RPATH_USE_LINK_PATH=ON")
            arguments.append(f"-DCMAKE_CUDA_COMPILER={self.tool}")
            architectures = ";".join(f"{name}-real" for name in self.architectures)
            arguments.append(f"-DCMAKE_CUDA_ARCHITECTURES={architectures}")
        else:
            arguments.append(f"-DVulkan_GLSLC_EXECUTABLE={self.tool}")
            arguments.append(f"-DCMAKE_CXX_FLAGS=-include {OLD_VULKAN}")
        return [*arguments, f"-DCMAKE_INSTALL_RPATH={';'.join(folders)}"]

    def info(self) -> dict[str, Any]:
        """The part of its `build.json` that says what it is."""
        return {
            "version": BINDINGS_VERSION,
            "machine": machine(),
            "recipe": module_revision(),
            "backend": self.backend,
            "architectures": list(self.architectures),
            "compiler": self.compiler.identity,
        }

    def __str__(self) -> str:
        kind = f" for compute capability {', '.join(self.architectures)}" if self.architectures else ""
        return f"the GPU module {self.backend}{kind}, {self.compiler.identity}"


def describe_time(backend: str, jobs: int = 0) -> str:
    """Describe the duration of a backend's build. `jobs` of 0 stands for as many as this machine runs."""
    minutes = math.ceil(_CORE_MINUTES[backend] / (jobs or default_jobs(BYTES_PER_JOB[backend])))
    return f"about {minutes} minute{'s' if minutes > 1 else ''}, once"


def module_revision() -> str:
    """A digest of the options: an older module with other ones is not loaded."""
    return digest([*_OPTIONS, "module 1"])


def find_modules() -> list[Module]:
    """Return the finished modules of this version for this kind of machine, the newest first.

    Asks no driver.
    """
    wanted = {"version": BINDINGS_VERSION, "machine": machine(), "recipe": module_revision()}
    return [
        Module(folder / f"libggml-{info['backend']}.so", info["backend"], frozenset(info["architectures"]))
        for folder, info in find_builds(wanted).items()
    ]


def choose_module(modules: list[Module], drivers: Drivers) -> Module | None:
    """The module for the GPUs that the drivers report: CUDA before Vulkan, the newest of each."""
    ordered = (module for backend in BACKENDS for module in modules if module.backend == backend)
    return next((module for module in ordered if module.suits(drivers.of(module.backend))), None)


def choose_backend(asked: str, drivers: Drivers) -> str | None:
    """The backend that `--gpu` asks for; None: no module. Asked by name, it may be for another machine."""
    if asked == "auto":
        return next((backend for backend in BACKENDS if drivers.of(backend)), None)
    return None if asked == "none" else asked


def plan_module(backend: str, drivers: Drivers, compiler: Compiler) -> ModuleOptions:
    """The options for the GPUs that are here. Raises BuildError that says what is missing."""
    if compiler.is_zig:
        raise BuildError("a GPU module needs gcc or clang (Debian: apt install g++)")
    if backend == "vulkan":
        return ModuleOptions(backend, compiler, _find_glslc(compiler))
    gpus = drivers.of("cuda")
    asked = os.environ.get("CUDAARCHS", "")  # CMake's own variable
    named = re.findall(r"\d+", asked) or [gpu.architecture for gpu in gpus]
    if not named:
        why = "".join(f" ({problem})" for problem in drivers.problems)
        raise BuildError(
            f"--gpu cuda: the NVIDIA driver reports no GPU here{why}; to build for another machine, set "
            "CUDAARCHS to the compute capability of its GPU, such as 90"
        )
    return ModuleOptions(backend, compiler, _find_nvcc(gpus), tuple(sorted(set(named))))


def _find_nvcc(gpus: tuple[Gpu, ...]) -> Path:
    """CUDA's compiler, from $CUDA_HOME, PATH or its usual folder; not one that is too new for the driver."""
    home = os.environ.get("CUDA_HOME")
    folders = [f"{home}/bin" if home else "", os.environ.get("PATH", ""), NVCC_FOLDER]
    found = shutil.which("nvcc", path=os.pathsep.join(filter(None, folders)))
    here = f"{gpus[0].name} ({gpus[0].driver}) is here, but " if gpus else ""
    if found is None:
        raise BuildError(
            f"{here}CUDA's compiler is missing: no nvcc in $CUDA_HOME/bin, PATH or {NVCC_FOLDER}; "
            "install the CUDA toolkit (NVIDIA's cuda-toolkit, Debian's nvidia-cuda-toolkit)"
        )
    output = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"release (\d+)\.", output)
    supported = re.search(r"CUDA (\d+)\.", gpus[0].driver) if gpus else None
    if version and supported and int(version[1]) > int(supported[1]):
        raise BuildError(
            f"{here}its driver runs programs of CUDA {supported[1]} and older, and {found} is of "
            f"CUDA {version[1]}: update the driver, or set CUDA_HOME to an older toolkit"
        )
    return Path(found)


def _toolkit(nvcc: Path) -> Path:
    """CUDA's folder, by nvcc's own word: what is in PATH may be a script that starts it."""
    command = [str(nvcc), "--dryrun", "-E", "-x", "cu", os.devnull]
    output = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    found = re.search(r"_HERE_=(\S+)", output)
    return (Path(found[1]) if found else nvcc.resolve().parent).parent


def _find_glslc(compiler: Compiler) -> Path:
    """Vulkan's shader compiler; its headers must be there too."""
    found = shutil.which("glslc")
    missing = ["the program glslc"] if found is None else []
    missing += [f"the header {name}" for name in _VULKAN_HEADERS if not has_header(compiler, name)]
    if found is None or missing:
        raise BuildError(
            f"a module for Vulkan needs {', '.join(missing)} "
            "(Debian: apt install glslc libvulkan-dev spirv-headers)"
        )
    return Path(found)


# libmtmd ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MediaOptions:
    """Options of a build of libmtmd against the library in a folder."""

    compiler: Compiler
    library: Path
    target = MEDIA_TARGET
    project = MEDIA_PROJECT

    @property
    def key(self) -> str:
        """The name of its folder: without the CPU's features, which it does not use."""
        return f"{BINDINGS_VERSION}-{machine()}-media-{digest([self.compiler.identity, media_revision()])}"

    def cmake_arguments(self) -> list[str]:
        """CMake's arguments without the folders of the source and the build."""
        compilers = (("C", self.compiler.c), ("CXX", self.compiler.cxx))
        return [
            *OPTIONS["media"],
            *(f"-DCMAKE_{language}_COMPILER={';'.join(command)}" for language, command in compilers),
            f"-DLIBRARIES={self.library}",
            f"-DSUFFIX=.{_SUFFIX}",
        ]

    def info(self) -> dict[str, Any]:
        """The part of its `build.json` that says what it is."""
        return {**_wanted_media(), "compiler": self.compiler.identity}

    def __str__(self) -> str:
        return f"libmtmd for pictures and sound, {self.compiler.identity}"


def media_revision() -> str:
    """A digest of the options: an older build with other ones is not loaded."""
    return digest([*OPTIONS["media"], (MEDIA_PROJECT / "CMakeLists.txt").read_text(encoding="utf-8")])


def find_media(library: Path) -> Path | None:
    """The libmtmd for the library in a folder: beside it, with its programs, or of `cllm build --media`."""
    name = f"lib{MEDIA_TARGET}.{_SUFFIX}"
    folders = (library, library / "bin", *find_builds(_wanted_media()))
    return next((folder / name for folder in folders if (folder / name).exists()), None)


def _wanted_media() -> dict[str, Any]:
    return {"version": BINDINGS_VERSION, "machine": machine(), "media": media_revision()}
