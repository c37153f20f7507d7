"""`python -m tests.soak.formats`: every chat template of llama.cpp's source against parser and grammar.

First, the last turn of many generated conversations, written by the template, must be read back: the same
calls, text and reasoning, in random pieces down to single characters. Then calls are forced on a tiny model
with random weights and the family's special tokens: what was not cut must validate.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.driver.corpus import template_files
from tests.driver.forced_calls import check_forced, make_model
from tests.driver.turns import Family, check_turns


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.formats", description=__doc__)
    parser.add_argument("--turns", type=int, default=200, help="conversations of each template")
    parser.add_argument("--forced", type=int, default=4, help="forced answers of each template")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only templates with this in their name")
    options: Any = parser.parse_args(arguments)
    failed = 0
    for name, path in template_files().items():
        if options.only not in name:
            continue
        family = Family(name, path.read_text(encoding="utf-8"))
        turns, faults = check_turns(family, options.seed, options.turns)
        faults += [] if turns else ["no conversation could be written"]
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(family, Path(folder, "tiny.gguf"))
            complete, cut, broken = check_forced(model, range(options.forced))
        failed += bool(faults or broken)
        print(f"{name}: {turns} turns; {complete} forced answers, {cut} cut", *faults, *broken, sep="\n  ")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
