"""`cllm tune`, and the same measurement at the first start with a model."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cllm.backend.llama.memory import prepare
from cllm.backend.llama.probe import find_working
from cllm.backend.llama.threads import read_cpu_times
from cllm.cli.options import fail, with_options
from cllm.config import Config, EngineConfig
from cllm.errors import CllmError
from cllm.logs import configure_logging
from cllm.tune.record import TuneRecord
from cllm.tune.report import bars, figures, headline, options_table, page
from cllm.tune.session import TRIAL, Tuning

log = logging.getLogger(__name__)


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
        bool,
        typer.Option(
            "--kv-types",
            rich_help_panel="tune",
            help="Try KV cache types, too, where perplexity stays the same.",
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", rich_help_panel="tune", help="Measure again what is remembered.")
    ] = False,
    budget_s: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel="tune",
            help="Time limit, seconds; twice that with --kv-types. Default: --tune-budget-s.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", rich_help_panel="tune", help="Write the result as a web page."),
    ] = None,
) -> None:
    """Find the fastest settings for a model on this machine; `cllm serve` uses them from then on."""
    configure_logging("warning")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        tuning = Tuning(config.engine, find_working(prepare(config.engine), console.print), given)
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
        typer.echo(f"cllm: {error}", err=True)
        raise typer.Exit(1) from None
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
        tuning = Tuning(asked, ready, given, trial=trial)
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


def progress_bar(console: Console) -> Progress:
    """A progress bar on standard error, only on a terminal, gone when it is done."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def show(record: TuneRecord, console: Console) -> None:
    """Print the table, the bars and the figures."""
    console.print(options_table(record))
    console.print()
    console.print(bars(record))
    console.print()
    console.print(figures(record), soft_wrap=True)
