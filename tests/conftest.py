"""Fixtures of more than one folder: models, runners, servers; and the count of ties at the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cllm.backend.base import ModelRunner
from tests.driver.browser import NO_BROWSER
from tests.driver.kinds import Kind, Opened, open_runner
from tests.driver.same_text import Reference, Tally
from tests.driver.server import PATIENCE_S, StartServer, start_servers
from tests.profiles import load_profile
from tests.tiny_architectures import make_all

_TALLY = pytest.StashKey[Tally]()
_LEFT_OUT = pytest.StashKey[int]()  # tests of the page, where there is no browser

# Tests that a shell starts in the background ignore Ctrl-C, and so would the servers they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """A full collection takes half a second, unless it leaves out what is here now: modules and tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own, within a limit."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await pyfuncitem.obj(**given)

    asyncio.run(run())
    return True


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """A command that a test ran in this process has set up its logging: not for the tests after it."""
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny GGUFs, by kind."""
    return make_all(tmp_path_factory.mktemp("models"))


@pytest.fixture
def opened(models: dict[str, Path]) -> Iterator[Opened]:
    """Opens runners that are closed when the test is over: `opened(kind, sequences=…, …)`."""
    runners: list[ModelRunner] = []

    def make(kind: Kind, **options: int) -> ModelRunner:
        runners.append(open_runner(models, kind, **options))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


@pytest.fixture(scope="session")
def reference(models: dict[str, Path], pytestconfig: pytest.Config) -> Iterator[Reference]:
    """The greedy answer to each prompt alone."""
    reference = Reference(models, pytestconfig.stash[_TALLY])
    yield reference
    reference.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartServer]:
    """Start servers for one test; those that still run afterwards are killed. None may have failed."""
    with start_servers(tmp_path) as start_one:
        yield start_one


# The figures of the same-text rule are counted in each process (with `-n 2`: each worker), then added up.


def pytest_configure(config: pytest.Config) -> None:
    load_profile(config)
    config.stash[_TALLY] = Tally()


def pytest_sessionfinish(session: pytest.Session) -> None:
    tally = session.config.stash[_TALLY]
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["same_text"] = dict(tally)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist is done; one that crashed has no output."""
    node.config.stash[_TALLY].update(getattr(node, "workeroutput", {}).get("same_text", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if tally := config.stash[_TALLY]:
        terminalreporter.write_line(str(tally))
    skipped = terminalreporter.stats.get("skipped", ())
    config.stash[_LEFT_OUT] = sum(NO_BROWSER in str(report.longrepr) for report in skipped)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Say in the last line what was left out, and what adds it."""
    if count := config.stash.get(_LEFT_OUT, 0):
        print(f"left out: {count} tests of the page: no browser; `apt-get install chromium` adds them")
