"""Cluster worker: stands where a gateway's engine worker would, and has replicas compute.

`python -m cllm.cluster.cluster_worker FD engine LOG_LEVEL`. The first frame is a ClusterConfig. It finds
replicas in the directory, connects to each, and lets a `Relay` place, pass on and move requests. Serve's own
router is not used: its class is alpha, it sees the load of a replica only by asking, and a stream for each
request costs three times as much as a frame for each step (`cllm.cluster.link`). A replica that says nothing
for `SILENCE_LIMIT_S` is taken for gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

import cllm
from cllm.cluster.directory import Directory, RayDirectory, use_token
from cllm.cluster.link import FromReplica, Link, ReplicaAddress
from cllm.cluster.relay import Relay, RemoteReplica
from cllm.config import ClusterConfig
from cllm.errors import CllmError
from cllm.messages import Command, Died, Heartbeat, Report
from cllm.process import configure_logging, new_event_loop
from cllm.workers.channel import Channel, read_commands

log = logging.getLogger(__name__)


class Connection:
    """A replica of the directory, and the link to it while there is one."""

    def __init__(self, address: ReplicaAddress, now: float) -> None:
        self.address = address
        self.link: Link | None = None
        self.replica: RemoteReplica | None = None  # once it is open
        self.tried = 0.0
        self.failing_since = now  # without a link
        self.task: asyncio.Task[None]  # that connects it


class ClusterWorker:
    """One loop: commands of the parent, links to replicas, and the relay between them."""

    SILENCE_LIMIT_S = 5.0
    LOOK_S = 0.5  # between two looks at the directory
    RETRY_S = 1.0
    FORGET_S = 15.0  # until an entry that cannot be reached is removed; a replica enters itself again
    TICK_S = 0.25
    HEARTBEAT_S = 1.0
    REPORT_S = 2.0

    def __init__(
        self, config: ClusterConfig, directory: Directory, emit: Callable[[Report | Heartbeat], None]
    ) -> None:
        """Made on the thread of the loop that runs it. `directory` is used by another thread."""
        self._loop = asyncio.get_running_loop()
        self._config, self._directory, self._emit = config, directory, emit
        self._name = secrets.token_hex(4)
        self._relay = Relay(
            emit,
            self._name,
            absent=f"no replica of {config.deployment} is there to compute this",
            share_across_tenants=config.share_prefixes_across_tenants,
        )
        self._connections: dict[str, Connection] = {}
        self._refused: set[str] = set()  # replicas of another version or model
        self._stopped = threading.Event()

    async def run(self) -> None:
        """Run until it is cancelled."""
        threading.Thread(target=self._watch, name="directory", daemon=True).start()
        try:
            await self._keep_time()
        finally:
            self._stopped.set()
            for connection in self._connections.values():
                if connection.link is not None:
                    connection.link.abort()

    def post(self, command: Command) -> None:
        """Handle a command, from any thread."""
        self._loop.call_soon_threadsafe(self._handle, command)

    def _handle(self, command: Command) -> None:
        self._relay.handle(command)
        self._flush_soon()

    # Time --------------------------------------------------------------------------------------------

    async def _keep_time(self) -> None:
        beat = report = due = self._loop.time()
        while True:
            due = max(due + self.TICK_S, self._loop.time())
            await asyncio.sleep(due - self._loop.time())
            now = self._loop.time()
            if now - due < self.TICK_S:  # else this process was suspended: what has come is to be read first
                for link in [each.link for each in self._connections.values() if each.link is not None]:
                    if link.open and now - link.heard > self.SILENCE_LIMIT_S:
                        link.abort()
            self._relay.keep_limits()
            if now >= beat:
                beat = now + self.HEARTBEAT_S
                self._emit(Heartbeat(0.0))
            if now >= report:
                report = now + self.REPORT_S
                self._emit(self._relay.report())

    def _flush_soon(self) -> None:
        """Flush at the end of this turn: outputs that come from several replicas together are one report."""
        self._loop.call_soon(self._relay.flush)

    # Replicas ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look at the directory again and again. What is connected goes on while it does not answer."""
        answers = True
        said = 0.0
        while not self._stopped.wait(self.LOOK_S):
            try:
                found = self._directory.list(self._config.deployment)
                answers = True
            except CllmError as error:
                if answers:
                    log.warning("%s", error.message)
                answers, found = False, []
            except Exception:
                log.exception("the directory could not be read")
                continue
            if not found and not self._connections and time.monotonic() - said > 30.0:
                said = time.monotonic()
                log.warning("no replica of %s is there: deploy it, or wait", self._config.deployment)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._connect_all, found, answers)

    def _connect_all(self, found: Sequence[ReplicaAddress], answers: bool) -> None:
        now = self._loop.time()
        listed = {address.replica for address in found}
        for name in [*self._connections] if answers else ():
            if name not in listed and self._connections[name].link is None:
                del self._connections[name]
        for address in found:
            if not self._accept(address):
                continue
            connection = self._connections.setdefault(address.replica, Connection(address, now))
            if connection.link is None and now - connection.tried >= self.RETRY_S:
                connection.tried = now
                if now - connection.failing_since > self.FORGET_S:
                    threading.Thread(target=self._forget, args=(address,), daemon=True).start()
                connection.task = self._loop.create_task(self._connect(connection))

    def _accept(self, address: ReplicaAddress) -> bool:
        """Check that a replica has this version of cllm and this model. Logs once why not."""
        if address.version != cllm.__version__:
            why = f"it has cllm {address.version}, this gateway {cllm.__version__}"
        elif address.digest != self._config.digest:
            why = "its model file is another one than that of this gateway"
        else:
            return True
        if address.replica not in self._refused:
            self._refused.add(address.replica)
            log.error("replica %s is not used: %s", address.replica, why)
        return False

    def _forget(self, address: ReplicaAddress) -> None:
        with contextlib.suppress(CllmError):
            self._directory.remove(self._config.deployment, address.replica)

    async def _connect(self, connection: Connection) -> None:
        address = connection.address

        def opened(link: Link, _: str) -> None:
            connection.replica = self._relay.join(address.replica, link.send)
            log.info("replica %s is connected", address.replica)

        def received(link: Link, message: object) -> None:
            assert connection.replica is not None
            self._relay.receive(connection.replica, message)  # type: ignore[arg-type]
            self._flush_soon()

        connection.link = link = Link(
            *(FromReplica, address.key),
            name=self._name,
            opened=opened,
            received=received,
            lost=lambda link: self._lose(connection, link),
        )
        try:
            async with asyncio.timeout(self.SILENCE_LIMIT_S):
                await self._loop.create_connection(lambda: link, address.host, address.port)
        except OSError:  # it may be gone; TimeoutError is one, too
            connection.link = None

    def _lose(self, connection: Connection, link: Link) -> None:
        replica, connection.link, connection.replica = connection.replica, None, None
        if replica is None:
            return
        connection.failing_since = now = self._loop.time()
        silent = now - link.heard > self.SILENCE_LIMIT_S
        why = f"nothing came for {self.SILENCE_LIMIT_S:.0f} s" if silent else "its connection ended"
        self._relay.leave(replica, why)
        self._flush_soon()


async def _serve(channel: Channel, config: ClusterConfig, directory: Directory) -> None:
    encoder = msgspec.msgpack.Encoder()

    def emit(report: Report | Heartbeat) -> None:
        with contextlib.suppress(OSError):  # the parent is gone: the end of the commands is noticed, too
            channel.send(encoder.encode(report))

    worker = ClusterWorker(config, directory, emit)
    threading.Thread(target=read_commands, args=(channel, worker.post), name="commands", daemon=True).start()
    await worker.run()


def _open_directory(address: str) -> Directory:
    use_token()
    return RayDirectory(address)


def main(arguments: list[str], open_directory: Callable[[str], Directory] = _open_directory) -> int:
    descriptor, _, log_level = arguments
    configure_logging(log_level)
    channel = Channel(socket.socket(fileno=int(descriptor)))
    if (first := channel.receive()) is None:
        return 0
    config = msgspec.msgpack.decode(first, type=ClusterConfig)
    try:
        directory = open_directory(config.cluster)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_serve(channel, config, directory))
    except CllmError as error:
        channel.send(msgspec.msgpack.encode(Died(error.code, error.message)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
