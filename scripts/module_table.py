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


def main(arguments: list[str]) -> int:
    before = PAGE.read_text()
    head, begin, rest = before.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        print(f"{PAGE.name} has no markers: {BEGIN} … {END}", file=sys.stderr)
        return 1
    after = f"{head}{BEGIN}\n{make_table()}\n{END}{tail}"
    if "--check" in arguments:
        if after != before:
            print(f"{PAGE.name} is out of date: run python scripts/module_table.py", file=sys.stderr)
        return int(after != before)
    PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
