"""Report of a tune record, for a terminal or a web page: a table, bars and figures."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cllm.tune.record import MAX_PERPLEXITY_CHANGE, TuneRecord
from cllm.tune.trial import CASES, mix_seconds

BAR_WIDTH = 40
PAGE_WIDTH = 140
_PARTS = " ▏▎▍▌▋▊▉"


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


def options_table(record: TuneRecord) -> Table:
    """Table of all alternatives: their cost relative to the chosen one, in the mix and in each case."""
    cases = [case for case in CASES if case.name in record.seconds]
    table = Table(title="cost relative to the chosen setting (● chosen; 1.10 is 10 % slower)", box=None)
    for title in ("", "setting", "value"):
        table.add_column(title)
    for title in ("mix", *(case.title for case in cases)):
        table.add_column(title, justify="right")
    judged = any(option.perplexity_change is not None for option in record.options)
    if judged:
        table.add_column("perplexity", justify="right")
    for option in record.options:
        cells = ["●" if option.chosen else "", option.dimension, option.label]
        if option.ratio is None:
            table.add_row(*cells, Text(option.problem, style="yellow"))
            continue
        cells.append(f"{option.ratio:.2f}")
        cells += [f"{option.cases[case.name]:.2f}" if case.name in option.cases else "" for case in cases]
        if judged and option.perplexity_change is not None:
            cells.append(f"{option.perplexity_change:+.3%}")
        table.add_row(*cells, style="bold" if option.chosen else None)
    return table


def bars(record: TuneRecord) -> Text:
    """A bar for each alternative: its cost in the mix, beside the chosen one's."""
    measured = [
        (f"{option.dimension} {option.label}", option.chosen, option.ratio)
        for option in record.options
        if option.ratio is not None
    ]
    longest = max((ratio for _, _, ratio in measured), default=1.0)
    width = max((len(name) for name, _, _ in measured), default=0)
    lines: list[str] = []
    for name, chosen, ratio in measured:
        eighths = round(ratio / longest * BAR_WIDTH * 8)
        bar = "█" * (eighths // 8) + _PARTS[eighths % 8].strip()
        lines.append(f"{'●' if chosen else ' '} {name:<{width}}  {bar:<{BAR_WIDTH}} {ratio:.2f}")
    return Text("\n".join(lines))


def figures(record: TuneRecord) -> str:
    """Speeds with the chosen settings, and how they were measured."""
    parts = []
    for case in CASES:
        if (seconds := record.seconds.get(case.name)) is not None:
            speed = f"{1 / seconds:.0f} tokens/s" if case.name == "prefill" else f"{seconds * 1000:.1f} ms"
            parts.append(f"{case.title} {speed}")
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


def page(record: TuneRecord) -> str:
    """The same report as a web page."""
    console = Console(record=True, width=PAGE_WIDTH, file=io.StringIO(), highlight=False)
    for part in (headline(record), options_table(record), bars(record), figures(record)):
        console.print(part)
        console.print()
    return console.export_html(inline_styles=True)
