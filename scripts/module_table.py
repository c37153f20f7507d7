"""Write the table of modules into docs/architecture.md, from the first line of each module's docstring.

python scripts/module_table.py           write it between the two markers
python scripts/module_table.py --check   exit with 1 if it is not up to date
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- modules: begin (scripts/module_table.py) -->", "<!-- modules: end -->"


def make_table() -> str:
    """The Markdown table: one row per module that is not an empty package file."""
    rows = ["| module | what it is |", "|---|---|"]
    for path in sorted((ROOT / "cllm").rglob("*.py"), key=lambda path: (path.parent, path.name)):
        source = path.read_text()
        if not source.strip():
            continue
        summary = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0].replace("|", r"\|")
        rows.append(f"| `{path.relative_to(ROOT)}` | {summary} |")
    return "\n".join(rows)


def update(page: Path, begin: str, end: str, table: str, arguments: list[str]) -> int:
    """Write a table between two markers of a page; with `--check` only say whether it is up to date."""
    before = page.read_text()
    head, found, rest = before.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        print(f"{page.name} has no markers: {begin} … {end}", file=sys.stderr)
        return 1
    after = f"{head}{begin}\n{table}\n{end}{tail}"
    if "--check" in arguments:
        if after != before:
            print(f"{page.name} is out of date: run python {sys.argv[0]}", file=sys.stderr)
        return int(after != before)
    page.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(update(PAGE, BEGIN, END, make_table(), sys.argv[1:]))
