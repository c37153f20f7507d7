"""Answers of models whose head drafts (MTP), under mixed load, are those of plain decoding alone.

Two tiny F32 models, of attention alone and a hybrid, are asked alone without cache and drafts. Then all is
asked many at once, in too few cells, with RAM and disk behind them, while the engine is killed again and
again; once more without kills; and after a restart, from disk. A third model's head is right about 0.8 of all
tokens: of its drafts the same part is accepted after the restart as before it.

It fails where a tier, a kill, preemption or drafts took no part: then it proves nothing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.command import conclude, run_command
from bench.report import Table
from bench.wire import Address
from proof.adapters import (
    CELLS,
    EXACT,
    FAILURES,
    OUTPUT_TOKENS,
    SETTLE_S,
    Pass,
    ask_all,
    find_faults,
    make_asks,
    make_table,
)
from proof.canary import DRAFTS
from proof.command import make_parser
from proof.shared.answers import Client
from tests.driver.server import Server
from tests.tiny_architectures import make_all, make_head

RIGHT, MAX_APART = 0.8, 0.03


def ask_both(
    model: Path, folder: Path, drafts: Sequence[str], count: int, at_once: int
) -> tuple[Table, list[str]]:
    """Ask alone, crowded and after a restart; also what part of the drafts was accepted in each pass."""
    folder.mkdir()
    tight = ("--unified-kv", "--ctx-size", str(2 * CELLS), "--max-request-tokens", str(CELLS))
    disk = ("--cache-disk-mb", "256", "--cache-dir", str(folder / "cache"), "--cache-ram-mb", "64")
    common = (str(model), *EXACT, "--parallel", str(at_once))
    with Server(folder / "alone.log", *common, "--ctx-size", str(CELLS * at_once)) as server:
        client = Client(Address("127.0.0.1", server.port))
        asks = make_asks(client, count, (model.stem,))
        off = {"cache_prompt": False, "speculate": False}
        alone = [client.complete(each.prompt, OUTPUT_TOKENS, model=each.model, **off) for each in asks]
    passes: list[Pass] = []
    rates: list[float] = []
    for log, names in (("crowded", ("with kills", "without")), ("restarted", ("after a restart",))):
        with Server(folder / f"{log}.log", *common, *tight, *disk, *drafts) as server:
            server.expect_failure(FAILURES)
            before = [0.0, 0.0]
            for name in names:
                passes.append(ask_all(server, asks, alone, name, at_once, name == "with kills"))
                metrics = server.metrics()
                now = [
                    sum(
                        metrics[each]
                        for each in metrics
                        if f"{what}_tokens_total{{" in each and '"mtp"' in each
                    )
                    for what in ("drafted", "accepted")
                ]
                drafted, accepted = (after - first for after, first in zip(now, before, strict=True))
                rates.append(accepted / drafted if drafted else 0.0)
                before = now
            time.sleep(SETTLE_S)  # states are written behind
    table = make_table(f"{model.stem}: {count} requests", len(asks), passes)
    table = Table(table.columns, [*table.rows, ("drafts accepted", *(f"{rate:.3f}" for rate in rates))])
    faults = [f"{model.stem}: {fault}" for fault in find_faults(alone, passes)]
    if model.stem == "knowing" and abs(rates[-1] - rates[-2]) > MAX_APART:
        faults.append(f"FAIL: {rates[-1]:.3f} of the drafts accepted after a restart, {rates[-2]:.3f} before")
    return table, faults


def run_mtp(count: int = 500, at_once: int = 16, out: Path | None = None) -> int:
    tables, faults = {}, []
    with tempfile.TemporaryDirectory() as name:
        models = make_all(Path(name))
        models["knowing"] = make_head(Path(name) / "knowing.gguf", right=RIGHT)
        for kind in (*DRAFTS, "knowing"):
            drafts = DRAFTS.get(kind, DRAFTS["head"])
            tables[kind], found = ask_both(models[kind], Path(name) / kind, drafts, count, at_once)
            faults += found
            print(tables[kind].markdown(), flush=True)
    text = "\n\n".join((*(each.markdown() for each in tables.values()), *(faults or ["pass"])))
    return conclude("mtp", text, tables, out, failed=bool(faults))


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__,
        __doc__,
        "--out",
        count=(500, "how many requests of each model"),
        at_once=(16, "how many at once, and slots"),
    )
    return run_command(parser, arguments, run_mtp)
