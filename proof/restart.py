"""The first token after a restart, with a prefix that the server knew before.

Each round asks about a new text of 4,000 tokens (cold), stops the server, starts it, and asks something else
about the same text. The KV state comes back from disk. Times of starting do not count.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.command import conclude, run_command, serving
from bench.load import run_load
from bench.peers import RunningPeer, ServerSettings
from bench.report import Table
from bench.wire import OpenAIApi
from bench.workloads import BenchRequest, single_requests
from bench.workloads.text import prose
from cllm.errors import SetupError
from proof.command import make_parser
from proof.shared.answers import Client

MAX_RATIO = 0.2
SETTLE_S = 3.0  # idle: states are written behind
PARALLEL = 2
QUESTION_WORDS, OUTPUT_TOKENS = 12, 4


def run_restart(
    model: Path | None,
    rounds: int = 5,
    prefix_tokens: int = 4000,
    flags: Sequence[str] = (),
    out: Path | None = None,
    command: Sequence[str] | None = None,
    logs: Path | None = None,
) -> int:
    """Measure, print a table; 0 if the median ratio keeps the bar. Raises SetupError."""
    cells = 2 * -(-prefix_tokens // 256) * 256  # a text may have more tokens than were aimed at
    settings = ServerSettings(model=model, parallel=PARALLEL, ctx_size=PARALLEL * cells)
    rows, ratios = [], []
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--cache-disk-mb", "4096", "--cache-dir", folder, *flags)
        for number in range(rounds):
            with serving(f"restart-{number}-cold", settings, command, logs, flags) as server:
                text = _text(server, number, prefix_tokens)
                cold_s, _, _ = _first_token(server, text, f"cold {number}")
                time.sleep(SETTLE_S)
            with serving(f"restart-{number}-warm", settings, command, logs, flags) as server:
                warm_s, cached, prompt = _first_token(server, text, f"warm {number}")
            ratios.append(warm_s / cold_s)
            figures = (f"{each:.3f}" for each in (cold_s, warm_s, ratios[-1]))
            rows.append((f"{number + 1}", *figures, f"{cached} of {prompt}"))
            print(f"round {number + 1} of {rounds}: {ratios[-1]:.3f}", file=sys.stderr, flush=True)
    failed = median(ratios) > MAX_RATIO
    verdict = f"{'FAIL' if failed else 'pass'}: {median(ratios):.3f}, the bar is {MAX_RATIO}"
    table = Table(("round", "cold, s", "after a restart, s", "ratio", "prompt tokens cached"), rows)
    text = f"{table.markdown()}\n\n{verdict}"
    return conclude("restart", text, {"ratios": ratios}, out, failed=failed)


def _text(server: RunningPeer, number: int, tokens: int) -> str:
    """Prose of about so many tokens, after a warm-up of the server."""
    client = Client(server.address)
    sample = prose(f"restart {number}", 400)
    per_word = len(client.tokenize(sample)) / 400
    client.complete(client.tokenize(prose("warm-up", 40)), OUTPUT_TOKENS, cache_prompt=False)
    return prose(f"restart {number}", int(tokens / per_word))


def _first_token(server: RunningPeer, text: str, name: str) -> tuple[float, int, int]:
    """Seconds to the first token, and how much of the prompt was cached."""
    question = f"{text}\n\n{prose(name, QUESTION_WORDS)}"
    plan = single_requests("restart", [BenchRequest(question, OUTPUT_TOKENS)])
    (answer,) = run_load(server.address, OpenAIApi(), plan).completions
    if answer.error is not None or answer.first_token_s is None:
        raise SetupError(f"no answer: {answer.error}")
    return answer.first_token_s, answer.cached_tokens or 0, answer.prompt_tokens or 0


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__,
        __doc__,
        *("--model", "--out", "--logs", "--command"),
        rounds=(5, "how many"),
        prefix_tokens=(4000, "tokens of the text"),
    )
    parser.add_argument("flags", nargs="*", help="more flags of the server, after --")
    return run_command(parser, arguments, run_restart)
