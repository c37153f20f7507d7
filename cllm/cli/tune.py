"""`cllm tune`, the same measurement at the first start with a model, and the report of its record."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cllm.backend.llama.probe import find_ready
from cllm.backend.llama.threads import read_cpu_times
from cllm.cli.options import fail, progress_bar, with_options
from cllm.config import Config, EngineConfig
from cllm.errors import CllmError
from cllm.logs import configure_logging
from cllm.tune.record import MAX_PERPLEXITY_CHANGE, TuneRecord
from cllm.tune.search import TRIAL, Tuning
from cllm.tune.trial import MIX, mix_seconds

log = logging.getLogger(__name__)
BAR_WIDTH = 40
PAGE_WIDTH = 140
_option = partial(typer.Option, rich_help_panel="tune")


def cores_used_by_others(window_s: float = 0.4) -> float | None:
    """Cores that other programs keep busy now, over a short window; None where that is unknown."""
    before = read_cpu_times()
    if before is None:
        return None
    time.sleep(window_s)
    after = read_cpu_times()
    return None if after is None else after.others_since(before)


@with_options(EngineConfig)
def tune_command(
    config: Config,
    given: frozenset[str],
    kv_types: Annotated[
        bool, _option("--kv-types", help="Try KV cache types, too, where perplexity stays the same.")
    ] = False,
    force: Annotated[bool, _option("--force", help="Measure again what is remembered.")] = False,
    budget_s: Annotated[
        float | None,
        _option(
            min=1,
            metavar="N",
            help="Time limit, seconds; twice that for --kv-types. Default: --tune-budget-s.",
        ),
    ] = None,
    html: Annotated[Path | None, _option(metavar="FILE", help="Write the result as a web page.")] = None,
) -> None:
    """Find the fastest settings for a model on this machine; `cllm serve` uses them from then on."""
    configure_logging("warning")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        tuning = Tuning(config.engine, find_ready(config.engine, console.print), given)
        others = cores_used_by_others()
        record = tuning.record
        if record is None or force or kv_types > record.kv_types or tuning.is_due(others):
            budget_s = budget_s or config.engine.tune_budget_s
            record = _measure(tuning, others, console, budget_s=budget_s, kv_types=kv_types)
        else:
            console.print(f"remembered from {record.created}; --force measures again")
        show(record, Console(highlight=False))
        if html is not None:
            html.write_text(page(record), encoding="utf-8")
    except CllmError as error:
        raise fail(error) from None
    except OSError as error:
        raise fail(error, 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def tune_at_start(
    asked: EngineConfig,
    ready: EngineConfig,
    given: frozenset[str],
    console: Console,
    *,
    trial: Sequence[str] = TRIAL,
    look: Callable[[], float | None] = cores_used_by_others,
) -> EngineConfig:
    """Tuned settings: `ready` with what is remembered, or measured now. No failure here is fatal."""
    if not asked.tune:
        return ready
    try:
        tuning = Tuning(asked, ready, given, trial)
        if tuning.record is None or tuning.record.provisional:
            others = look()
            if tuning.is_due(others):
                # Cache types that were asked for once are judged again.
                kv_types = tuning.record is not None and tuning.record.kv_types
                _measure(tuning, others, console, budget_s=asked.tune_budget_s, kv_types=kv_types)
        if tuning.record is not None:
            log.info("%s", headline(tuning.record))
        return tuning.tuned
    except KeyboardInterrupt:
        console.print("tuning skipped; serving with the settings as they are")
    except (CllmError, OSError) as error:
        log.warning("not tuned: %s", error)
    return ready


def _measure(
    tuning: Tuning, others: float | None, console: Console, *, budget_s: float, kv_types: bool = False
) -> TuneRecord:
    console.print(
        f"measuring which settings are the fastest here: up to {budget_s:.0f} s, once for this model "
        "(Ctrl-C skips it, --no-tune leaves it out)"
    )
    with progress_bar(console) as bar:
        task = bar.add_task("tuning", total=1.0)

        def progress(fraction: float, text: str) -> None:
            bar.update(task, completed=fraction, description=f"tuning: {text}")

        record = tuning.measure(others, budget_s=budget_s, kv_types=kv_types, progress=progress)
    console.print(headline(record))
    return record


def headline(record: TuneRecord) -> str:
    """One line: the settings that differ from the defaults, and their gain."""
    chosen = ", ".join(
        f"{name} {('off', 'on')[value] if isinstance(value, bool) else value}"
        for name, value in record.settings.items()
    )
    if not chosen:
        text = "tuned: the settings as they are were the fastest"
    else:
        text = f"tuned: {chosen} ({record.speedup:.2f} × as fast in the serving mix)"
    for option in record.options:
        if option.chosen and option.perplexity_change is not None:
            text += f"; perplexity with {option.label}: {option.perplexity_change:+.3%}, so harmless"
    return text + (f"; provisional, {record.provisional}" if record.provisional else "")


def _title(case: str) -> str:
    return case.replace("one", "1").replace("_", " ")


def options_table(record: TuneRecord) -> Table:
    """Table of all alternatives: their cost relative to the chosen one, in the mix and in each case."""
    cases = [case for case in MIX if case in record.seconds]
    table = Table(
        *("", "setting", "value"),
        title="cost relative to the chosen setting (● chosen; 1.10 is 10 % slower)",
        box=None,
    )
    judged = any(option.perplexity_change is not None for option in record.options)
    for title in ("mix", *map(_title, cases), *(["perplexity"] if judged else [])):
        table.add_column(title, justify="right")
    for option in record.options:
        cells = ["●" if option.chosen else "", option.dimension, option.label]
        if option.ratio is None:
            table.add_row(*cells, Text(option.problem, style="yellow"))
            continue
        cells.append(f"{option.ratio:.2f}")
        cells += [f"{option.cases[case]:.2f}" if case in option.cases else "" for case in cases]
        if option.perplexity_change is not None:
            cells.append(f"{option.perplexity_change:+.3%}")
        table.add_row(*cells, style="bold" if option.chosen else None)
    return table


def bars(record: TuneRecord) -> Table:
    """A bar for each alternative: its cost in the mix, beside the chosen one's."""
    measured = [(option, option.ratio) for option in record.options if option.ratio is not None]
    longest = max((ratio for _, ratio in measured), default=1.0)
    table = Table.grid(padding=(0, 2, 0, 0))
    for option, ratio in measured:
        name = f"{'●' if option.chosen else ' '} {option.dimension} {option.label}"
        table.add_row(name, Bar(longest, 0, ratio, width=BAR_WIDTH), f"{ratio:.2f}")
    return table


def figures(record: TuneRecord) -> str:
    """Speeds with the chosen settings, and how they were measured."""
    parts = []
    for case in MIX:
        if (seconds := record.seconds.get(case)) is not None:
            speed = f"{1 / seconds:.0f} tokens/s" if case == "prefill" else f"{seconds * 1000:.1f} ms"
            parts.append(f"{_title(case)} {speed}")
    contexts = f"contexts of {record.short} tokens only, no time for long ones"
    if record.long:
        contexts = (
            f"contexts of {record.short} (short) and {record.long} tokens (long; ragged: one among short)"
        )
    lines = [
        f"with the chosen settings: {', '.join(parts)}; the mix {mix_seconds(record.seconds):.1f} s",
        f"{contexts}; all: {record.requests} requests; "
        f"the same setting differed from itself by {record.noise:.1%}; "
        f"measured in {record.took_s:.0f} s on {record.created}",
    ]
    if record.perplexity_tokens:
        lines.append(
            f"perplexity over {record.perplexity_tokens} tokens of cllm's own text; types are chosen only "
            f"where it changes by less than {MAX_PERPLEXITY_CHANGE:.1%}"
        )
    if record.left_out:
        lines.append(f"left out: {', '.join(record.left_out)}")
    if record.provisional:
        lines.append(f"provisional ({record.provisional}): measured again when the machine is quiet")
    return "\n".join(lines)


def show(record: TuneRecord, console: Console) -> None:
    """Print the table, the bars and the figures."""
    for part in (options_table(record), bars(record), figures(record)):
        console.print(part, soft_wrap=isinstance(part, str))
        console.print()


def page(record: TuneRecord) -> str:
    """The same report as a web page."""
    console = Console(record=True, width=PAGE_WIDTH, file=io.StringIO(), highlight=False)
    console.print(headline(record), end="\n\n")
    show(record, console)
    return console.export_html(inline_styles=True)
