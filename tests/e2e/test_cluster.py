"""A gateway and its replicas, without Ray: what it promises when replicas die, freeze, drain and come."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from cllm.testing import say
from proof.resume import SCRIPTED
from tests.driver.cluster import FolderCluster
from tests.driver.server import Server, get_children, parse_events, stream_text, wait_for

TEXT = "so it goes on from replica to replica, and no client hears of it. " * 3
STREAMS = 6


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FolderCluster]:
    with FolderCluster(tmp_path / "directory") as cluster:
        yield cluster


@pytest.fixture
def gateway(cluster: FolderCluster, tmp_path: Path) -> Iterator[Server]:
    cluster.start()
    flags = ("--cluster", str(cluster.folder), "--engine-module", "tests.driver.cluster")
    with Server(tmp_path / "gateway.log", *flags, program=SCRIPTED) as server:
        yield server


def ask(server: Server, number: int) -> str:
    body = {"prompt": f"{number} " + say(TEXT), "temperature": 0, "max_tokens": 1000}
    with server.client.stream("POST", "/generate_stream", json=body) as response:
        assert response.status_code == 200, response.read()
        return stream_text(list(parse_events(response.iter_lines())))


def count_ready(server: Server) -> int:
    found = {name: value for name, value in server.metrics().items() if "cllm_replica_ready{" in name}
    return int(sum(found.values()))


def disturb(server: Server, change: object, after: float = 0.3) -> list[str]:
    """The texts of some streams, with a change while they run."""
    assert callable(change)
    with ThreadPoolExecutor(STREAMS + 1) as pool:
        answers = [pool.submit(ask, server, number) for number in range(STREAMS)]
        time.sleep(after)
        change()
        return [answer.result(60) for answer in answers]


def test_requests_outlive_their_replicas(cluster: FolderCluster, gateway: Server) -> None:
    assert ask(gateway, 0) == TEXT
    second = cluster.start()
    wait_for(lambda: count_ready(gateway) == 2)
    busy = wait_for(lambda: [each for each in cluster.replicas if each.poll() is None])
    assert disturb(gateway, busy[0].kill) == [TEXT] * STREAMS, "a replica was killed"
    wait_for(lambda: count_ready(gateway) == 1)

    (engine,) = get_children(second.pid)
    assert disturb(gateway, lambda: subprocess.run(["kill", "-9", str(engine)])) == [TEXT] * STREAMS

    third = cluster.start()
    wait_for(lambda: count_ready(gateway) == 2)
    assert disturb(gateway, lambda: second.send_signal(signal.SIGTERM)) == [TEXT] * STREAMS, "drained"
    wait_for(lambda: second.poll() is not None)

    (worker,) = [
        pid for pid, line in get_children(gateway.process.pid).items() if "tests.driver.cluster" in line
    ]
    gateway.expect_failure("the engine died: ", 1)
    assert disturb(gateway, lambda: subprocess.run(["kill", "-9", str(worker)])) == [TEXT] * STREAMS
    assert third.poll() is None
    wait_for(gateway.idle)


def test_without_a_replica_it_is_not_ready(cluster: FolderCluster, gateway: Server) -> None:
    def replace() -> None:
        cluster.replicas[0].kill()
        wait_for(lambda: gateway.client.get("/ready").status_code == 503)
        assert "no replica of scripted" in gateway.client.get("/ready").json()["reason"]
        cluster.start()

    assert disturb(gateway, replace) == [TEXT] * STREAMS
    assert gateway.client.get("/ready").status_code == 200


def test_a_replica_of_another_model_is_not_used(cluster: FolderCluster, gateway: Server) -> None:
    gateway.expect_failure("its model file is another one", 1)
    cluster.start(msgspec.structs.replace(cluster.settings, digest="other"))
    cluster.wait(2)
    time.sleep(1.5)
    assert count_ready(gateway) == 1
    assert disturb(gateway, lambda: None) == [TEXT] * STREAMS


def test_a_client_that_leaves_frees_its_cells(cluster: FolderCluster, gateway: Server) -> None:
    body = {"prompt": say(TEXT * 2), "temperature": 0, "max_tokens": 500}
    with gateway.freed_on_leaving(), gateway.client.stream("POST", "/generate_stream", json=body) as response:
        next(response.iter_lines())


def test_two_gateways_share_replicas(cluster: FolderCluster, gateway: Server, tmp_path: Path) -> None:
    cluster.start()
    wait_for(lambda: count_ready(gateway) == 2)
    flags = ("--cluster", str(cluster.folder), "--engine-module", "tests.driver.cluster")
    with Server(tmp_path / "second.log", *flags, program=SCRIPTED) as second, ThreadPoolExecutor(1) as pool:
        wait_for(lambda: count_ready(second) == 2)
        others = pool.submit(disturb, second, lambda: None)
        assert disturb(gateway, cluster.replicas[0].kill) == [TEXT] * STREAMS
        assert others.result(60) == [TEXT] * STREAMS
    wait_for(gateway.idle)
