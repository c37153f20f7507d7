"""A cluster without Ray: replicas as processes of their own, which gateways find in a folder.

`python -m tests.driver.cluster replica FOLDER SETTINGS` runs a replica until SIGTERM, which drains it; with
the arguments of a worker it is the cluster worker of a gateway. `FolderCluster` starts replicas. With the
variable `TEST_CLUSTER` every `Server` of the tests has two replicas for an engine (`replace_engines`).
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec

from cllm.cluster.cluster_worker import main as run_worker
from cllm.cluster.link import ReplicaAddress
from cllm.cluster.replica import ReplicaServer, ReplicaSettings
from cllm.config import ClusterConfig, EngineConfig
from cllm.process import configure_logging
from cllm.workers.executor import ProcessExecutor
from cllm.workers.supervisor import WORKER_MODULE
from tests.driver.server import wait_for

MODEL = "scripted"
REPLICAS = 2


class FolderDirectory:
    """Entries are files."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def put(self, model: str, address: ReplicaAddress) -> None:
        new = self._folder / f".{address.replica}"
        new.write_bytes(msgspec.msgpack.encode(address))
        new.rename(self._folder / f"{model}.{address.replica}")

    def remove(self, model: str, replica: str) -> None:
        (self._folder / f"{model}.{replica}").unlink(missing_ok=True)

    def list(self, model: str) -> list[ReplicaAddress]:
        found = []
        for path in self._folder.glob(f"{model}.*"):
            with contextlib.suppress(FileNotFoundError):
                found.append(msgspec.msgpack.decode(path.read_bytes(), type=ReplicaAddress))
        return found


class FolderCluster:
    """Replicas of the scripted model, as processes."""

    def __init__(self, folder: Path, *, step_ms: float = 5.0, parallel: int = 16) -> None:
        self.folder = folder
        folder.mkdir()
        engine = EngineConfig(
            model=str(step_ms), parallel=parallel, ctx_size=1024 * parallel, batch_tokens=512, draft_tokens=0
        )
        self.settings = ReplicaSettings(name=MODEL, engine=engine, module="cllm.testing", drain_s=5.0)
        self.replicas: list[subprocess.Popen[bytes]] = []

    def start(self, settings: ReplicaSettings | None = None) -> subprocess.Popen[bytes]:
        encoded = base64.b64encode(msgspec.msgpack.encode(settings or self.settings)).decode()
        command = [sys.executable, "-m", __name__, "replica", str(self.folder), encoded]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self.replicas.append(process)
        return process

    def wait(self, count: int) -> None:
        """Until so many are in the directory."""
        wait_for(lambda: len(FolderDirectory(str(self.folder)).list(MODEL)) >= count, 60)

    def __enter__(self) -> FolderCluster:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.replicas:
            process.kill()
            process.wait(10)
            assert process.stdin is not None
            process.stdin.close()


def replace_engines(replicas: int = REPLICAS) -> None:
    """In the process of a server: replicas compute, which share the slots and cells of the engine."""
    make, start, stop = ProcessExecutor.__init__, ProcessExecutor.start, ProcessExecutor.stop
    clusters: dict[ProcessExecutor, FolderCluster] = {}

    def make_gateway(self: ProcessExecutor, config: EngineConfig, **named: Any) -> None:
        cluster = clusters[self] = FolderCluster(Path(tempfile.mkdtemp(), "directory"))
        module = named.get("module", WORKER_MODULE)
        halves = {
            name: max(1, getattr(config, name) // replicas)
            for name in ("parallel", "slots", "cache_ram_mb", "swap_space_mb", "ctx_size")
            if getattr(config, name) and not (name == "ctx_size" and config.unified_kv)
        }
        engine = msgspec.structs.replace(config, **halves)
        cluster.settings = ReplicaSettings(name=MODEL, engine=engine, module=module)
        settings = {**msgspec.structs.asdict(config), "cluster": str(cluster.folder), "deployment": MODEL}
        make(self, ClusterConfig(**settings), **{**named, "engine_module": __name__})

    def start_gateway(self: ProcessExecutor, *arguments: Any) -> None:
        while len(clusters[self].replicas) < replicas:
            clusters[self].start()
        start(self, *arguments)

    def stop_gateway(self: ProcessExecutor) -> None:
        stop(self)
        clusters[self].__exit__()

    ProcessExecutor.__init__ = make_gateway  # type: ignore[method-assign]
    ProcessExecutor.start = start_gateway  # type: ignore[method-assign, assignment]
    ProcessExecutor.stop = stop_gateway  # type: ignore[method-assign]


def end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def run_replica(folder: str, encoded: str) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    settings = msgspec.msgpack.decode(base64.b64decode(encoded), type=ReplicaSettings)
    configure_logging("warning")
    server = ReplicaServer(settings, settings.engine, "127.0.0.1", FolderDirectory(folder))
    server.start()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait()
    server.drain()
    server.stop()


if __name__ == "__main__":
    if sys.argv[1] == "replica":
        run_replica(*sys.argv[2:])
    else:
        sys.exit(run_worker(sys.argv[1:], FolderDirectory))
