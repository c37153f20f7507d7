"""The life cycle of requests, slots and cached cells, explored further than in the unit tests.

    make proof ARGS="life-cycle --depth 6"

Every order of events in four small worlds, breadth first: requests that arrive or are cancelled, steps that
are done or fail in each way, the cache being cleared. See `tests/driver/life_cycle.py`. Then each native call
fails once, in random scenarios.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence

from proof.command import ROOT, make_parser
from proof.evidence import Bar, Evidence, record
from tests.driver.life_cycle import WORLDS, Explored, explore, small_scale

# Every native call fails once, in random scenarios.
NATIVE_CALLS = (
    *(sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-k", "every_native_call"),
    *("tests/unit/core/test_scheduler_invariants.py", "tests/unit/core/test_spec_decode_invariants.py"),
)


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__, __doc__, depth=(5, "events in a path"), seconds=(300.0, "for all worlds together")
    )
    options = parser.parse_args(arguments)
    began = time.monotonic()
    explored: list[Explored] = []
    broken: list[str] = []
    for number, world in enumerate(WORLDS, 1):
        until = began + options.seconds * number / len(WORLDS)
        try:
            with small_scale():
                explored.append(explore(world, options.depth, until=until))
            print(f"{world}: {explored[-1]}, {explored[-1].preempted} after a preemption", flush=True)
        except Exception as error:  # the first path that breaks something ends a world
            traceback.print_exc()
            broken += error.__notes__
    complete = len(explored) == len(WORLDS) and all(found.complete for found in explored)
    states, transitions = (
        sum(getattr(found, name) for found in explored) for name in ("states", "transitions")
    )
    variables = {**os.environ, "TEST_PROFILE": "random"}
    failed = subprocess.run(NATIVE_CALLS, cwd=ROOT, env=variables).returncode
    return failed or record(
        Evidence(
            name="life-cycle",
            order=90,
            title="The life cycle as a model",
            about="Every order of events in four small worlds of two slots and three requests, two with "
            "the same prompt, one that may not use the cache: arrival, cancel, a step that is done, finds no "
            "room, fails, is aborted or refused, and the cache being cleared. Each path is played on the "
            "real engine core over the fake runner. Paths that lead to the same state are followed once. The "
            "invariants are checked after every event; then the engine runs until it is idle, and serves one "
            "more request.",
            bars=[
                Bar(
                    "paths with a request that does not end exactly once, a slot leased twice, or a cell "
                    "that is both in use and cached",
                    "0",
                    "; ".join([str(len(broken)), *broken]),
                    not broken,
                ),
                Bar(
                    f"every path of {options.depth} events followed",
                    "all",
                    f"{'all' if complete else 'not all'}: {states:,} states, {transitions:,} transitions",
                    complete,
                ),
            ],
            figures={
                "states after a preemption": sum(found.preempted for found in explored),
                "seconds": round(time.monotonic() - began),
            },
        )
    )
