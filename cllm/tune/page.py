"""What was found, as a page of its own: bars and figures, nothing to load."""

from __future__ import annotations

from html import escape

from cllm.tune.mix import CASES
from cllm.tune.record import Option, TuneRecord
from cllm.tune.report import figures, headline

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
    facts = "".join(f"<p>{escape(line)}</p>" for line in figures(record).splitlines())
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>cllm tune</title>'
        f"<style>{_STYLE}</style><h1>cllm tune</h1><p>{escape(headline(record))}</p>"
        "<p>Cost relative to the chosen setting; 1.10 is 10 % slower.</p>"
        f'<table><tr><th>setting</th><th class="bar"></th>{heads}</tr>{"".join(rows)}</table>'
        f"{facts}</html>\n"
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
