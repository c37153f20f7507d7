"""Mutation testing: 600 small changes of the modules that all rests on, and the tests that notice them.

    make proof ARGS=mutants               all of them; what was run before is not run again
    make proof ARGS="mutants --again"     those that survived, after tests were added
    make proof ARGS="mutants --list"      the changes, without running anything

A fixed seed draws the mutants from all changes that `mutation` knows. For each, one process runs the unit
tests of the module with the changed code in its place. A mutant is killed by the first test that fails, or
that takes too long. The list is written to docs/reliability/mutants.txt.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import msgspec

from proof.command import ROOT, make_parser
from proof.evidence import FOLDER, Bar, Evidence, record
from proof.shared.kept import Kept
from proof.shared.mutation import Mutation, mutate

SEED = 600
COUNT = 600
LIST = FOLDER / "mutants.txt"
EQUIVALENT = Path(__file__).parent / "shared" / "equivalent_mutants.txt"

CORE = "tests/unit/core"
ENGINE = tuple(
    f"{CORE}/test_{name}.py"
    for name in (
        *("output_writer", "resume", "prefix_cache", "following_batch", "token_masks", "triggers"),
        *("spec_decode", "scheduler_invariants", "preparation", "slot_choice", "prefill_budget"),
        *("life_cycle", "padding_rows", "spec_decode_invariants", "mask_invariants", "disk_loader"),
    )
)
# The tests for each module, those that fail soonest first.
MODULES = {
    "cllm/core/slot_pool.py": (f"{CORE}/test_slot_pool.py", *ENGINE),
    "cllm/core/sequence.py": (f"{CORE}/test_sequence.py", *ENGINE),
    "cllm/core/scheduler.py": (f"{CORE}/test_scheduler.py", *ENGINE),
    "cllm/core/kv_cache/prefix_index.py": (
        *(f"{CORE}/test_{name}.py" for name in ("radix_index", "prefix_tier", "prefix_cache", "checkpoints")),
        *(f"{CORE}/test_{name}.py" for name in ("host_cache", "slot_choice", "disk_cache", "cache_file")),
    ),
    "cllm/frontend/request_queue.py": tuple(
        f"tests/unit/frontend/test_{name}.py"
        for name in ("request_queue", "request_queue_invariants", "engine_client", "resume_invariants")
    ),
    "cllm/text/detokenizer.py": tuple(
        f"tests/unit/text/test_{name}.py" for name in ("detokenizer", "output_parser", "call_parser")
    ),
}


# Runs of each module as it is: a test that fails there has noticed no mutant.
CONTROLS = {f"control: {path}": path for path in MODULES}
OPTIONS = (
    *("-p", "proof.shared.mutated_module", "-x", "-q", "--tb=no", "--timeout=60"),
    *("-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning"),
)


class Mutant(msgspec.Struct, frozen=True):
    """One of the changes that were drawn."""

    path: str
    index: int  # among all mutations of the module
    digest: str  # of the module
    line: int
    where: str
    change: str

    @property
    def key(self) -> str:
        return f"{self.path}:{self.digest}:{self.index}"

    @property
    def place(self) -> str:
        """Which one it is, for the list of the equivalent ones."""
        return f"{Path(self.path).name}:{self.line} | {self.where} | {self.change}"


class Outcome(msgspec.Struct, frozen=True):
    """Whether a test noticed, and which."""

    killed: bool
    test: str = ""
    timed_out: bool = False
    seconds: float = 0.0


def draw() -> list[Mutant]:
    """The mutants, in the order of the sources."""
    found: list[Mutant] = []
    for path in MODULES:
        source = (ROOT / path).read_text()
        digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        found += [_describe(path, digest, *each) for each in enumerate(mutate(source))]
    drawn = random.Random(SEED).sample(range(len(found)), COUNT)
    return [found[index] for index in sorted(drawn)]


def _describe(path: str, digest: str, index: int, mutation: Mutation) -> Mutant:
    return Mutant(path, index, digest, mutation.line, mutation.where, mutation.change)


def read_equivalent() -> dict[str, str]:
    """Mutants that no test can tell from the source, each with the reason."""
    lines = (line for line in EQUIVALENT.read_text().splitlines() if line and not line.startswith("#"))
    parts = (line.rsplit(" | ", 1) for line in lines)
    return {place.strip(): reason.strip() for place, reason in parts}


def write_list(mutants: Sequence[Mutant], outcomes: dict[str, Outcome], equivalent: dict[str, str]) -> None:
    lines = [f"# {COUNT} mutants, seed {SEED}: number, place, change, and the first test that noticed it."]
    for number, mutant in enumerate(mutants, 1):
        outcome = outcomes[mutant.key]
        if outcome.killed:
            end = f"killed by {outcome.test}" + (" (too slow)" if outcome.timed_out else "")
        elif reason := equivalent.get(mutant.place):
            end = f"SURVIVED, equivalent: {reason}"
        else:
            end = "SURVIVED"
        lines.append(f"{number:3} {mutant.path}:{mutant.line} {mutant.where}\n    {mutant.change}\n    {end}")
    LIST.parent.mkdir(parents=True, exist_ok=True)
    LIST.write_text("\n".join(lines) + "\n")


def run_tests(path: str, index: int | None) -> Outcome:
    """Run the tests of a module with one mutation of it, or with none, until the first that fails."""
    began = time.monotonic()
    with tempfile.NamedTemporaryFile("r") as report:
        mutant = path if index is None else f"{path}:{index}"
        variables = {**os.environ, "MUTANT": mutant, "MUTANT_REPORT": report.name}
        command = [sys.executable, "-m", "pytest", *OPTIONS, *MODULES[path]]
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
        test = report.read() or "the import"
    timed_out = "+ Timeout +" in done.stderr
    return Outcome(bool(done.returncode), test, timed_out, time.monotonic() - began)


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__,
        __doc__,
        list=(False, "show the mutants, run nothing"),
        again=(False, "run those that survived once more"),
        fresh=(False, "forget all earlier results"),
        jobs=(2, "how many at a time"),
        match=("", "only those with this in their path; records nothing"),
    )
    options = parser.parse_args(arguments)
    mutants = [mutant for mutant in draw() if options.match in mutant.path]
    if options.list:
        for number, mutant in enumerate(mutants, 1):
            print(f"{number:3} {mutant.path}:{mutant.line} {mutant.where}: {mutant.change}")
        return 0
    kept = Kept(ROOT / "build" / "mutants.jsonl", Outcome, fresh=options.fresh)
    outcomes = kept.found
    known = {key for key, outcome in outcomes.items() if outcome.killed or not options.again}
    jobs: dict[str, tuple[str, int | None]] = {key: (path, None) for key, path in CONTROLS.items()}
    jobs |= {mutant.key: (mutant.path, mutant.index) for mutant in mutants}
    left = {key: job for key, job in jobs.items() if key not in known and options.match in job[0]}
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {pool.submit(run_tests, *job): key for key, job in left.items()}
        for number, done in enumerate(as_completed(running), 1):
            key, outcome = running[done], done.result()
            kept.add(key, outcome)
            verdict = f"killed by {outcome.test}" if outcome.killed else "SURVIVED"
            print(f"{number}/{len(left)} {key}: {verdict} in {outcome.seconds:.1f} s", flush=True)
    return 0 if options.match else report(mutants, outcomes)


def report(mutants: Sequence[Mutant], outcomes: dict[str, Outcome]) -> int:
    """Write the list and the evidence; the exit code of the command."""
    equivalent = read_equivalent()
    write_list(mutants, outcomes, equivalent)
    survived = [mutant for mutant in mutants if not outcomes[mutant.key].killed]
    proven = sum(mutant.place in equivalent for mutant in survived)
    for mutant in survived:
        if mutant.place not in equivalent:
            print(f"SURVIVED {mutant.path}:{mutant.line} {mutant.place}")
    killed = len(mutants) - len(survived)
    failed = sum(outcomes[control].killed for control in CONTROLS)
    counts = {"mutants killed, of all": len(mutants)}
    counts["without those shown to be equivalent"] = len(mutants) - proven
    modules = Counter(Path(mutant.path).stem for mutant in mutants)
    lost = Counter(Path(mutant.path).stem for mutant in survived)
    return record(
        Evidence(
            name="mutants",
            order=80,
            title="Mutation testing",
            about=f"{len(mutants)} small changes, drawn with a fixed seed from all that can be made in the "
            "slot pool, the sequence, the scheduler, the index of the KV cache, the request queue and the "
            "detokenizer. Each is killed by the first unit test of its module that fails. Every one of them, "
            "and what became of it, is in [mutants.txt](reliability/mutants.txt).",
            bars=[
                *(
                    Bar(what, "≥ 90 %", f"{killed} of {count}, {killed / count:.1%}", killed / count >= 0.9)
                    for what, count in counts.items()
                ),
                Bar("failures on the source as it is", "0", f"{failed} of {len(CONTROLS)} runs", not failed),
            ],
            figures={
                **{f"{name} killed": f"{modules[name] - lost[name]} of {modules[name]}" for name in modules},
                "killed by a test that did not end": sum(outcomes[each.key].timed_out for each in mutants),
                "survivors shown to be equivalent": proven,
                "seed": SEED,
            },
        )
    )
