"""1 GB from a throttled hub, killed 20 times, and its speed beside curl's.

The hub is on loopback and sends 125 MB/s at most. Killed pulls may fetch at most 2 % of the bytes again; the
result has the listed hash. Alternating rounds compare the time of a whole pull with that of curl.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from proof.command import make_parser
from tests.driver.hub import FakeHub
from tests.tiny_models import make_dense

REPO, NAME = "Example/Big", "big-Q8_0.gguf"
RATE = 125e6
MAX_AGAIN = 0.02
MIN_SPEED = 0.95
LIMIT_S = 300


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__,
        __doc__,
        size_mb=(1000, "of the file"),
        kills=(20, "of the pull"),
        rounds=(3, "beside curl"),
        seed=(1, "of the kills"),
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        model = make_dense(folder / "tiny.gguf").read_bytes()
        data = model + np.random.default_rng(0).bytes(options.size_mb * 10**6 - len(model))
        with FakeHub({REPO: {NAME: data}}) as hub:
            hub.bytes_per_s, hub.piece = RATE, 128 << 10
            variables = {**os.environ, **hub.environment, "HF_HOME": str(folder / "hf"), "HF_TOKEN": ""}
            again = run_killed(hub, variables, options.kills, random.Random(options.seed))
            ratio = compare(hub, variables, folder, options.rounds)
    print(f"fetched again: {again:.2%} of the bytes (bar {MAX_AGAIN:.0%}), {options.kills} kills")
    print(f"speed: {ratio:.3f} of curl's (bar {MIN_SPEED})")
    return 0 if again <= MAX_AGAIN and ratio >= MIN_SPEED else 1


def start_pull(variables: dict[str, str], *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cllm", "pull", "--json", "--force", *more, f"hf:{REPO}"]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_killed(hub: FakeHub, variables: dict[str, str], kills: int, chance: random.Random) -> float:
    """The share of the bytes that were fetched more than once."""
    data = hub.repos[REPO][NAME]
    for number in range(kills):
        with start_pull(variables) as process:
            sent = hub.sent
            deadline = time.monotonic() + LIMIT_S
            while hub.sent == sent and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(chance.uniform(0.0, 0.6 * len(data) / RATE / kills * 2))
            process.send_signal(signal.SIGKILL)
        print(f"kill {number + 1}: {hub.sent / 1e6:.0f} MB sent")
    with start_pull(variables) as process:
        output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    path = Path(json.loads(output)["path"])
    assert hashlib.sha256(path.read_bytes()).hexdigest() == hub.digest(data)
    return hub.sent / len(data) - 1


def compare(hub: FakeHub, variables: dict[str, str], folder: Path, rounds: int) -> float:
    """The speed of pulls, by that of curl before each."""
    url = f"{hub.url}/{REPO}/resolve/main/{NAME}"
    ratios: list[float] = []
    for number in range(rounds):
        began = time.monotonic()
        subprocess.run(["curl", "-sSL", "-o", str(folder / "curl"), url], check=True, timeout=LIMIT_S)
        curl_s = time.monotonic() - began
        with start_pull(variables, "--to", str(folder / f"to{number}")) as process:
            output, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, errors
        pull_s: float = json.loads(output)["seconds"]
        ratios.append(curl_s / pull_s)
        print(f"round {number + 1}: curl {curl_s:.2f} s, pull {pull_s:.2f} s with header, hash and disk")
        for path in (folder / f"to{number}").iterdir():
            path.unlink()
    return median(ratios)
