"""Write the table of chat formats into docs/formats.md, as they are derived from llama.cpp's chat templates.

python scripts/format_table.py           write it between the two markers
python scripts/format_table.py --check   exit with 1 if it is not up to date
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cllm.text.chat_format import (  # noqa: E402
    DECLARED,
    DESCRIBED,
    GENERIC,
    ChatFormat,
    WrittenCall,
    write_calls,
)
from tests.driver.corpus import template_files  # noqa: E402
from tests.driver.turns import get_family  # noqa: E402

PAGE = ROOT / "docs" / "formats.md"
BEGIN, END = "<!-- formats: begin (scripts/format_table.py) -->", "<!-- formats: end -->"
EXAMPLE = WrittenCall("f", {"a": "x", "n": 1}, "abc123def")


def make_table() -> str:
    """The Markdown table: one row for each chat template."""
    rows = ["| chat template | calls | found by | forced | reasoning |", "|---|---|---|---|---|"]
    for name in template_files():
        found = get_family(name).format
        example = _code(write_calls(found.calls, [EXAMPLE]))
        calls = f"{found.calls.style} {example}" if found.calls != GENERIC.calls else "generic"
        rows.append(f"| {name} | {calls} | {_origin(found)} | by schema | {_reasoning(found)} |")
    return "\n".join(rows)


def _origin(found: ChatFormat) -> str:
    if found.calls == GENERIC.calls:
        return "–"
    declared = {known.calls.start for _, known in DECLARED}
    described = [known for _, known in DESCRIBED] if not found.writes_calls else []
    return "declaration" if found.calls.start in declared or found.calls in described else "derivation"


def _reasoning(found: ChatFormat) -> str:
    marks = f"{_code(found.reasoning_openings[0])} {_code(found.reasoning_closings[0])}"
    return marks if found.exact else f"{marks}, if the model writes it"


def _code(text: str) -> str:
    shown = text.replace("\n", "⏎").replace("|", "\\|")
    return f"`{shown}`" if "`" not in shown else f"`` {shown} ``"


def main(arguments: list[str]) -> int:
    """Write the table; with `--check` only say whether it is up to date."""
    before = PAGE.read_text()
    head, _, rest = before.partition(BEGIN)
    after = f"{head}{BEGIN}\n{make_table()}\n{END}{rest.partition(END)[2]}"
    if "--check" not in arguments:
        PAGE.write_text(after)
    elif after != before:
        print(f"{PAGE.name} is out of date: run python scripts/format_table.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
