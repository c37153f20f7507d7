"""Runs of tests with one function changed: a process each, forked from one that has collected all tests.

The parent imports everything and runs no test. A child gives the function its changed code, then runs the
tests that call it, those first that have noticed most. What is changed outside of functions (a constant, a
default) cannot be put in place afterwards: such a mutant is run in a new interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import inspect
import math
import os
import resource
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate, islice
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import hypothesis
import msgspec
import pytest

from proof.command import ROOT
from proof.shared.mutation import mutate

TEST_LIMIT_S = 10.0  # of CPU time: a test takes three seconds at most
WAIT_LIMIT_S = 60.0  # for a test that waits, or a machine that is busy
# What takes a second or more: with `quick` these are left out.
SLOW = frozenset(
    {
        "test_one_failure_at_every_native_call_in_turn",
        "test_one_failure_at_every_native_call_costs_one_request_at_most",
        "test_submitting_and_cancelling_cost_the_same_however_many_wait",
        "test_it_goes_on_from_every_place",
        "test_a_copy_that_fails_costs_a_recompute_at_most",
        "test_a_move_that_fails_costs_a_recompute_at_most",
        "test_a_running_sequence_survives_a_move_that_fails",
        "test_no_step_of_a_long_prompt_is_far_over_the_target",
        "test_identical_requests_cost_exactly_the_same_from_the_second_on_where_they_are_kept",
        "test_identical_requests_cost_exactly_the_same_from_first_to_last",
        "test_every_order_of_events",
    }
)
TRACES = ROOT / "build" / "mutants-traces.json"
MEMORY_LIMIT = 6 << 30
NOT_RUN = 70  # exit code of a child whose own work failed
NO_TEST = "the import"
OF_CLASS = " "  # before the name of a class: the code of its body
OPTIONS = ("-x", "-q", "-s", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist")


class Job(NamedTuple):
    """One mutant: its module, its number among the module's, and the files of the tests for it."""

    key: str
    path: str
    number: int | None  # None: the module as it is
    files: Sequence[str]
    max_s: float = math.inf  # of tests, as they take on the source as it is: the shortest ones


class Outcome(msgspec.Struct, frozen=True):
    """Whether a test noticed, and which."""

    killed: bool
    test: str = ""
    timed_out: bool = False
    seconds: float = 0.0
    not_run: bool = False  # the child ended before its first test: that says nothing about the mutant


class Trace(msgspec.Struct, frozen=True):
    """How long a test took on the source as it is, and which functions of the modules it called."""

    test: str
    seconds: float
    called: frozenset[str]
    failed: bool = False  # by chance, on a busy machine: then it says nothing about a mutant


class Reporter:
    """A plugin of pytest that tells the parent what runs, and ends the process when a test fails."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

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
        os.write(self.pipe, line.encode(errors="replace") + b"\n")


class MutantSession(Reporter):
    """A session of pytest that has collected its tests and hands itself to `work` instead of running them."""

    def __init__(self, modules: Sequence[str], work: Callable[[MutantSession], None], *, quick: bool) -> None:
        super().__init__(-1)
        self._quick = quick
        self._modules = modules
        self._work = work
        self._items: list[pytest.Item] = []
        self._traces: dict[str, Trace] = {}
        self._failed: list[str] | None = None  # while tests are traced
        self._kills: Counter[tuple[str, str]] = Counter()

    def pytest_sessionstart(self) -> None:
        """An example that fails is enough: a smaller one is not looked for."""
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("unit", hypothesis.settings.get_profile("unit"), phases=phases)
        hypothesis.settings.load_profile("unit")

    def _fail(self, name: str) -> None:
        if self._failed is None:
            super()._fail(name)
        else:
            self._failed.append(name)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = [
            item for item in session.items if not (self._quick and item.name.partition("[")[0] in SLOW)
        ]
        gc.collect()
        gc.freeze()  # else each child copies what it only looks at
        self._work(self)
        return True

    # On the source as it is -------------------------------------------------------------------------

    def trace(self, at_once: int) -> float:
        """Run every test once, unchanged. Those that fail take no part. Returns the seconds of all."""
        paths = {str(ROOT / path): path for path in self._modules}
        sources = "".join((ROOT / path).read_text() for path in self._modules)
        known = _read_traces(sources)
        left = [item for item in self._items if item.nodeid not in known]
        slices = [left[number::at_once] for number in range(at_once)]
        self._traces.update(known)
        running = [_Run(_fork(partial(self._trace, part, paths), self)) for part in slices]
        try:
            while running:
                select.select([run.reports for run in running], [], [], 1.0)
                for run in tuple(running):
                    if (outcome := run.poll()) is None:
                        continue
                    running.remove(run)
                    if outcome.killed:
                        raise RuntimeError(f"{outcome.test} does not end on the source as it is")
                    traces = (msgspec.json.decode(line, type=Trace) for line in run.traces)
                    self._traces.update((trace.test, trace) for trace in traces)
        finally:
            for run in running:
                run.kill()
            _write_traces(sources, self._traces)
        for trace in self._traces.values():
            if trace.failed:
                print(f"left out, since it fails on the source as it is: {trace.test}", flush=True)
        return sum(trace.seconds for trace in self._traces.values())

    def _trace(self, items: Sequence[pytest.Item], paths: dict[str, str], pipe: int) -> None:
        called: set[str] = set()
        self._failed = []

        def note(frame: Any, event: str, argument: object) -> None:
            if (path := paths.get(frame.f_code.co_filename)) is not None:
                called.add(f"{path}:{_function(frame.f_code.co_qualname)}")

        for item in items:
            called.clear()
            began = time.process_time()
            sys.settrace(note)
            self._run_item(item)
            sys.settrace(None)
            failed = item.nodeid in self._failed
            trace = Trace(item.nodeid, time.process_time() - began, frozenset(called), failed)
            os.write(pipe, b"=" + msgspec.json.encode(trace) + b"\n")

    # With mutants -----------------------------------------------------------------------------------

    def run_all(self, jobs: Sequence[Job], at_once: int) -> Iterator[tuple[Job, Outcome]]:
        """The outcome of each job, as they end."""
        waiting = list(reversed(jobs))
        running: list[tuple[Job, str, _Run]] = []
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    running.append(self._start(waiting.pop()))
                select.select([run.reports for _, _, run in running], [], [], 1.0)
                for each in tuple(running):
                    job, function, run = each
                    if (outcome := run.poll()) is not None:
                        running.remove(each)
                        if outcome.not_run:
                            raise RuntimeError(f"no test was run for {job.key}")
                        self._kills[function, outcome.test] += outcome.killed
                        self._kills[job.path, outcome.test] += outcome.killed
                        yield job, outcome
        finally:
            for _, _, run in running:
                run.kill()

    def _start(self, job: Job) -> tuple[Job, str, _Run]:
        items = [item for item in self._items if item.nodeid.partition("::")[0] in job.files]
        items = [item for item in items if not self._traces[item.nodeid].failed]
        if job.number is None:
            return job, "", _Run(_fork(lambda pipe: self._run_items(items), self))
        function, code = find_changed(job.path, job.number)
        if code is None:
            return job, "", _Run(_fork(lambda pipe: _run_anew(job, pipe)))
        name = f"{job.path}:{function}"
        items = [item for item in items if name in self._traces[item.nodeid].called]
        items.sort(key=lambda item: self._traces[item.nodeid].seconds)
        sums = accumulate(self._traces[item.nodeid].seconds for item in items)
        items = [item for item, sum_s in zip(items, sums, strict=True) if sum_s <= job.max_s]
        items.sort(
            key=lambda item: (
                -self._kills[name, item.nodeid],
                -self._kills[job.path, item.nodeid],
                self._traces[item.nodeid].seconds,
            )
        )

        def run(pipe: int) -> None:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
            _put_in_place(job.path, function, code)
            self._run_items(items)

        return job, name, _Run(_fork(run, self))

    def _run_items(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            self._run_item(item)

    def _run_item(self, item: pytest.Item) -> None:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)


def collect(
    modules: Sequence[str],
    files: Sequence[str],
    work: Callable[[MutantSession], None],
    *,
    quick: bool = False,
) -> None:
    """Collect the tests of these files and call `work` with the session."""
    os.chdir(ROOT)
    session = MutantSession(modules, work, quick=quick)
    pytest.main([*OPTIONS, "-W", "ignore::pytest.PytestAssertRewriteWarning", *files], plugins=[session])


def find_changed(path: str, index: int) -> tuple[str, CodeType | None]:
    """The name and the changed code of the function that a mutation is in; None if it is in none."""
    source = (ROOT / path).read_text()
    mutation = next(islice(mutate(source), index, None))
    before, after = (_codes(compile(each, path, "exec")) for each in (source, mutation.code))
    changed = [name for name, code in after.items() if before.get(name) != code]
    if len(changed) != 1 or not changed[0] or changed[0].startswith(OF_CLASS):
        return "", None
    return changed[0], after[changed[0]]


def _read_traces(sources: str) -> dict[str, Trace]:
    """What earlier runs found out about tests, where neither they nor the modules have changed."""
    if not TRACES.exists():
        return {}
    kept = msgspec.json.decode(TRACES.read_bytes(), type=dict[str, list[Trace]])
    return {
        trace.test: trace
        for key, traces in kept.items()
        if (ROOT / (file := key.partition(" ")[0])).exists() and key == _trace_key(file, sources)
        for trace in traces
    }


def _write_traces(sources: str, traces: dict[str, Trace]) -> None:
    kept: dict[str, list[Trace]] = {}
    for trace in traces.values():
        if trace.failed:
            continue
        kept.setdefault(_trace_key(trace.test.partition("::")[0], sources), []).append(trace)
    TRACES.write_bytes(msgspec.json.encode(kept))


@cache
def _trace_key(file: str, sources: str) -> str:
    content = (ROOT / file).read_text() + sources
    return f"{file} {hashlib.sha256(content.encode()).hexdigest()}"


def _function(qualified: str) -> str:
    """The function or method that something inside it belongs to."""
    return qualified.partition(".<locals>")[0]


def _codes(code: CodeType) -> dict[str, CodeType]:
    """The code of each function by name; those inside a function are part of it. The module's own is `''`."""
    found = {"": code.replace(co_consts=())}
    left = [code]
    while left:
        for inner in left.pop().co_consts:
            if isinstance(inner, CodeType):
                if inner.co_flags & 0x2:  # CO_NEWLOCALS: not a class
                    found[inner.co_qualname] = inner
                else:
                    found[OF_CLASS + inner.co_qualname] = inner.replace(co_consts=())
                    left.append(inner)
    return found


def _put_in_place(path: str, function: str, code: CodeType) -> None:
    """Give a function of a loaded module other code."""
    found: Any = sys.modules[path.removesuffix(".py").replace("/", ".")]
    for name in function.split("."):
        found = vars(found)[name]
    if isinstance(found, property):
        found = found.fget
    found = inspect.unwrap(getattr(found, "__func__", found))
    assert isinstance(found, FunctionType)
    found.__code__ = code


def _fork(run: Callable[[int], None], session: Reporter | None = None) -> tuple[int, int]:
    """Start a child; its id, and the pipe on which it reports."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    if pid := os.fork():
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        os.close(writing)
        return pid, reading
    code = NOT_RUN
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        if session is not None:
            session.pipe = writing
        run(writing)
        code = 0
    finally:
        os._exit(code)  # threads of the tests must not hold it up


def _run_anew(job: Job, pipe: int) -> None:
    os.set_inheritable(pipe, True)
    arguments = ["-m", "proof.shared.mutated_module", job.path, str(job.number), str(pipe), *job.files]
    os.execv(sys.executable, [sys.executable, *arguments])


def _cpu_s(pid: int) -> float:
    """The CPU time of a process so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


class _Run:
    """A child at work, and what it has said."""

    def __init__(self, child: tuple[int, int]) -> None:
        self._pid, self.reports = child
        self.traces: list[bytes] = []
        self._started = self._since = time.monotonic()
        self._cpu_s = 0.0  # when the test began
        self._text = b""
        self._test = NO_TEST
        self._failed: str | None = None

    def poll(self) -> Outcome | None:
        """Read what it says; its outcome when it has ended, or takes too long."""
        ended = False
        while not ended and select.select([self.reports], [], [], 0)[0]:
            piece = os.read(self.reports, 65536)
            ended = not piece
            *lines, self._text = (self._text + piece).split(b"\n")
            for line in lines:
                self._note(line)
        seconds = time.monotonic() - self._started
        if ended:
            code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            os.close(self.reports)
            killed = code != 0
            not_run = code == NOT_RUN and self._test == NO_TEST
            test = self._failed or (self._test if killed else "")
            return Outcome(killed, test, seconds=seconds, not_run=not_run)
        late = time.monotonic() - self._since > WAIT_LIMIT_S
        if late or _cpu_s(self._pid) - self._cpu_s > TEST_LIMIT_S:
            self.kill()
            return Outcome(True, self._test, timed_out=True, seconds=seconds)
        return None

    def _note(self, line: bytes) -> None:
        self._since, self._cpu_s = time.monotonic(), _cpu_s(self._pid)
        if line.startswith(b"="):
            self.traces.append(line[1:])
            return
        name = line[1:].decode(errors="replace")
        if line.startswith(b"-"):
            self._failed = self._failed or name
        else:
            self._test = name

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self.reports)
