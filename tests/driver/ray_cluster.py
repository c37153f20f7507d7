"""A cluster on Ray, of this machine alone, with a gateway; and streams whose every event is timed.

Ray is in an environment of its own: `python` is that one's interpreter. What runs here needs no Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from bench.footprint import descendants
from bench.peers import free_port
from cllm.testing import say
from tests.driver.server import ROOT, alive, cpu_s, environment, wait_for

STEP_MS = 20
SLOTS = 32
CELLS = 2048  # of a request
TEXT = "so it goes on from replica to replica, and no client hears of it; " * 2
REPLICA, CONTROLLER, RAYLET, GCS = "ray::ServeReplica", "ray::ServeController", "raylet/raylet", "gcs_server"
CLLM = ("-c", "from cllm.cli.main import main; main()")
SCRIPTED = ("-c", "from cllm.testing import main; import sys; sys.exit(main(sys.argv[1:]))", "serve")


def read_command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


@dataclass
class Stream:
    """What a client read of one answer, and when."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    began: float = 0.0
    error: str = ""
    ended: bool = False
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def first_s(self) -> float:
        return self.times[0] - self.began

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    @property
    def pause_s(self) -> float:
        return max([*self.gaps_s, self.first_s] if self.times else [0.0])


async def read_stream(port: int, prompt: str, max_tokens: int = 400, **fields: Any) -> Stream:
    """One answer of `/generate_stream`, by plain sockets: a client must not take the cores it measures."""
    stream = Stream()
    body = json.dumps({"prompt": prompt, "temperature": 0, "max_tokens": max_tokens, **fields}).encode()
    head = "POST /generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    stream.began = time.monotonic()
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    try:
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            stream.times.append(time.monotonic())
            stream.text += event.get("token", "")
            if "error" in event:
                stream.error = str(event["error"])
            if event.get("done"):
                stream.ended = True
                stream.usage = event.get("usage") or {}
                break
    finally:
        writer.close()
    return stream


async def read_streams(
    port: int | Sequence[int], count: int, text: str = TEXT, **fields: Any
) -> list[Stream]:
    """So many answers at once; with several ports, in turn."""
    ports = [port] if isinstance(port, int) else port
    prompts = [f"{number} {time.monotonic()} {say(text)}" for number in range(count)]
    tasks = [
        read_stream(ports[number % len(ports)], prompt, **fields) for number, prompt in enumerate(prompts)
    ]
    async with asyncio.timeout(240):
        return await asyncio.gather(*tasks)


class RayCluster:
    """A head, its deployment of the scripted model, and a gateway. A context manager."""

    def __init__(self, folder: Path, python: str, *, cpus: int = 6) -> None:
        self.folder, self.python, self._cpus = folder, python, cpus
        self.port = free_port()
        self.gateway_port = free_port()
        self.gateway: subprocess.Popen[bytes] | None = None
        self.environment = environment(
            PYTHONPATH=str(ROOT),
            RAY_AUTH_TOKEN_PATH=str(folder / "token"),
            RAY_TMPDIR=str(folder / "ray"),
            CLLM_CLUSTER_WORKER="cllm.testing",
            PATH=f"{Path(python).parent}:{os.environ['PATH']}",
        )
        self.log = folder / "gateway.log"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cllm(self, *arguments: str, limit_s: float = 180.0) -> str:
        """Run `cllm cluster …`; fails where it does."""
        done = subprocess.run(
            [self.python, *CLLM, "cluster", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-800:]} {done.stderr[-2000:]}"
        return done.stdout

    def start_head(self) -> None:
        storage = str(self.folder / "storage")
        common = ("--node-ip", "127.0.0.1", "--storage", storage)
        self.cllm("head", "--port", str(self.port), "--cpus", str(self._cpus), *common)

    def deploy(self, replicas: int = 2, *flags: str, slots: int = SLOTS, step_ms: int = STEP_MS) -> None:
        size = ("--parallel", str(slots), "--ctx-size", str(CELLS * slots))
        model = (*size, "--draft-tokens", "0", "--threads", "2")
        counts = ("--replicas", str(replicas), "--cluster", self.address)
        self.cllm("deploy", str(step_ms), *model, *counts, *flags)

    def start_gateway(self) -> None:
        port = ("--port", str(self.gateway_port), "--cluster", self.address)
        self.gateway = self.serve(*port, "--parallel", "64", "--log-level", "info")
        wait_for(lambda: self.status("/ready") == 200, 60, "the gateway does not serve")

    def serve(self, *arguments: str) -> subprocess.Popen[bytes]:
        """A server of the scripted model."""
        command = [self.python, *SCRIPTED, *arguments]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def stop_gateway(self) -> None:
        if self.gateway is not None:
            self.gateway.terminate()
            self.gateway.wait(30)
            self.gateway = None

    def get(self, path: str) -> tuple[int, str]:
        with contextlib.suppress(OSError):
            with socket.create_connection(("127.0.0.1", self.gateway_port), 5) as connection:
                head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                connection.sendall(head.encode())
                data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
            top, _, body = data.partition(b"\r\n\r\n")
            return int(top.split()[1]), body.decode()
        return 0, ""

    def status(self, path: str) -> int:
        return self.get(path)[0]

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def wait_replicas(self, count: int, limit_s: float = 90.0) -> None:
        """Until the gateway has so many that compute."""
        wait_for(lambda: self.metric("cllm_replica_ready") == count, limit_s, f"not {count} replicas")

    def find(self, words: str) -> list[int]:
        """The processes of this cluster whose command line begins so, or has it as its program."""
        return [pid for pid in self._list_own() if words in read_command(pid)]

    def _list_own(self) -> list[int]:
        mark, found = f"RAY_AUTH_TOKEN_PATH={self.folder}/token".encode(), list[int]()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (path / "environ").read_bytes():
                    found.append(int(path.name))
        return sorted(found)

    @property
    def replicas(self) -> list[int]:
        return [pid for pid in self.find(REPLICA) if read_command(pid).startswith(REPLICA)]

    @property
    def processes(self) -> list[int]:
        """Everything of Ray, without the gateway."""
        own = set(descendants(self.gateway.pid)) if self.gateway is not None else set()
        return [pid for pid in self._list_own() if pid not in own and alive(pid)]

    def cpu_s(self, pids: Sequence[int]) -> float:
        total = 0.0
        for pid in pids:
            with contextlib.suppress(OSError):
                total += cpu_s(pid)
        return total

    def kill(self, *pids: int, number: int = signal.SIGKILL) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def __enter__(self) -> Self:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        try:
            self.start_head()
            self.deploy()
            self.start_gateway()
            self.wait_replicas(2)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything, by process id; what `down` leaves is killed."""
        self.stop_gateway()
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.cllm("down", limit_s=60)
        self.kill(*self.processes)


@contextlib.contextmanager
def plain_servers(cluster: RayCluster, count: int = 2) -> Iterator[tuple[list[int], list[int]]]:
    """So many servers without a cluster: their ports and processes."""
    ports = [free_port() for _ in range(count)]
    size = ("--step-ms", str(STEP_MS), "--parallel", str(SLOTS), "--ctx-size", str(CELLS * SLOTS))
    servers = [cluster.serve("--port", str(port), *size) for port in ports]
    try:
        for port in ports:
            wait_for(lambda port=port: socket.socket().connect_ex(("127.0.0.1", port)) == 0, 60)  # type: ignore[misc]
        time.sleep(3)
        yield ports, [server.pid for server in servers]
    finally:
        for server in servers:
            server.terminate()
            server.wait(20)
