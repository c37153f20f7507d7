"""A cluster without Ray: replicas as processes of their own, which gateways find in a folder.

`python -m tests.driver.cluster replica FOLDER SETTINGS` runs a replica until SIGTERM, which drains it; with
the arguments of a worker it is the cluster worker of a gateway. `FolderCluster` starts replicas.
"""

from __future__ import annotations

import base64
import contextlib
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from cllm.cluster.cluster_worker import main as run_worker
from cllm.cluster.link import ReplicaAddress
from cllm.cluster.replica import ReplicaServer, ReplicaSettings
from cllm.config import EngineConfig
from cllm.logs import configure_logging
from tests.driver.server import wait_for

MODEL = "scripted"


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
        process = subprocess.Popen(command)
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


def run_replica(folder: str, encoded: str) -> None:
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
