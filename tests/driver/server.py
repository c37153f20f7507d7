"""A real server in its own process, with its workers, and what a client needs to talk to it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.server_log import find_failures
from tests.driver.program import Program

ROOT = Path(__file__).parents[2]
SERVE = ("from cllm.cli.main import main; main()", "serve")
ALIAS = ("from cllm.cli.main import server_main; server_main()",)
PATIENCE_S = 90.0  # for whatever has no limit of its own: the machine may be busy
FREED_WITHIN_S = 5.0  # a step and the way to the parent, on a busy machine
_KEPT = ("CLLM_LIBRARY", "CLLM_CACHE_DIR", "CLLM_THREADS")
_DEATHS = {
    "engine": "the engine died: ",
    "tokenizer": "the tokenizer process ended: ",
    "media": "the media process ended: ",
}
Found = TypeVar("Found")


def environment(**extra: str) -> dict[str, str]:
    """The variables of a child: ours, less any `CLLM_*` that would change what is tested."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("CLLM_") or key in _KEPT}
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    plain = {"PYTHONPATH": paths, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    off = {"CLLM_CACHE_DISK_MB": "0"}
    one = {"CLLM_THREADS": "1"}  # two files are tested at a time: two threads would wait for each other
    return {**one, **kept, **plain, **off, **extra}


def cllm(*arguments: str, timeout: float = PATIENCE_S, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end; it is forked, as servers are."""
    with TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        program = Program(SERVE[0], arguments, environment(**variables), output, errors)
        try:
            status = program.wait(timeout)
        finally:
            program.kill()
        return subprocess.CompletedProcess(arguments, status, output.read_text(), errors.read_text())


def wait_for(what: Callable[[], Found | None], limit_s: float = PATIENCE_S, message: str = "") -> Found:
    """The first true answer of `what`; fails when none comes in time."""
    deadline = time.monotonic() + limit_s
    while True:
        if found := what():
            return found
        assert time.monotonic() < deadline, message or f"{what} was not true within {limit_s} s"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """True for a process that runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def cpu_s(pid: int) -> float:
    """Computing time a process has used: it does not grow because the machine is busy."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Stopwatch:
    """Seconds since it was made, less what the main threads of some processes waited for a core meanwhile.

    How busy the machine is otherwise does not count, then; that one of them sleeps or computes does.
    """

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._began = 0.0
        self._began = self.seconds

    @property
    def seconds(self) -> float:
        schedules = (Path(f"/proc/{pid}/schedstat").read_text().split() for pid in self._pids)
        waited_ns = sum(int(waited) for _, waited, _ in schedules)
        return time.monotonic() - waited_ns / 1e9 - self._began


def get_children(pid: int) -> dict[int, str]:
    """The living child processes and their command lines."""
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] not in "ZX":
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def started_at(pid: int) -> int:
    """When a process was started, in ticks since the machine was. Process ids begin again at some point."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def find_workers(pid: int, role: str) -> list[int]:
    """The process ids of a server's workers of that role: `engine` or `tokenizer`."""
    pattern = re.compile(rf"-m [\w.]+ \d+ {role}\b")
    return [child for child, line in get_children(pid).items() if pattern.search(line)]


def make_client(**options: Any) -> httpx.Client:
    """An HTTP client. It trusts any certificate: to read those of this machine takes 50 ms each time."""
    return httpx.Client(**{"timeout": PATIENCE_S, "trust_env": False, "verify": False, **options})


class Server:
    """`cllm serve` on a free port, its log in a file. A context manager: entering waits until it serves."""

    def __init__(
        self,
        log: Path,
        *arguments: str,
        program: tuple[str, ...] = SERVE,
        port: tuple[str, ...] = ("--port", "0"),
        **variables: str,
    ) -> None:
        self.log = log
        variables = environment(**{"CLLM_LOG_LEVEL": "debug", **variables})
        if os.environ.get("TEST_CLUSTER"):  # a cluster of two replicas computes for it
            program = (
                f"from tests.driver import cluster; cluster.replace_engines(); {program[0]}",
                *program[1:],
            )
        self.process = Program(program[0], (*program[1:], *arguments, *port), variables, log)
        self.url = ""
        self.client = make_client()
        self._expected: list[tuple[str, int]] = []

    def __enter__(self) -> Self:
        try:
            self.url = wait_for(self._announced, message="the server did not start")
        except BaseException:
            self.kill()
            raise
        self.client.base_url = self.url
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    def _announced(self) -> str | None:
        assert self.process.poll() is None, f"exit code {self.process.returncode}: {self.log_tail}"
        found = re.search(r"^cllm serves .* at (https?://\S+)$", self.log_text, re.MULTILINE)
        return found.group(1) if found else None

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def log_tail(self) -> str:
        return self.log_text[-2000:]

    def stop(self, limit_s: float = 40.0) -> None:
        """SIGTERM: it must end with 0, leave no process behind, and have had no failure."""
        children = get_children(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        self.wait_gone(children, limit_s)
        self.check_failures()

    def wait_gone(self, children: Mapping[int, str], limit_s: float = 40.0) -> None:
        """Wait for the end that is under way; it must be a clean one."""
        self.client.close()
        try:
            code = self.process.wait(limit_s)
        finally:
            self.kill()
        assert code == 0, f"exit code {code}: {self.log_tail}"
        orphans = {pid: line for pid, line in children.items() if alive(pid)}
        assert not orphans, f"left behind: {orphans}"

    def kill(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait(PATIENCE_S)

    # Failures --------------------------------------------------------------------------------------

    def expect_failure(self, pattern: str, count: int = sys.maxsize) -> None:
        """Announce that the test causes failures, whose log lines match; `count` of them at most."""
        self._expected.append((pattern, count))

    def kill_worker(self, role: str, number: int = signal.SIGKILL) -> int:
        """Send a signal that ends it, or has it replaced, to the newest worker of a role; return its pid."""
        pid = max(find_workers(self.process.pid, role), key=started_at)
        self.expect_failure(_DEATHS[role], 1)
        os.kill(pid, number)
        return pid

    def check_failures(self) -> None:
        """Assert that no worker died and no error was logged, but for those that the test announced."""
        left = list(self._expected)
        unexpected = []
        for line in find_failures(self.log_text):
            found = next((each for each in left if re.search(each[0], line)), None)
            if found is None:
                unexpected.append(line)
            else:
                left.remove(found)
                left += [(found[0], found[1] - 1)] * (found[1] > 1)
        assert not unexpected, f"the server failed: {unexpected[:5]} ({len(unexpected)} lines in {self.log})"

    def child(self, role: str) -> int:
        """The process id of the worker of that role: `engine` or `tokenizer`."""
        found = find_workers(self.process.pid, role)
        assert len(found) == 1, f"{len(found)} {role} workers"
        return found[0]

    # Requests --------------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        answer = self.client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def generate(self, prompt: str, max_tokens: int = 16, **fields: Any) -> dict[str, Any]:
        """A greedy `/generate` that must succeed: its data."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        return get_data(self.post("/generate", body))

    @contextmanager
    def open_stream(self, prompt: str, max_tokens: int = 16, **fields: Any) -> Iterator[Iterator[Any]]:
        """A greedy `/generate_stream`: its events as they come. Leaving the block disconnects."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        with (
            make_client(base_url=self.url) as client,
            client.stream("POST", "/generate_stream", json=body) as response,
        ):
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            yield parse_events(response.iter_lines())

    def connect(self, body: Any, path: str = "/generate") -> socket.socket:
        """Send a request over a bare socket and leave it open."""
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        connection.sendall(head.encode() + data)
        return connection

    # What it says of itself -------------------------------------------------------------------------

    def kv(self) -> Any:
        return self.get("/debug/kv")

    def kv_is_zero(self) -> bool:
        """KV accounting: nothing leased, no cell in use, and as many released as leased."""
        kv = self.kv()
        counters = kv["counters"]
        return bool(
            kv["sequences"]["leased"] == 0
            and kv["sequences"]["free"] == kv["sequences"]["total"]
            and kv["cells"]["used"] == 0
            and kv["leases"] == []
            and counters["leased_total"] == counters["released_total"]
            and counters["integrity_failures"] == 0
        )

    def idle(self) -> bool:
        """No KV cell in use, no request in the table (which hears of an end a moment later)."""
        return self.kv_is_zero() and self.get("/debug/requests") == {"requests": []}

    def metrics(self) -> dict[str, float]:
        """Every sample of `/metrics`; labels as in `name{label=value}`."""
        text = self.client.get("/metrics").text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found

    def finished(self, outcome: str) -> float:
        return self.metrics().get(f"cllm_requests_finished_total{{outcome={outcome}}}", 0.0)

    @contextmanager
    def freed_on_leaving(self, count: int = 1) -> Iterator[None]:
        """Clients leave in this block: so many are cancelled (none runs on to its end), nothing is left."""
        cancelled = self.finished("cancelled")
        yield
        wait_for(self.idle, FREED_WITHIN_S)
        assert self.finished("cancelled") == cancelled + count


StartServer = Callable[..., Server]  # the fixture `start`


@contextmanager
def start_servers(folder: Path) -> Iterator[StartServer]:
    """Start servers with their logs in a folder. At the end they are killed, and none may have failed."""
    servers: list[Server] = []

    def start(*arguments: str, **options: Any) -> Server:
        server = Server(folder / f"log{len(servers) + 1}", *arguments, **options)
        servers.append(server)
        return server.__enter__()

    try:
        yield start
    finally:
        for server in servers:
            server.kill()
    for server in servers:
        server.check_failures()


def parse_events(lines: Iterator[str]) -> Iterator[Any]:
    """Server-sent events: `data: JSON`, an empty line, comments, nothing else."""
    for line in lines:
        if line and line != ":":
            assert line.startswith("data: "), line
            yield json.loads(line.removeprefix("data: "))


def get_data(answer: httpx.Response) -> dict[str, Any]:
    """The data of a `/generate` that succeeded."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["success"] is True
    data = body["data"]
    assert isinstance(data, dict)
    return data


def stream_text(events: list[Any]) -> str:
    """The pieces of a finished stream, joined; every event but the last is a token."""
    assert [event["done"] for event in events] == [False] * (len(events) - 1) + [True], events[-3:]
    return "".join(event["token"] for event in events)
