"""schemathesis reads the OpenAPI description and sends what it allows and what it does not: never a 5xx.

Here on the scripted model with a small context, so that no request is expensive, and with few examples.
`proof/fuzz_routes.py` runs longer, on a real (tiny) model, and tries every limit of every field.
"""

from __future__ import annotations

from pathlib import Path

from proof.fuzz_routes import fuzz
from tests.driver.server import wait_for
from tests.e2e.golden.record import scripted_server

EXAMPLES = 2


def test_no_request_makes_it_fail(tmp_path: Path) -> None:
    with scripted_server(tmp_path / "log", "--parallel", "4", "--ctx-size", "1024") as server:
        before = {role: server.child(role) for role in ("engine", "tokenizer")}
        done = fuzz(server.url, tmp_path, EXAMPLES, phases="examples,fuzzing")
        assert done.returncode == 0, done.stdout[-6000:]
        assert " 0 selected" not in done.stdout
        wait_for(server.idle)
        assert {role: server.child(role) for role in ("engine", "tokenizer")} == before, (
            "a process died of it"
        )
        assert "Traceback" not in server.log_text
