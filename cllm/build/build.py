"""The native build: llama.cpp compiled into a library for this machine, once.

    python -m cllm.build.build [--force] [--compiler gcc|clang|zig] [--portable | --variants]
                                   [--with-server] [--gpu auto] [--media]

Only what is loaded is built (libllama, and ggml for the CPU), with the flags that this CPU and compiler
need. A finished build is the folder `CACHE/native/<key>/`: the libraries side by side and a `build.json`.
With `--gpu` a module for the GPU is built beside it, with `--media` libmtmd for models that take pictures or
sound (`cllm.build.module`).
Standard library only: this runs before the dependencies are installed.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from cllm.build import module, options, toolchain
from cllm.build.gpus import find_gpus
from cllm.build.module import MediaOptions, ModuleOptions
from cllm.build.options import LEFT_OUT_VARIANTS, SERVER_PROGRAMS, BuildOptions
from cllm.build.toolchain import BuildError, cache_directory, log

SAMPLING_SOURCE = Path(__file__).with_name("sampling.c")
SAMPLING_NAME = "libcllm-sampling.so"  # in a folder of a library for every CPU
MEMBERS_SOURCE = Path(__file__).with_name("members.cpp")
MEMBERS_NAME = "libcllm-members.so"  # beside the library, whose layout of a context it was compiled for
KERNEL_SOURCES = tuple(
    Path(__file__).with_name(f"{name}.cpp") for name in ("kernels", "attention", "products")
)
KERNELS_NAME = "libcllm-kernels.so"  # likewise: for its CPU, and the classes of its backend
_NINJA_STEP = re.compile(r"\[(\d+)/(\d+)\] (.*)")


def find_built() -> Path | None:
    """Return the folder of the newest finished build that suits this CPU, whichever compiler made it."""
    return next(iter(options.find_builds(_suitable())), None)


def _build(arguments: Namespace, force: bool) -> Path:
    """Try one set of build options after the other; a finished build of one is reused."""
    tools = cache_directory() / "tools"
    failures: list[str] = []
    with _lock():
        for options in _candidates(arguments, tools, failures):
            target = cache_directory() / "native" / options.key
            if _is_finished(target, force, arguments.programs):
                return target
            needed = _Tools.find()  # no build succeeds without these, so their errors end the search
            log(f"building llama.cpp: {options}")
            work = _work_folder(options.key, force, alone=not options.variants)
            settings = options.cmake_arguments(work, bool(arguments.programs))
            targets, jobs = ["llama", *arguments.programs], arguments.jobs or toolchain.default_jobs()
            try:
                when = needed.compile(work, settings, targets, jobs)
                _install(work / "bin", target, {**_info(options, arguments), **when})
                if options.variants:
                    shutil.rmtree(work)
                return target
            except BuildError as error:
                failures.append(f"{options}: {error}")
                if target.exists():
                    break  # these options have built the library before, so others would not do better
                log(f"that failed ({options})")
    raise BuildError("llama.cpp could not be built. What was tried:\n" + "\n".join(failures))


def _candidates(arguments: Namespace, tools: Path, failures: list[str]) -> Iterator[BuildOptions]:
    """Build options to try: native, portable, another compiler. Each is made when its turn comes."""
    compiler = toolchain.find_compiler(tools, arguments.compiler)
    if arguments.variants:
        if not compiler.identity.startswith("gcc"):
            raise BuildError(f"--variants needs gcc, not {compiler.identity} (Debian: apt install g++)")
        yield BuildOptions(compiler, variants=True)
        return
    if not arguments.portable:
        yield BuildOptions(compiler)
    yield BuildOptions(compiler, portable=True)
    if arguments.compiler is None and not compiler.is_zig:
        try:
            zig = toolchain.find_compiler(tools, "zig")
        except BuildError as error:
            failures.append(str(error))
        else:
            yield BuildOptions(zig, arguments.portable)


def _plan(arguments: Namespace) -> ModuleOptions | None:
    """The GPU module to build, before anything is built. Raises BuildError that says what is missing."""
    if arguments.gpu == "none":
        return None
    drivers = find_gpus()
    if (backend := module.choose_backend(arguments.gpu, drivers)) is None:
        why = "".join(f" ({problem})" for problem in drivers.problems)
        log(f"no GPU here by the drivers of CUDA and Vulkan{why}: only the library for the CPU is built")
        return None
    compiler = toolchain.find_compiler(cache_directory() / "tools", arguments.compiler)
    return module.plan_module(backend, drivers, compiler)


def build_media(library: Path, compiler: str | None = None, *, jobs: int = 0, force: bool = False) -> Path:
    """Build libmtmd for the library in a folder, unless it is there; returns its path. Raises BuildError."""
    if not force and (found := module.find_media(library)) is not None:
        return found
    chosen = MediaOptions(toolchain.find_compiler(cache_directory() / "tools", compiler), library)
    duration = "about a minute on two cores, once"
    target = _build_beside(chosen, jobs or toolchain.default_jobs(), duration, force=force)
    return next(target.glob(f"lib{module.MEDIA_TARGET}.*"))


def _build_beside(options: ModuleOptions | MediaOptions, jobs: int, duration: str, *, force: bool) -> Path:
    """Build what is loaded beside the library, unless it is there. Its objects are of no more use."""
    target = cache_directory() / "native" / options.key
    with _lock():
        if _is_finished(target, force):
            return target
        tools = _Tools.find()
        log(f"building {options}: {duration}")
        work = _work_folder(options.key, force)
        try:
            when = tools.compile(work, options.cmake_arguments(), [options.target], jobs, options.project)
        except BuildError as error:
            hint = "; the CUDA toolkit lacks cuBLAS" if "CUDA::cublas" in str(error) else ""
            raise BuildError(f"{options} could not be built{hint}:\n{error}") from error
        _install(work / "bin", target, {**options.info(), **when}, options.target)
        shutil.rmtree(work)
    return target


def _work_folder(key: str, force: bool, *, alone: bool = False) -> Path:
    """The build's folder for objects, which a stopped build leaves. `alone`: older builds' are removed.

    The library's are kept when it is finished, for --with-server.
    """
    work = cache_directory() / "work" / key
    for folder in work.parent.glob("*"):
        if folder == work:
            if force or not _made_here(folder):
                shutil.rmtree(folder)
        elif alone:
            shutil.rmtree(folder)
    work.mkdir(parents=True, exist_ok=True)
    return work


class _Tools(NamedTuple):
    """Tools of every build beside a compiler. The caller holds the build lock."""

    source: Path
    cmake: Path
    ninja: Path

    @classmethod
    def find(cls) -> Self:
        """Download what is missing. Raises BuildError."""
        tools = cache_directory() / "tools"
        return cls(toolchain.fetch_source(), toolchain.find_cmake(tools), toolchain.find_ninja(tools))

    def compile(
        self, work: Path, settings: list[str], targets: list[str], jobs: int, project: Path | None = None
    ) -> dict[str, Any]:
        """Run CMake and Ninja; returns date and duration. Raises BuildError with the end of their output.

        `project` replaces llama.cpp's own, whose folder it has as SOURCE.
        """
        started = time.monotonic()
        source = self.source / "vendor" / "llama.cpp"
        command = [str(self.cmake), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={self.ninja}"]
        command += ["-S", str(project or source), "-B", str(work), *settings]
        command += [f"-DSOURCE={source}"] if project else []
        code, output = toolchain.run_command(command)
        if code != 0:
            raise BuildError(f"CMake refused:\n{toolchain.last_lines(output)}")
        _run_ninja([str(self.ninja), "-C", str(work), "-j", str(jobs), *targets])
        for name in LEFT_OUT_VARIANTS:
            (work / "bin" / f"libggml-cpu-{name}.so").unlink(missing_ok=True)
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return {"seconds": round(time.monotonic() - started, 1), "date": date}


def _made_here(work: Path) -> bool:
    """False for a folder that was copied or moved: CMake would refuse its cache."""
    cache = work / "CMakeCache.txt"
    return not cache.exists() or f"CMAKE_CACHEFILE_DIR:INTERNAL={work}\n" in cache.read_text(errors="replace")


def _run_ninja(command: list[str]) -> None:
    """Build, and report each step. Raises BuildError with the end of the compiler's output."""
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
    output: list[str] = []
    largest = 0
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            if (step := _NINJA_STEP.match(line)) is None:
                output.append(line)
                continue
            done, total = int(step[1]), int(step[2])
            largest = max(largest, total)
            if done and total > largest // 2:  # not a step of a smaller build inside this one
                _report(done, total, step[3].rpartition("/")[2].removesuffix(".o"))
    if process.returncode != 0:
        shown = toolchain.last_lines("".join(output))
        raise BuildError(f"Ninja ended with code {process.returncode}:\n{shown}")


def _install(built: Path, target: Path, info: dict[str, Any], needed: str = "llama") -> None:
    """Copy the result beside `target` and rename, so that a folder that has the name is complete.

    Of a GPU module's build only the module is copied: ggml's core is the library's own.
    """
    pattern = r"lib(llama|ggml[\w-]*)\." if needed == "llama" else rf"lib{needed}\."
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as scratch:
        stage = Path(scratch, "stage")
        (stage / "bin").mkdir(parents=True)
        for file in built.iterdir():
            core = re.match(pattern, file.name) is not None
            others = needed == "llama" and (file.name.startswith("lib") or file.name in SERVER_PROGRAMS)
            if core or others:
                shutil.copy2(file, (stage if core else stage / "bin") / file.name, follow_symlinks=False)
        if not list(stage.glob(f"lib{needed}.*")):
            raise BuildError(f"Ninja left no lib{needed} in {built}")
        (stage / "build.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
        if target.exists():
            target.rename(Path(scratch, "old"))
        stage.rename(target)


def sampling_path() -> Path:
    """Return the path of sampling in C, compiled for its source and this CPU; where it is, if it is there."""
    source = SAMPLING_SOURCE.read_text(encoding="utf-8")
    key = options.digest([source, options.machine(), *options.features()])
    paths = [each / "native" / f"libcllm-sampling-{key}.so" for each in toolchain.cache_directories()]
    return next((path for path in paths if path.exists()), paths[0])


def compile_sampling(compiler: str | None = None, folder: Path | None = None) -> None:
    """Compile sampling in C, once: for this CPU, or into a `folder` for every CPU of its architecture.

    If it fails a line is printed, and NumPy samples.
    """
    path = sampling_path() if folder is None else folder / SAMPLING_NAME
    if path.exists():
        return
    new = path.with_suffix(".new")
    path.parent.mkdir(parents=True, exist_ok=True)
    found = toolchain.find_compiler(cache_directory() / "tools", compiler)
    for target in (("-march=native",), ("-mcpu=native",), ()) if folder is None else (("-Wl,--strip-all",),):
        flags = ("-O3", *target, "-shared", "-fPIC", "-pthread")
        code, output = toolchain.run_command([*found.c, *flags, str(SAMPLING_SOURCE), "-o", str(new)])
        if code == 0:
            new.replace(path)
            return
    log(f"sampling in C could not be compiled, so sampling is slower: {output.strip()}")


def compile_beside(library: Path, compiler: str | None = None) -> None:
    """Compile what belongs to this very library, once: members.cpp, and kernels for its CPU.

    If one fails a line is printed, and llama.cpp is used as it is.
    """
    try:
        info = json.loads((library / "build.json").read_text(encoding="utf-8"))
    except OSError:
        return
    native = info["flags"] if info["portable"] else ["-march=native", *info["flags"]]
    variants = info.get("variants")
    wanted = {MEMBERS_NAME: ([MEMBERS_SOURCE], ["-O2", *(["-static-libstdc++"] if variants else [])])}
    if not variants:  # one backend for each CPU, which hides what kernels are appended to
        wanted[KERNELS_NAME] = [*KERNEL_SOURCES], ["-O3", *native]
    files = (library / f"lib{name}.so" for name in ("llama", "ggml-cpu", "ggml-base"))
    linked = [*(str(file) for file in files if file.exists()), "-Wl,-rpath,$ORIGIN"]
    for name, (sources, flags) in wanted.items():
        path, new = library / name, library / f"{name}.new"
        newest = max(each.stat().st_mtime for each in (*sources, *sources[0].parent.glob("*.hpp")))
        if path.exists() and path.stat().st_mtime >= newest:
            continue
        found = toolchain.find_compiler(cache_directory() / "tools", compiler)
        with _lock():
            root = toolchain.fetch_source() / "vendor" / "llama.cpp"
        headers = ("src", "include", "ggml/include", "ggml/src", "ggml/src/ggml-cpu")
        command = [*found.cxx, "-std=c++17", "-shared", "-fPIC", *(f"-I{root / each}" for each in headers)]
        code, output = toolchain.run_command([*command, *map(str, sources), *flags, *linked, "-o", str(new)])
        if code == 0:
            new.replace(path)
        else:
            log(f"{name} could not be compiled, so some things take longer: {output.strip()}")


def _is_finished(target: Path, force: bool, programs: tuple[str, ...] = ()) -> bool:
    """Return True for a build that can be reused; it becomes the newest, which `find_builds` puts first."""
    files = (target / "build.json", *(target / "bin" / name for name in programs))
    if force or not all(file.exists() for file in files):
        return False
    files[0].touch()
    return True


def _suitable() -> dict[str, Any]:
    """The part of `build.json` that must match for a build to be loaded here."""
    return {
        "version": toolchain.BINDINGS_VERSION,
        "machine": options.machine(),
        "cpu_features": list(options.features()),
        "recipe": options.revision(),  # the build options; the key stays, so that finished builds are found
    }


def _info(options: BuildOptions, arguments: Namespace) -> dict[str, Any]:
    info = {
        **_suitable(),
        "compiler": options.compiler.identity,
        "flags": list(options.flags),
        "portable": options.portable,
        "with_server": bool(arguments.programs),
    }
    if options.variants:  # for any CPU; so `find_built` does not take it for the build for this one
        del info["cpu_features"]
        info["variants"] = True
    return info


def _lock() -> AbstractContextManager[None]:
    """Hold the build lock."""
    report = partial(log, "another process is building; waiting for it")
    return toolchain.locked(cache_directory() / "build.lock", report)


def _report(done: int, total: int, what: str) -> None:
    """Progress: on a terminal one line that is overwritten, else a line at each tenth."""
    text = f"{done * 100 // total:3d} %  {done}/{total}  {what}"
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r\x1b[K{text[:width]}" + ("\r\x1b[K" if done == total else ""))
        sys.stderr.flush()
    elif done * 10 // total != (done - 1) * 10 // total:
        log(text)


def main(arguments: list[str] | None = None, prog: str = "python -m cllm.build.build") -> int:
    """Run the command line: progress on stderr, the folder on stdout."""
    parser = ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    option, switch = parser.add_argument, partial(parser.add_argument, action="store_true")
    switch("--force", help="build again even if a build is there; with --gpu, the module")
    gpu = "also a module for the GPU; auto: the one that is here (default: none)"
    option("--gpu", choices=module.GPU_CHOICES, default="none", help=gpu)
    option("--compiler", choices=toolchain.COMPILERS, help="this one and no other")
    switch("--portable", help="no flags for this CPU: slower, safe")
    variants = "for every CPU of this architecture, as in the package cllm-native; used by CLLM_LIBRARY alone"
    switch("--variants", help=variants)
    option("--jobs", type=int, help="compilers at a time (default: one per core)")
    programs = partial(option, action="store_const", dest="programs", const=SERVER_PROGRAMS, default=())
    programs("--with-server", help="also llama-server and llama-bench, into bin/")
    switch("--media", help="also libmtmd, for models that take pictures or sound")
    switch("--fetch", help="only unpack the source; prints its folder")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.fetch:
            with _lock():
                print(toolchain.fetch_source())
            return 0
        plan = _plan(chosen)  # what is missing is said before minutes are spent
        force = chosen.force and plan is None
        special = force or chosen.compiler or chosen.portable or chosen.programs or chosen.variants
        built = (None if special else find_built()) or _build(chosen, force)
        print(built, flush=True)
        if not chosen.portable:
            compile_sampling(chosen.compiler, built if chosen.variants else None)
        compile_beside(built, chosen.compiler)
        if plan is not None:
            jobs = chosen.jobs or toolchain.default_jobs(module.BYTES_PER_JOB[plan.backend])
            print(_build_beside(plan, jobs, module.describe_time(plan.backend, jobs), force=chosen.force))
        if chosen.media:
            print(build_media(built, chosen.compiler, jobs=chosen.jobs or 0, force=chosen.force).parent)
    except BuildError as error:
        log(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        log("stopped; the next build goes on from here")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
