"""What was found, for a terminal: a table, and a picture of bars."""

from __future__ import annotations

from html import escape

from rich.table import Table
from rich.text import Text

from cllm.tune.record import MAX_PERPLEXITY_CHANGE, Option, TuneRecord
from cllm.tune.trial import CASES, mix_seconds

BAR_WIDTH = 40
_FULL, _PARTS = "█", " ▏▎▍▌▋▊▉"


def headline(record: TuneRecord) -> str:
    """One line: what differs from the defaults, and what it brings."""
    chosen = ", ".join(f"{name} {_shown(value)}" for name, value in record.settings.items())
    if not chosen:
        text = "tuned: the settings as they are were the fastest"
    else:
        text = f"tuned: {chosen} ({record.speedup:.2f} × as fast in the serving mix)"
    for option in record.options:
        if option.chosen and option.perplexity_change is not None:
            text += f"; perplexity with {option.label}: {option.perplexity_change:+.3%}, so harmless"
    return text + (f"; provisional, {record.provisional}" if record.provisional else "")


def _shown(value: int | bool | str) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def options_table(record: TuneRecord) -> Table:
    """Every alternative: what it costs relative to what was chosen, in the mix and in each case."""
    cases = [case for case in CASES if case.name in record.seconds]
    table = Table(title="cost relative to the chosen setting (● chosen; 1.10 is 10 % slower)", box=None)
    table.add_column("")
    table.add_column("setting")
    table.add_column("value")
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
    """The picture: the mix with each alternative as a bar, beside the chosen one's."""
    measured = [option for option in record.options if option.ratio is not None]
    longest = max((option.ratio or 0.0 for option in measured), default=1.0)
    width = max((len(_name(option)) for option in measured), default=0)
    lines: list[str] = []
    for option in measured:
        assert option.ratio is not None
        mark = "●" if option.chosen else " "
        lines.append(f"{mark} {_name(option):<{width}}  {_bar(option.ratio / longest)} {option.ratio:.2f}")
    return Text("\n".join(lines))


def _name(option: Option) -> str:
    return f"{option.dimension} {option.label}"


def _bar(fraction: float) -> str:
    eighths = round(fraction * BAR_WIDTH * 8)
    return (_FULL * (eighths // 8) + _PARTS[eighths % 8].strip()).ljust(BAR_WIDTH)


def figures(record: TuneRecord) -> str:
    """Speeds with the chosen settings, and what was measured how."""
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
        f"{contexts}; all: {record.streams} streams; "
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


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; color: #222; }
table { border-collapse: collapse; width: 100%; }
td, th { padding: .2rem .6rem; text-align: right; white-space: nowrap; }
td:first-child, th:first-child, td.bar, th.bar { text-align: left; }
td.bar { width: 45%; } .bar div { height: 1em; background: #b8c4d6; border-radius: 2px; }
tr.chosen { font-weight: 600; } tr.chosen .bar div { background: #2f6fbb; }
tr.first td { border-top: 1px solid #ccc; } .problem { color: #a40; text-align: left; }
"""


def page(record: TuneRecord) -> str:
    """The whole page."""
    cases = [case for case in CASES if case.name in record.seconds]
    longest = max((option.ratio or 0.0 for option in record.options), default=1.0)
    heads = "".join(f"<th>{escape(title)}</th>" for title in ("mix", *(case.title for case in cases)))
    rows: list[str] = []
    last = ""
    for option in record.options:
        rows.append(_row(option, [case.name for case in cases], longest, option.dimension != last))
        last = option.dimension
    info = "".join(f"<p>{escape(line)}</p>" for line in figures(record).splitlines())
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>cllm tune</title>'
        f"<style>{_STYLE}</style><h1>cllm tune</h1><p>{escape(headline(record))}</p>"
        "<p>Cost relative to the chosen setting; 1.10 is 10 % slower.</p>"
        f'<table><tr><th>setting</th><th class="bar"></th>{heads}</tr>{"".join(rows)}</table>'
        f"{info}</html>\n"
    )


def _row(option: Option, cases: list[str], longest: float, first: bool) -> str:
    style = " ".join(name for name, wanted in (("chosen", option.chosen), ("first", first)) if wanted)
    name = f"{option.dimension} {option.label}"
    if option.perplexity_change is not None:
        name += f" (perplexity {option.perplexity_change:+.2%})"
    name = f"<td>{escape(name)}</td>"
    if option.ratio is None:
        columns = f'<td class="problem" colspan="{len(cases) + 2}">{escape(option.problem)}</td>'
    else:
        cells = (f"{option.cases[case]:.2f}" if case in option.cases else "" for case in cases)
        numbers = "".join(f"<td>{cell}</td>" for cell in (f"{option.ratio:.2f}", *cells))
        columns = f'<td class="bar"><div style="width:{option.ratio / longest:.1%}"></div></td>{numbers}'
    return f'<tr class="{style}">{name}{columns}</tr>'
