"""The life cycle of requests, slots and cached cells, explored further than in the unit tests.

    make life-cycle ARGS="--depth 6"

Every order of events in four small worlds, breadth first: requests that arrive or are cancelled, steps that
are done or fail in each way, the cache being cleared. See `tests/driver/life_cycle.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from tests.driver.life_cycle import WORLDS, Explored, explore, small_scale
from tests.proof.evidence import Bar, Evidence, record


def main() -> int:
    parser = argparse.ArgumentParser(prog="life_cycle", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--depth", type=int, default=5, help="events in a path")
    parser.add_argument("--seconds", type=float, default=300.0, help="for all worlds together")
    options = parser.parse_args()
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
    return record(
        Evidence(
            name="life-cycle",
            order=90,
            title="The life cycle as a model",
            command=f'make life-cycle ARGS="--depth {options.depth}"',
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


if __name__ == "__main__":
    sys.exit(main())
