"""The harness of the agents: what it reads from answers and outputs, and how programs end."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest

from cllm.errors import SetupError
from cllm.testing import call_tool, say
from proof.agents import Arena, Failed, check_compacted, find_later, judge, measure_cached, run_group, shows
from proof.shared import agent_programs
from proof.shared.agent_programs import PROGRAMS, NodeProgram, Program
from tests.driver.recorder import Exchange, PromptTokens, Recorder
from tests.driver.server import alive, wait_for


def exchange(usage: dict[str, object], holder: str = "", body: bytes = b"{}") -> Exchange:
    event = {holder: {"usage": usage}} if holder else {"usage": usage}
    answer = f"event: x\ndata: {json.dumps(event)}\n\ndata: [DONE]\n\n"
    return Exchange("POST", "/v1/x", body, 200, answer.encode())


@pytest.mark.parametrize(
    ("holder", "usage"),
    [
        ("", {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 96}}),
        ("response", {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 96}}),
        ("message", {"input_tokens": 4, "cache_read_input_tokens": 96, "cache_creation_input_tokens": 0}),
    ],
)
def test_cached_tokens_are_read_from_every_api(holder: str, usage: dict[str, object]) -> None:
    assert exchange(usage, holder).prompt_tokens == PromptTokens(100, 96)


def test_the_cached_part_is_of_all_prompts() -> None:
    cold = exchange({"prompt_tokens": 1000})
    warm = exchange({"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": 990}})
    assert measure_cached([warm, warm, cold, Exchange("GET", "/v1/models", b"")]) == pytest.approx(0.66)
    with pytest.raises(Failed):
        measure_cached([Exchange("POST", "/v1/x", b"{}")])


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_title_may_be_asked_for_at_any_time(order: Sequence[int]) -> None:
    """opencode asks for one beside its first request; either may come first."""
    title = exchange({"prompt_tokens": 100}, body=b'{"messages": []}')
    asked = [exchange({"prompt_tokens": size}, body=b'{"tools": [{}]}') for size in (1000, 1001, 1002)]
    exchanges = [title, *asked]
    with_tools = [exchanges[at] for at in order if at]
    assert find_later(exchanges[at] for at in order) == with_tools[1:]


def test_an_answer_does_not_count_where_the_prompt_is_shown() -> None:
    script = say(call_tool("read", {"path": "x"}), "It is done.")
    for shown in (f"Answer={script}", json.dumps(f"Answer={script}")):
        assert not shows(shown, "It is done.")
        assert shows(f"{shown}\nIt is done.", "It is done.")


def test_a_program_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    begin = f"import os, pathlib, time; pathlib.Path({str(pids)!r}).write_text(str(os.getpid()))"
    child = f"{begin}; time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    for limit_s in (0.5, 4.0, 30.0):  # how soon the child runs depends on the machine
        with pytest.raises(Failed, match="not done"):
            run_group((sys.executable, "-c", parent), tmp_path, {}, limit_s)
        if pids.exists() and pids.read_text():
            break
    wait_for(lambda: not alive(int(pids.read_text())))


def test_programs_are_installed_apart() -> None:
    assert len({program.folder for program in PROGRAMS}) == len(PROGRAMS)


def test_the_newest_version_with_its_binary_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    versions = {"opencode-ai": ["1.2.9", "1.2.10", "1.3.0-beta"]}
    binaries = ["1.2.9", "1.2.10", "1.2.11", "1.3.0-beta"]
    installed: list[str] = []

    def run(*command: str, cwd: Path | None = None) -> str:
        if command[1] == "view":
            return json.dumps(versions.get(command[2], binaries))
        installed.append(command[-1])
        return ""

    monkeypatch.setattr(agent_programs, "run_quietly", run)
    monkeypatch.setattr(agent_programs, "agents_folder", lambda: tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: name)
    (program,) = (one for one in PROGRAMS if isinstance(one, NodeProgram) and one.package == "opencode-ai")
    program.install()
    binaries[:] = ["1.2.9"]
    program.install()
    assert installed == ["opencode-ai@1.2.10", "opencode-ai@1.2.9"]
    binaries[:] = ["0.1.0"]
    with pytest.raises(SetupError, match="no version"):
        program.install()


def test_a_last_prompt_about_as_large_as_the_largest_is_not_compacted() -> None:
    assert check_compacted([22_000, 66_000, 2_600, 41_000]) == "66,000 → 41,000 bytes"
    with pytest.raises(Failed, match="66,000"):
        check_compacted([22_000, 66_000, 65_000])


def test_a_failure_is_printed_with_its_reason_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def play(arena: Arena, program: Program, name: str) -> str:
        if name == "tools":
            raise Failed("the file says 'alpha'")
        return "3 bytes"

    monkeypatch.setattr(Arena, "play", play)
    failures: list[str] = []
    with ExitStack() as stack:
        cells = judge(Arena(tmp_path, 1.0, None, stack), PROGRAMS[0], ["text", "tools"], failures)
    assert cells == {"text": "passed, 3 bytes", "tools": "failed"}
    assert failures == ["Claude Code, tools: the file says 'alpha'"]
    shown = capsys.readouterr().err.splitlines()
    assert shown == [
        "Claude Code, text: passed, 3 bytes",
        "Claude Code, tools: failed: the file says 'alpha'",
    ]


class _Echo(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_the_recorder_keeps_what_passes_and_lets_nothing_out() -> None:
    with HTTPServer(("127.0.0.1", 0), _Echo) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with Recorder(f"http://127.0.0.1:{server.server_port}") as recorder:
            answer = httpx.post(f"{recorder.url}/v1/x", json={"a": 1}, trust_env=False)
            assert answer.json() == {"a": 1}
            with (
                httpx.Client(proxy=recorder.url, trust_env=False) as outward,
                pytest.raises(httpx.ProxyError),
            ):
                outward.get("https://example.invalid/")
        server.shutdown()
    (kept,) = recorder.exchanges
    assert (kept.path, kept.json, kept.status) == ("/v1/x", {"a": 1}, 200)
    assert recorder.refused == {"example.invalid:443"}
