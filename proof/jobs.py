"""A batch of 10,000 lines while the server, its engine or its tokenizer is killed 50 times at random.

Every `custom_id` must be answered exactly once, with the text of an undisturbed server. A killed server is
started again on the same folder.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from proof.command import make_parser
from tests.driver.same_text import EXACT
from tests.driver.server import Server, wait_for
from tests.tiny_models import make_dense

ROUTE = "/v1/completions"
ROLES = ("server", "engine", "tokenizer")
SAMPLE = 50  # answers that are compared with an undisturbed server's
LIMIT_S = 3600.0


def make_body(number: int) -> dict[str, Any]:
    return {"prompt": f"Item {number} of a long night", "max_tokens": 24, "temperature": 0}


def make_file(count: int) -> bytes:
    lines = (
        {"custom_id": str(number), "method": "POST", "url": ROUTE, "body": make_body(number)}
        for number in range(count)
    )
    return "\n".join(map(json.dumps, lines)).encode()


class Night:
    """A batch, and a server that is started again whenever it was killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        model = make_dense(folder / "dense.gguf")
        self._arguments = (str(model), "--parallel", "8", *EXACT, "--state-dir", str(folder / "state"))
        self._starts = 0
        self.batch = ""
        self.server = self._start()

    def _start(self) -> Server:
        self._starts += 1
        return Server(self._folder / f"log {self._starts}", *self._arguments).__enter__()

    def begin(self, lines: int) -> None:
        files = {"file": ("night.jsonl", make_file(lines))}
        file = self.server.client.post("/v1/files", data={"purpose": "batch"}, files=files).json()
        answer = self.server.post("/v1/batches", {"input_file_id": file["id"], "endpoint": ROUTE})
        self.batch = answer.json()["id"]

    def look(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.get(f"/v1/batches/{self.batch}")
        return found

    def has_come_to(self, place: int) -> bool:
        counts = self.look()["request_counts"]
        return bool(counts["completed"] + counts["failed"] >= place)

    def kill(self, role: str) -> None:
        if role == "server":
            self.server.kill()
            self.server = self._start()
        else:
            wait_for(lambda: self.server.client.get("/ready").is_success)
            self.server.kill_worker(role)

    def read(self, file: str | None) -> list[dict[str, Any]]:
        if file is None:
            return []
        text = self.server.client.get(f"/v1/files/{file}/content", timeout=LIMIT_S).text
        return [json.loads(line) for line in text.splitlines()]


def main(arguments: Sequence[str]) -> int:
    own = {"lines": (10_000, "lines of the batch"), "kills": (50, "kills"), "seed": (1, "of the kills")}
    parser = make_parser(__name__, __doc__, **own)
    given = parser.parse_args(arguments)
    source = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        night = Night(Path(folder))
        try:
            night.begin(given.lines)
            for place in sorted(source.sample(range(1, given.lines), given.kills)):
                wait_for(partial(night.has_come_to, place), LIMIT_S)
                night.kill(source.choice(ROLES))
            wait_for(lambda: night.look()["status"] == "completed", LIMIT_S)
            return check(night, given.lines, source)
        finally:
            night.server.kill()


def check(night: Night, lines: int, source: random.Random) -> int:
    """Print what was found; 1 if a line is missing, doubled, failed, or answered otherwise."""
    batch = night.look()
    answers, failed = night.read(batch["output_file_id"]), night.read(batch["error_file_id"])
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in answers}
    doubled, missing = len(answers) - len(texts), lines - len(texts)
    with httpx.Client(base_url=night.server.url, trust_env=False, timeout=60) as client:
        sample = source.sample(range(lines), min(SAMPLE, lines))
        undisturbed = {number: client.post(ROUTE, json=make_body(number)).json() for number in sample}
    other = sum(texts.get(str(number)) != said["choices"][0]["text"] for number, said in undisturbed.items())
    print(f"{lines} lines: {doubled} doubled, {missing} missing, {len(failed)} failed, {other} other texts")
    return int(bool(doubled or missing or failed or other))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
