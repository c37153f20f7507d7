"""`python -m tests.e2e.fuzz` (`make fuzz`): schemathesis on every route, on a tiny real model."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.driver.server import PATIENCE_S, Server, environment, make_client
from tests.tiny_models import make_dense

LIMIT_S = 3600.0
# Decided otherwise: what a description cannot say is refused (a prompt that is too long, a grammar that is
# wrong), and what clients send though it does not say so is taken (null for what is not given, say).
DECIDED = ("positive_data_acceptance", "negative_data_rejection")
# A request that asks for a time limit of a millisecond gets its 504.
SETTINGS = '[checks]\nnot_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "504"]\n'
# A reload takes seconds, and replaces the children on purpose. POST /props is a 501, as in llama-server.
# /api/pull asks a hub, and /api/delete deletes.
LEFT_OUT = ("/admin/reload", "/props", "/api/pull", "/api/delete")


def fuzz(
    url: str,
    folder: Path,
    examples: int,
    seed: int = 1,
    phases: str = "examples,coverage,fuzzing",
    checks: str = "not_a_server_error",
) -> subprocess.CompletedProcess[str]:
    """Every route, valid and invalid data; the same requests for the same seed. 0: nothing was found."""
    with make_client() as client:
        client.get(f"{url}/openapi.json")  # the first takes longest, and schemathesis waits for 10 s only
    settings = folder / "schemathesis.toml"
    settings.write_text(SETTINGS)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(settings), "run"]
    command += [f"{url}/openapi.json"]
    command += (
        ["--checks", checks, "--exclude-checks", ",".join(DECIDED)]
        if checks == "all"
        else ["--checks", checks]
    )
    command += ["--mode", "all", "--max-examples", str(examples), "--seed", str(seed)]
    for path in LEFT_OUT:
        command += ["--exclude-path", path]
    command += ["--generation-database", "none", "--phases", phases, "--request-timeout", str(PATIENCE_S)]
    return subprocess.run(
        [*command, "--no-color"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=environment(),
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.fuzz", description=__doc__)
    parser.add_argument("--examples", type=int, default=100, help="of each route (default 100)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checks", default="all", help="of schemathesis, comma-separated (default all)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_dense(folder / "dense.gguf")
        settings = ("--parallel", "4", "--ctx-size", "1024", "--threads", "1", "--state-dir", name)
        with Server(folder / "log", str(model), *settings) as server:
            before = {role: server.child(role) for role in ("engine", "tokenizer")}
            done = fuzz(server.url, folder, options.examples, options.seed, checks=options.checks)
            print(done.stdout)
            died = [role for role, pid in before.items() if server.child(role) != pid]
            if died:
                print(f"FAIL: these processes died: {', '.join(died)}\n{server.log_tail}")
            return 1 if died else done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
