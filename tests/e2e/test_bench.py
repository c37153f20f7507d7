"""`python -m bench`: a workload from a file, on the tiny model, beside a running server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.driver.server import PATIENCE_S, ROOT, Server, environment

FILE = """
name = "visit"
about = "two users talk, one comes late"
parallel = 4
ctx_size = 2048

[[groups]]
name = "talks"
count = 2
turns = 2
prompt_tokens = 12
output_tokens = [12, 16]
clients = 2

[[groups]]
name = "late"
count = 2
prompt_tokens = 40
output_tokens = 4
rate = 50.0
after_chunks = 3

[[bars]]
figure = "tokens_per_second"
at_least = 1000.0
"""


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=10 * PATIENCE_S
    )


def test_a_bench_from_a_file_beside_a_running_server(tiny: Server, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "visit.toml").write_text(FILE)
    arguments = [str(tiny_model), "--quick", "--rounds", "1", "--threads", "1"]
    arguments += ["--workload", str(tmp_path / "visit.toml"), "--peer", f"twin={tiny.url}/v1"]
    done = bench(*arguments, "--out", str(tmp_path / "report"))
    assert done.returncode == 0, done.stderr
    assert "every request answered in full" in done.stdout and "12 of 12" in done.stdout
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert {one["peer"] for one in report["rounds"]} == {"cllm", "twin"}
    for one in report["rounds"]:
        assert [request["late"] for request in one["requests"]] == [False] * 4 + [True] * 2
        assert all(12 <= request["generated_tokens"] <= 16 for request in one["requests"][:4])
        first, second = one["requests"][:2]
        assert second["prompt_tokens"] > first["prompt_tokens"] + first["generated_tokens"]
        assert one["figures"]["tokens_per_second"] > 0
    texts = (tmp_path / "report" / "REPORT.md").read_text()
    assert "## visit" in texts and "cllm / twin" in texts
    assert (tmp_path / "report" / "plots" / "gaps.png").is_file()


def test_what_cannot_be_measured_is_said_at_once(tmp_path: Path) -> None:
    for arguments in (["--workload", "fastest"], ["--peer", "http://127.0.0.1:9"]):
        done = bench(*arguments)
        assert done.returncode != 0 and "Traceback" not in done.stderr
        assert "fastest" in done.stderr or "127.0.0.1:9" in done.stderr
