"""The failures in a server's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.server_log import find_failures
from tests.driver.server import Server

TIME = "2026-11-17 17:20:32,807"
DEATH = f"{TIME} ERROR   cllm.frontend.engine_client the engine died: SIGKILL (0 requests lost, 1 go on)"
TOKENIZER = f"{TIME} WARNING cllm.workers.executor the tokenizer process ended: SIGSEGV"


@pytest.mark.parametrize(
    ("line", "fails"),
    [
        (DEATH, True),
        (TOKENIZER, True),
        (f"{TIME} CRITICAL cllm.frontend.engine_client the engine is given up", True),
        (f"{TIME} WARNING cllm.workers.channel the engine process did not exit by itself: killing it", True),
        (f"{TIME} INFO    cllm.frontend.request_log request 1: ERROR in a name", False),
        (f"{TIME} WARNING cllm.server.serve no API key is set", False),
    ],
)
def test_errors_and_deaths_of_workers_are_failures(line: str, fails: bool) -> None:
    assert find_failures(f"{TIME} INFO    cllm x\n{line}\nelsewhere\n") == [line] * fails


class LoggedServer(Server):
    """A server of which there is only a log."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._expected = []


def test_a_server_may_fail_only_as_its_test_announced(tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = LoggedServer(log)
    log.write_text(f"{DEATH}\n")
    with pytest.raises(AssertionError, match="the engine died"):
        server.check_failures()
    server.expect_failure("the engine died", 1)
    server.check_failures()
    log.write_text(f"{DEATH}\n{TOKENIZER}\n")
    with pytest.raises(AssertionError, match="tokenizer process"):
        server.check_failures()
    log.write_text(f"{DEATH}\n{DEATH}\n")
    with pytest.raises(AssertionError, match="1 lines"):
        server.check_failures()
