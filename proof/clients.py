"""Suites of other people's clients, in an environment of their own.

LangChain's standard tests (ChatOpenAI with both APIs, ChatAnthropic), LiteLLM, openai-agents, Instructor and
LlamaIndex, at their newest, against the embedded model. They are fetched first, unless `--installed`. A
failure that says what the small model answered, and not what the server did, is listed in KNOWN with its
reason.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from subprocess import STDOUT, TimeoutExpired, run
from typing import NamedTuple
from xml.etree import ElementTree

from bench.command import conclude, run_command
from bench.report import Table
from cllm.build.toolchain import cache_directory
from cllm.errors import SetupError
from proof.command import make_parser
from proof.shared.agent_programs import run_quietly
from tests.driver.server import Server
from tests.e2e.clients import QUIET

SUITES = Path(__file__).parent / "client_suites"
PACKAGES = (
    *("pytest", "pytest-timeout", "openai", "anthropic"),
    *("langchain-tests", "langchain-openai", "langchain-anthropic"),
    *("litellm", "openai-agents", "instructor", "llama-index-core", "llama-index-llms-openai-like"),
)
# Without a penalty the small model says the same over and over, until a limit cuts it.
SERVER = ("--parallel", "4", "--ctx-size", "32768", "--defaults", '{"repetition_penalty": 1.3}')
# Test, without what stands in brackets → why the embedded model fails it.
KNOWN: dict[str, str] = {
    "::test_parallel_calls": "tool_choice is auto, and the model answers in words",
    **{
        f"{kind}::{name}": reason
        for kind in ("TestChatOpenAI", "TestChatOpenAIResponses", "TestChatAnthropic")
        for name, reason in (
            ("test_agent_loop", "tool_choice is auto, and the model answers in words"),
            ("test_json_mode", "any JSON object is allowed, and the model makes up keys"),
            ("test_unicode_tool_call_integration", "the model calls the customer {{company}}"),
            ("test_tool_calling", "one call is enough, and the model makes four, with other numbers"),
            ("test_tool_calling_async", "one call is enough, and the model makes four, with other numbers"),
        )
    },
}


class Outcome(NamedTuple):
    """One test of a suite: passed, failed, skipped or known, and why."""

    suite: str
    name: str
    result: str
    reason: str


def clients_folder() -> Path:
    """The environment of the clients: never the project's own."""
    return cache_directory() / "clients"


def install() -> None:
    """Install the newest versions. Raises SetupError."""
    python = clients_folder() / "bin" / "python"
    if not python.exists():
        run_quietly(sys.executable, "-m", "venv", str(clients_folder()))
    run_quietly(str(python), "-m", "pip", "install", "--quiet", "--upgrade", *PACKAGES)


def run_suite(name: str, url: str, folder: Path, limit_s: float, only: str) -> list[Outcome]:
    """The outcomes of one suite. Raises SetupError where it does not run."""
    python = clients_folder() / "bin" / "python"
    if not python.exists():
        raise SetupError("the clients are not installed")
    report, log = folder / f"{name}.xml", folder / f"{name}.log"
    command = f"{python} -P -m pytest -q -p no:cacheprovider --noconftest --timeout=300"
    command += " -o asyncio_mode=auto -o asyncio_default_test_loop_scope=session"  # clients outlive a test
    options = ["-c", os.devnull, f"--rootdir={folder}", f"--junitxml={report}", "-k", only]
    command_line = [*command.split(), *options, str(SUITES / f"suite_{name}.py")]
    variables = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8", "CLLM_URL": url, **QUIET}
    with log.open("w") as file:
        try:
            run(command_line, cwd=folder, env=variables, stdout=file, stderr=STDOUT, timeout=limit_s)
        except TimeoutExpired:
            raise SetupError(f"{name}: not done after {limit_s:.0f} s") from None
    if not report.exists():
        raise SetupError(f"{name}: {log.read_text()[-600:]}")
    return [_read_case(name, case) for case in ElementTree.parse(report).iter("testcase")]


def _read_case(suite: str, case: ElementTree.Element) -> Outcome:
    place = case.get("classname", "").rpartition(".")[2].removeprefix("suite_")
    name = f"{place}::{case.get('name')}"
    for tag, result in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (found := case.find(tag)) is not None:
            known = KNOWN.get(name.partition("[")[0]) if result == "failed" else None
            reason = known or " ".join((found.get("message") or found.text or "").split())[:300]
            return Outcome(suite, name, "known" if known else result, reason)
    return Outcome(suite, name, "passed", "")


def show(outcomes: Sequence[Outcome]) -> str:
    """A table by suite, then every failure with its reason."""
    counts = Counter((outcome.suite, outcome.result) for outcome in outcomes)
    results = ("passed", "failed", "known", "skipped")
    suites = list(dict.fromkeys(outcome.suite for outcome in outcomes))
    rows = [(suite, *(str(counts[suite, result]) for result in results)) for suite in suites]
    lines = [
        f"{one.result}: {one.name}: {one.reason}" for one in outcomes if one.result in ("failed", "known")
    ]
    return "\n".join([Table(("suite", *results), rows).markdown(), "", *lines])


def run_clients(
    suite: Sequence[str] = (),
    installed: bool = False,
    only: str = "",
    limit_s: float = 1800.0,
    out: Path | None = None,
    logs: Path | None = None,
) -> int:
    """Run the suites, print the table; 0 if nothing failed but what is known. Raises SetupError."""
    if not installed:
        install()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = (logs or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "server.log").unlink(missing_ok=True)  # it names an address that is gone
        with Server(folder / "server.log", *SERVER) as server:
            for name in suite or sorted(path.stem.removeprefix("suite_") for path in SUITES.glob("suite_*")):
                outcomes += run_suite(name, server.url, folder, limit_s, only)
                print(f"{name}: done", file=sys.stderr, flush=True)
    failed = any(outcome.result == "failed" for outcome in outcomes)
    return conclude("clients", show(outcomes), outcomes, out, failed=failed)


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__,
        __doc__,
        *("--out", "--logs"),
        limit_s=(1800.0, "of one suite, seconds"),
        suite=([], "langchain, litellm …"),
        only=("", "tests with this in their name, as pytest's -k"),
        installed=(False, "use what is installed, rather than the newest versions"),
    )
    return run_command(parser, arguments, run_clients)
