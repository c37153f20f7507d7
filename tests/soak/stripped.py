"""`python -m tests.soak.stripped`: what a turn computes again when the thoughts of the last one are stripped.

A conversation on each kind of memory: one that can be cut, a sliding window, recurrent, hybrid. Each answer
comes back without its first half. Nothing before it has changed, so a turn should compute what follows: the
rest of the answer, the new message, and little else. Without `--model` or `--kind`, tiny models of all kinds.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from bench.command import conclude, make_parser, run_command, serving
from bench.peers import ServerSettings
from bench.report import Table
from bench.workloads.text import prose
from tests.soak.answers import Answer, Client
from tests.tiny_architectures import make_all

KINDS = ("dense", "sliding", "recurrent", "hybrid", "hybrid-rollback", "hybrid-delta")
MAX_RATIO = 1.1
PARALLEL, CELLS = 2, 4096
SYSTEM_WORDS, MESSAGE_WORDS, OUTPUT_TOKENS = 100, 60, 40


def talk(client: Client, turns: int) -> list[Answer]:
    """One conversation whose answers come back stripped."""
    messages = [{"role": "system", "content": prose("system", SYSTEM_WORDS)}]
    answers = []
    for turn in range(turns):
        messages.append({"role": "user", "content": prose(f"message {turn}", MESSAGE_WORDS)})
        answers.append(client.chat(messages, OUTPUT_TOKENS))
        text = answers[-1].text
        messages.append({"role": "assistant", "content": text[len(text) // 2 :]})
    return answers


def measure_ratios(answers: Sequence[Answer]) -> list[float]:
    """By turn: tokens computed over the new ones. What opens an answer is not new, and counts as computed."""
    turns = pairwise(answers)
    return [later.computed_tokens / (later.prompt_tokens - before.prompt_tokens) for before, later in turns]


def run_stripped(
    model: Path | None,
    kind: Sequence[str] = (),
    turns: int = 6,
    flags: Sequence[str] = (),
    out: Path | None = None,
    command: Sequence[str] | None = None,
    logs: Path | None = None,
) -> int:
    """Talk to each model, print a table; 0 if no turn computes too much again. Raises SetupError."""
    rows, worst = [], {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tiny = {} if model is not None else make_all(folder)
        models = {model.stem: model} if model is not None else {name: tiny[name] for name in kind or KINDS}
        for name, path in models.items():
            settings = ServerSettings(model=path, parallel=PARALLEL, ctx_size=PARALLEL * CELLS)
            with serving(f"stripped-{name}", settings, command, logs, flags) as server:
                answers = talk(Client(server.address), turns)
            ratios = measure_ratios(answers)
            worst[name] = max(ratios)
            prompts = sum(answer.prompt_tokens for answer in answers)
            cached = sum(answer.cached_tokens for answer in answers)
            sources = sorted({answer.cached_from for answer in answers} - {""})
            shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
            rows.append((name, shown, f"{cached} of {prompts}", ", ".join(sources) or "–"))
    late = [name for name, ratio in worst.items() if ratio > MAX_RATIO]
    table = Table(("model", "computed / new, by turn", "prompt tokens cached", "from"), rows)
    verdict = f"FAIL: more than {MAX_RATIO} on {', '.join(late)}" if late else "pass"
    return conclude("stripped", f"{table.markdown()}\n\n{verdict}", worst, out, failed=bool(late))


def main(arguments: Sequence[str] | None = None) -> int:
    shared = ("--model", "--out", "--logs", "--command")
    parser = make_parser("tests.soak.stripped", __doc__, *shared, turns=(6, "of each conversation"))
    parser.add_argument(
        "--kind", action="append", default=[], help="a tiny model of the tests; again for more"
    )
    parser.add_argument("flags", nargs="*", help="more flags of the server, after --")
    return run_command(parser, arguments, run_stripped)


if __name__ == "__main__":
    sys.exit(main())
