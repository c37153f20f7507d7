"""AddressSanitizer: llama.cpp and cllm's own C, instrumented, by cllm's calls.

Both are built once more, instrumented, into `build/asan` (some minutes, once). The contract tests run on
them: isolation, sharing, preemption, checkpoints, moves, drafts, saved states, samplers. Then requests run in
blocks on tiny models, with preemption, caches and checkpoints: what is allocated must not grow with them.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cllm.build.build import SAMPLING_SOURCE, _Tools, sampling_path
from cllm.build.options import BuildOptions
from cllm.build.toolchain import Compiler, cache_directory, default_jobs, find_compiler
from cllm.config import EngineConfig
from cllm.core.engine_core import EngineCore
from cllm.messages import Report, Submit
from cllm.types import Prompt, Request, SamplingParams
from proof.command import ROOT, make_parser
from proof.evidence import Bar, Evidence, Series, record, theil_sen
from tests.driver.engine import prepare_at_once
from tests.driver.kinds import DENSE, HYBRID, SLIDING, Kind, open_runner
from tests.tiny_architectures import make_all

FOLDER = ROOT / "build" / "asan"
LIBRARY = FOLDER / "library" / "bin"
LOGS = FOLDER / "log"
CACHE = dict.fromkeys(("CLLM_CACHE_DIR", "XDG_CACHE_HOME"), str(FOLDER / "cache"))  # no other is looked into
FLAGS = ("-fsanitize=address", "-fno-omit-frame-pointer", "-g")
KINDS = {"dense": Kind("dense", unified=True), "hybrid": HYBRID, "sliding": SLIDING, "split": DENSE}
BLOCKS, BLOCK = 12, 100  # requests
WARM_UP = 4  # blocks
MAX_GROWTH = 64  # bytes a request: less than any leak of a struct, more than the noise
CONTRACT_LIMIT_S = 1800
# Contracts about time, and about resident memory: instrumented code takes more, and frees later.
LEFT_OUT = ("test_flat_cost.py",)
LEFT_OUT_TESTS = ("memory_stays_flat", "what_the_processes_hold", "leave_nothing_behind")


def build() -> None:
    """The instrumented library, unless it is there."""
    compiler = find_compiler(cache_directory() / "tools", "gcc")
    work = LIBRARY.parent
    if not (LIBRARY / "libllama.so").exists():
        work.mkdir(parents=True, exist_ok=True)
        settings = BuildOptions(compiler).cmake_arguments(work, False)
        settings += ("-DGGML_SANITIZE_ADDRESS=ON", "-DLLAMA_SANITIZE_ADDRESS=ON")
        _Tools.find().compile(work, settings, ["llama"], default_jobs())
    os.environ |= CACHE
    sampling = sampling_path()
    sampling.parent.mkdir(parents=True, exist_ok=True)
    options = ("-O1", *FLAGS, "-shared", "-fPIC", "-pthread")
    subprocess.run([*compiler.c, *options, str(SAMPLING_SOURCE), "-o", str(sampling)], check=True)


def make_environment(compiler: Compiler) -> dict[str, str]:
    """Python itself is not instrumented, so the sanitizer is loaded before it."""
    preloaded = []
    for name in ("libasan.so", "libstdc++.so.6"):
        command = [*compiler.c, f"-print-file-name={name}"]
        preloaded.append(
            subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        )
    options = ("detect_leaks=0", "halt_on_error=1", f"log_path={LOGS}/asan")
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(preloaded),
        "ASAN_OPTIONS": ":".join(options),
        "CLLM_LIBRARY": str(LIBRARY),
        **CACHE,
        "PYTHONPATH": str(ROOT),
    }


def run_contracts(environment: dict[str, str]) -> tuple[int, int, float]:
    """How many contract tests passed, how many failed, and the seconds."""
    began = time.monotonic()
    ignored = [f"--ignore=tests/contract/{name}" for name in LEFT_OUT]
    command = [sys.executable, "-m", "pytest", "-v", "-n", str(default_jobs()), "-p", "no:cacheprovider"]
    command += ["--timeout=600", "tests/contract", *ignored, "-k", f"not ({' or '.join(LEFT_OUT_TESTS)})"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=CONTRACT_LIMIT_S
    )
    print("\n".join(done.stdout.splitlines()[-15:]), flush=True)
    passed = re.search(r"(\d+) passed", done.stdout)
    failed = sum(int(count) for count in re.findall(r"(\d+) (?:failed|error)", done.stdout))
    return int(passed[1]) if passed else 0, failed, time.monotonic() - began


def grow(name: str) -> None:
    """In an instrumented process: print what is allocated after each block of requests."""
    allocated = ctypes.CDLL(None).__sanitizer_get_current_allocated_bytes
    allocated.restype = ctypes.c_size_t
    with tempfile.TemporaryDirectory() as folder:
        runner = open_runner(make_all(Path(folder)), KINDS[name], sequences=4, cells=900)
        config = EngineConfig(threads=1, swap_space_mb=4, cache_ram_mb=1)
        ended: list[Report] = []

        def take(report: Report) -> None:
            ended[:] = [report]  # nothing is kept

        core = EngineCore(runner, config, take, preparation=prepare_at_once)
        draw = random.Random(name)
        shared = [draw.randrange(300) for _ in range(96)]
        sizes = []
        for block in range(BLOCKS):
            for number in range(BLOCK):
                prompt = (*shared[: draw.randrange(96)], *(draw.randrange(300) for _ in range(60)))
                sampling = SamplingParams(temperature=0.8 * (number % 2), seed=number, ignore_eos=True)
                request = Request(
                    id=f"{block}-{number}",
                    prompt=Prompt(prompt),
                    max_tokens=draw.randrange(4, 90),
                    sampling=sampling,
                )
                core._handle(Submit(request))
                while len(core.scheduler.running) > 3 or (number == BLOCK - 1 and not core.idle):
                    core.step()
            core.scheduler.check_idle()
            gc.collect()
            sizes.append(allocated())
        print(msgspec.json.encode(sizes).decode())
        core.preparation.close()
        runner.close()


def slope(sizes: Sequence[int]) -> float:
    """Bytes a request, over the blocks after those that fill caches."""
    return theil_sen(list(enumerate(sizes))[WARM_UP:]) / BLOCK


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--grow", choices=KINDS, help="the instrumented process")
    options = parser.parse_args(arguments)
    if options.grow:
        grow(options.grow)
        return 0
    environment = make_environment(find_compiler(cache_directory() / "tools", "gcc"))
    build()
    LOGS.mkdir(exist_ok=True)
    for log in LOGS.iterdir():
        log.unlink()
    sizes = {}
    for name in KINDS:
        command = [sys.executable, "-m", "proof", "sanitizer", "--grow", name]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
        sizes[name] = msgspec.json.decode(done.stdout, type=list[int]) if not done.returncode else []
        print(name, sizes[name] or done.stderr[-3000:], flush=True)
    passed, failed, seconds = run_contracts(environment)
    found = [log.read_text(errors="replace").splitlines()[:3] for log in sorted(LOGS.iterdir())]
    slopes = {name: slope(each) if each else float("inf") for name, each in sizes.items()}
    requests = BLOCK * (BLOCKS - WARM_UP)
    limit = f"≤ {MAX_GROWTH} bytes each"
    bars = [
        Bar("invalid accesses", "0", f"{len(found)}", not found),
        Bar("contract tests that fail", "0", f"{failed} of {passed + failed}", passed > 0 and not failed),
        *(
            Bar(f"{name}: growth over {requests} requests", limit, f"{each:.1f}", each <= MAX_GROWTH)
            for name, each in slopes.items()
        ),
    ]
    series = []
    for name, each in sizes.items():
        x = [BLOCK * (number + 1) for number in range(len(each))]
        series.append(Series(f"{name}: allocated", "MiB", [size / 2**20 for size in each], "requests", x))
    return record(
        Evidence(
            name="sanitizer",
            order=70,
            title="AddressSanitizer",
            about="llama.cpp and cllm's own C, instrumented. The contract tests on them; and blocks of "
            "requests on tiny models (unified KV with too few cells, so that requests are preempted; hybrid "
            "with checkpoints; sliding window; split KV), sampled and greedy, sharing prefixes, cached in "
            "slots and in RAM: the bytes that are allocated after each block.",
            bars=bars,
            figures={"contract tests": passed, "their seconds": round(seconds), "first reports": found[:2]},
            series=series,
        )
    )
