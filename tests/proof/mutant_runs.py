"""Runs of tests with one module changed: a process each, forked from one that has imported everything else.

The parent imports pytest and what cllm and the tests depend on, but nothing of either. A child puts the
changed code in the place of its module, then runs pytest.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import hypothesis
import msgspec
import pytest

from tests.proof.evidence import ROOT
from tests.proof.mutation import mutate

TEST_LIMIT_S = 20.0  # a test takes three seconds at most
MEMORY_LIMIT = 6 << 30
PRELOADED = (
    *("asyncio", "hypothesis.stateful", "hypothesis.strategies", "llguidance", "msgspec", "numpy", "jinja2"),
    *("prometheus_client", "httpx", "gguf"),
)


class Job(NamedTuple):
    """One module, which of its mutations (None: as it is), and the tests to run."""

    key: str
    path: str
    index: int | None
    tests: Sequence[str]


class Outcome(msgspec.Struct, frozen=True):
    """Whether a test noticed, and which."""

    killed: bool
    test: str = ""
    timed_out: bool = False
    seconds: float = 0.0


class _Child(NamedTuple):
    job: Job
    pid: int
    reports: int  # the end of a pipe: a byte for each test that begins, then the name of one that failed
    started: float


class _Mutated(importlib.machinery.SourceFileLoader):
    """Loads the changed code instead of the file's."""

    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        return self._code


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the changed module; every other is found as always."""

    def __init__(self, name: str, path: str, code: CodeType) -> None:
        self._name, self._path, self._code = name, path, code

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        loader = _Mutated(fullname, self._path, self._code)
        return importlib.util.spec_from_file_location(fullname, self._path, loader=loader)


class _Reporter:
    """A plugin of pytest that tells the parent what runs, and what failed."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def pytest_sessionstart(self) -> None:
        """An example that fails is enough: a smaller one is not looked for."""
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("unit", hypothesis.settings.get_profile("unit"), phases=phases)
        hypothesis.settings.load_profile("unit")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(f"+{nodeid}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._fail(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._fail(f"the import of {report.nodeid}")

    def _fail(self, name: str) -> None:
        self._write(f"-{name}")
        os._exit(1)  # all is known

    def _write(self, line: str) -> None:
        os.write(self._pipe, line.encode(errors="replace") + b"\n")


def run_all(jobs: Sequence[Job], at_once: int) -> Iterator[tuple[Job, Outcome]]:
    """The outcome of each job, as they end."""
    os.chdir(ROOT)
    for name in PRELOADED:
        importlib.import_module(name)
    waiting, running = list(reversed(jobs)), list[_Run]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_Run(_start(waiting.pop())))
            select.select([run.child.reports for run in running], [], [], 1.0)
            for run in tuple(running):
                if (outcome := run.poll()) is not None:
                    running.remove(run)
                    yield run.child.job, outcome
    finally:
        for run in running:
            run.kill()


class _Run:
    """A child at work, and what it has said."""

    def __init__(self, child: _Child) -> None:
        self.child = child
        self._text = b""
        self._test = "the import"
        self._since = child.started
        self._failed: str | None = None

    def poll(self) -> Outcome | None:
        """Read what it says; its outcome when it has ended, or takes too long."""
        ended = False
        while not ended and select.select([self.child.reports], [], [], 0)[0]:
            piece = os.read(self.child.reports, 65536)
            ended = not piece
            *lines, self._text = (self._text + piece).split(b"\n")
            for line in lines:
                self._note(line.decode(errors="replace"))
        seconds = time.monotonic() - self.child.started
        if ended:
            code = os.waitstatus_to_exitcode(os.waitpid(self.child.pid, 0)[1])
            os.close(self.child.reports)
            killed = code != 0
            return Outcome(killed, self._failed or (self._test if killed else ""), seconds=seconds)
        if time.monotonic() - self._since > TEST_LIMIT_S:
            self.kill()
            return Outcome(True, self._test, timed_out=True, seconds=seconds)
        return None

    def _note(self, line: str) -> None:
        name = line[1:].partition("\n")[0]
        if line.startswith("-"):
            self._failed = self._failed or name
        else:
            self._test, self._since = name, time.monotonic()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        os.waitpid(self.child.pid, 0)
        os.close(self.child.reports)


def _start(job: Job) -> _Child:
    reading, writing = os.pipe()
    started = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        os.close(writing)
        return _Child(job, pid, reading, started)
    code = 70
    try:
        os.close(reading)
        code = _run(job, writing)
    finally:
        os._exit(code)  # threads of the tests must not hold it up


def _run(job: Job, pipe: int) -> int:
    """In the child: put the changed module in place and run the tests."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    name = job.path.removesuffix(".py").replace("/", ".")
    _forget_package()
    sys.dont_write_bytecode = False  # else each child compiles cllm and its tests anew
    if job.index is not None:
        path = ROOT / job.path
        mutation = next(islice(mutate(path.read_text()), job.index, None))
        sys.meta_path.insert(0, _Finder(name, str(path), compile(mutation.code, str(path), "exec")))
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what the parent has imported
    plugins: list[Any] = [_Reporter(pipe)]
    return int(pytest.main([*options, *job.tests], plugins=plugins))


def _forget_package() -> None:
    """What the command itself has imported of cllm is imported anew."""
    for name in [name for name in sys.modules if name == "cllm" or name.startswith("cllm.")]:
        del sys.modules[name]
