"""`python -m tests.e2e.golden.record [NAME …]`: record the streams of these cases (all of them)."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.driver.server import Server, make_client
from tests.e2e.golden.cases import CASES, Case
from tests.e2e.golden.normal import Event, normal, parse

RECORDINGS = Path(__file__).parent / "recordings"
PROGRAM = ("import sys; from cllm.testing import main; sys.exit(main(sys.argv[1:]))", "serve")
# Slow enough that pieces come one by one and not joined.
SETTINGS = ("--step-ms", "4", "--parallel", "4")


def scripted_server(log: Path, *arguments: str) -> Server:
    """The whole server on the scripted model."""
    return Server(log, *(arguments or SETTINGS), program=PROGRAM)


def ask(server: Server, case: Case) -> list[Event]:
    """A case's events as they came."""
    body: dict[str, Any] = {**case.body, "stream": True}
    with (
        make_client(base_url=server.url) as client,
        client.stream("POST", case.path, json=body) as response,
    ):
        assert response.status_code == 200, response.read()
        return list(parse(response.iter_lines()))


def recorded(name: str) -> list[Event]:
    return [json.loads(line) for line in (RECORDINGS / f"{name}.jsonl").read_text().splitlines()]


def main(names: list[str]) -> int:
    if unknown := set(names) - set(CASES):
        print(f"no such case: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    RECORDINGS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, scripted_server(Path(folder) / "log") as server:
        for name in names or CASES:
            events = normal(ask(server, CASES[name]))
            lines = [json.dumps(event, ensure_ascii=False) for event in events]
            (RECORDINGS / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
            print(f"{name}: {len(lines)} events")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
