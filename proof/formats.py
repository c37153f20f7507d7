"""Every chat template of llama.cpp's source against parser and grammar.

First, the last turn of many generated conversations, written by the template, must be read back: the same
calls, text and reasoning, in random pieces down to single characters. Then answers of calls are drawn from
the grammar (`drawn_calls`): all must be read, and validate. Last, calls are forced on a tiny model with
random weights and the family's special tokens: what was not cut must validate.

Each template's result is kept in a file at once. A run that was ended goes on there with --resume.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import Table
from proof.command import ROOT, make_parser
from proof.shared.drawn_calls import CallDrawer
from proof.shared.kept import Kept
from tests.driver.corpus import template_files
from tests.driver.forced_calls import check_forced, make_model
from tests.driver.turns import Family, check_turns

SHOWN_FAULTS = 5  # of each kind
MAX_TOKENS = 2000  # of an answer on the tiny model, whose tokens are bytes


def check_template(family: Family, options: Any) -> dict[str, Any]:
    """The figures of one template, with what is wrong."""
    started = time.monotonic()
    turns, faults = check_turns(family, options.seed, options.turns)
    faults = faults[:SHOWN_FAULTS] if turns or not options.turns else ["no conversation could be written"]
    drawer = CallDrawer(family)
    drawn = drawer.draw(range(options.seed, options.seed + options.drawn))
    faults += drawn.faults[:SHOWN_FAULTS]
    complete, cut = 0, 0
    if options.forced:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(family, Path(folder, "tiny.gguf"))
            seeds = range(options.seed, options.seed + options.forced)
            complete, cut, broken = check_forced(model, seeds, MAX_TOKENS)
            faults += broken[:SHOWN_FAULTS]
    return {
        "style": str(family.format.calls.style),
        "turns": turns,
        "drawn": {
            "answers": options.drawn,
            "complete": drawn.complete,
            "calls": drawn.calls,
            "wrong": len({fault.partition(":")[0] for fault in drawn.faults}),
        },
        "forced": {"complete": complete, "cut": cut},
        "faults": faults,
        "seconds": round(time.monotonic() - started, 1),
    }


def is_done(found: dict[str, Any] | None, options: Any) -> bool:
    """Whether a template has been tried as often as is wanted."""
    return found is not None and (
        found["drawn"]["answers"] >= options.drawn and sum(found["forced"].values()) >= options.forced
    )


def show(results: dict[str, dict[str, Any]]) -> str:
    """The figures by the style of the calls."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0] * 7)
    for found in results.values():
        drawn, forced = found["drawn"], found["forced"]
        figures = (1, found["turns"], drawn["answers"], drawn["complete"], drawn["calls"], drawn["wrong"])
        for style in (found["style"], "all"):
            sums[style] = [a + b for a, b in zip(sums[style], (*figures, forced["complete"]), strict=True)]
    heads = ("calls", "templates", "turns", "drawn answers", "complete", "calls read", "wrong", "forced")
    rows = [(style, *(f"{figure:,}" for figure in figures)) for style, figures in sorted(sums.items())]
    return Table(heads, rows).markdown()


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__,
        __doc__,
        turns=(200, "conversations of each template"),
        drawn=(200, "answers of each template by its grammar"),
        forced=(200, "answers of each template on a tiny model"),
        seed=(0, "of all of them"),
        only=("", "templates with this in their name"),
        resume=(False, "skip the templates that were tried before"),
        seconds=(3600.0, "after these, no template is begun"),
    )
    options = parser.parse_args(arguments)
    kept = Kept(ROOT / "build" / "formats.jsonl", dict[str, Any], fresh=not options.resume)
    known = kept.found
    started, left = time.monotonic(), 0
    for name, path in template_files().items():
        if options.only not in name or is_done(known.get(name), options):
            continue
        if time.monotonic() - started > options.seconds:
            left += 1
            continue
        found = check_template(Family(name, path.read_text(encoding="utf-8")), options)
        kept.add(name, found)
        figures = {key: value for key, value in found.items() if key != "faults"}
        print(f"{name}: {json.dumps(figures)}", *found["faults"], sep="\n  ", flush=True)
    failed = [name for name, found in known.items() if found["faults"]]
    print(show(known), f"wrong: {', '.join(failed) or 'none'}", f"left: {left}", sep="\n")
    return int(bool(failed or left))
