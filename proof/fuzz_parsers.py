"""Coverage-guided fuzzing, by atheris, of all that reads hostile bytes.

atheris is installed in `build/atheris` (where PyPI has no wheel for this CPU it is built, which takes clang
and its runtime: `apt install clang libclang-rt-14-dev`). Each target runs in a process of its own, for
`--seconds`, and goes on from the inputs that earlier runs found in `build/fuzz-parsers`.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from proof.command import ROOT, make_parser
from proof.evidence import Bar, Evidence, record
from tests.driver.server import environment

VERSION = "3.0.0" if sys.version_info < (3, 12) else "3.1.0"
PACKAGES = ROOT / "build" / "atheris"
KEPT = ROOT / "build" / "fuzz-parsers"
NAMES = ("gguf", "detokenizer", "calls", "grammar", "hub")
SECONDS = 600
MAX_BYTES = {"gguf": 16384, "hub": 512}
INPUT_LIMIT_S = 10  # one input may take so long
MEMORY_MB = 4096
# Findings that were mended, each with the test that fails without the mend.
MENDED = (
    "A whole number beyond 2^53 in an `enum` or `const`, also one written as 1e30, became another one, and "
    "-2^63 ended the process by SIGSEGV in llguidance "
    "(`test_a_number_that_cannot_be_written_exactly_is_refused`).",
    "A number as a model's `general.size_label` raised TypeError where models are surveyed "
    "(`test_a_size_label_that_is_no_text_is_left_out`).",
    "A tool name or an id farther away than its limit was accepted or not by how the text was split "
    "(`test_what_is_too_far_away_does_not_depend_on_the_pieces`).",
    "A hub's listing of another shape, of 2,000 nested lists, or with half of a surrogate pair in a path "
    "raised other errors than HubError (`test_a_listing_of_another_shape_is_a_hub_error`).",
)


class TargetResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one target."""

    name: str
    seconds: float
    executions: int
    coverage: int  # edges that were reached
    found: str = ""  # the input that failed, in hexadecimal, and how it did


def install() -> None:
    """atheris into `build/atheris`; built from source where there is no wheel."""
    if (PACKAGES / "atheris").exists():
        return
    variables = {**os.environ}
    runtime = sorted(
        Path("/usr/lib").glob(f"llvm-*/lib/clang/*/lib/linux/*fuzzer_no_main-{platform.machine()}.a")
    )
    if clang := shutil.which("clang"):
        variables |= {"CLANG_BIN": clang} | ({"LIBFUZZER_LIB": str(runtime[-1])} if runtime else {})
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*command, "--target", str(PACKAGES), f"atheris=={VERSION}"], env=variables, check=True)


def run_target(name: str, seconds: int) -> TargetResult:
    """One target, in a process of its own."""
    (KEPT / name).mkdir(parents=True, exist_ok=True)
    failures = KEPT / "failures"
    failures.mkdir(exist_ok=True)
    for earlier in failures.glob(f"{name}-*"):
        earlier.unlink()
    command = [sys.executable, "-m", "proof", "fuzz-parsers", "--child", name, str(KEPT / name)]
    command += [f"-max_total_time={seconds}", "-seed=1", f"-artifact_prefix={failures}/{name}-"]
    command += [f"-max_len={MAX_BYTES.get(name, 256)}", f"-timeout={INPUT_LIMIT_S}", "-print_final_stats=1"]
    command += [f"-rss_limit_mb={MEMORY_MB}", "-len_control=20"]
    variables = environment(PYTHONPATH=f"{PACKAGES}{os.pathsep}{ROOT}")
    log = KEPT / f"{name}.log"
    began = time.monotonic()
    with log.open("w") as output:
        done = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            timeout=seconds + 300,
        )
    text = log.read_text(errors="replace")
    units = re.findall(r"stat::number_of_executed_units: (\d+)", text) or re.findall(r"^#(\d+)\t", text, re.M)
    edges = re.findall(r"cov: (\d+)", text)
    if done.returncode:
        print("\n".join(text.splitlines()[-40:]))
    inputs = [f"{path.name} {path.read_bytes().hex()}" for path in failures.glob(f"{name}-*")]
    return TargetResult(
        name=name,
        seconds=time.monotonic() - began,
        executions=int(units[-1]) if units else 0,
        coverage=int(edges[-1]) if edges else 0,
        found=" ".join([f"exit code {done.returncode}", *inputs]) if done.returncode else "",
    )


def run_child(name: str, arguments: Sequence[str]) -> None:
    """The fuzzer's own process; libFuzzer ends it."""
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["cllm"]):
        targets = importlib.import_module("proof.shared.fuzz_targets").TARGETS
    target = targets[name]
    folder = Path(arguments[0])
    for seed in target.seeds():
        (folder / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    atheris.Setup([sys.argv[0], *arguments], target.run)
    atheris.Fuzz()


def make_evidence(results: Sequence[TargetResult]) -> Evidence:
    """The row of the proof."""
    targets = importlib.import_module("proof.shared.fuzz_targets").TARGETS
    bars = []
    for result in results:
        shown = f"{result.executions:,} inputs in {result.seconds:.0f} s, {result.coverage:,} edges"
        bars.append(
            Bar(
                targets[result.name].title,
                f"no failure in {SECONDS} s",
                shown + (f"; failed: {result.found[:80]}" if result.found else "; none"),
                not result.found and result.seconds >= SECONDS,
            )
        )
    return Evidence(
        name="fuzz-parsers",
        order=62,
        title="What reads hostile bytes, by coverage",
        about=(
            f"atheris {VERSION} (libFuzzer) on Python's own coverage of `cllm`. Properties: a GGUF header "
            "is refused with a clear error or all its tensors lie in the file; a text and its stop string, "
            "and the reasoning, content and calls of an answer, do not depend on how the bytes are split; a "
            "schema or grammar is refused with a documented error, or random answers under it are complete "
            "and validate; a hub's answer is an error or a listing that stays in its folder."
        ),
        bars=bars,
        figures={
            "inputs": sum(result.executions for result in results),
            "seconds": round(sum(result.seconds for result in results)),
        },
        mended=MENDED,
    )


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--child"]:
        run_child(arguments[1], arguments[2:])
        return 0
    parser = make_parser(
        __name__,
        __doc__,
        seconds=(SECONDS, "for each target"),
        targets=(os.cpu_count() or 1, "at a time"),
    )
    parser.add_argument("--only", choices=NAMES, help="one target; nothing is recorded")
    options = parser.parse_args(arguments)
    install()
    results = []
    with ThreadPoolExecutor(options.targets) as pool:
        run = partial(run_target, seconds=options.seconds)
        for result in pool.map(run, [options.only] if options.only else NAMES):
            results.append(result)
            print(msgspec.json.encode(result).decode(), flush=True)
    if options.only:
        return int(any(result.found for result in results))
    return record(make_evidence(results))
