"""The examples of the README and of the page on the Python API run as they are written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.driver.server import environment

ROOT = Path(__file__).parents[2]
EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)
TINY = """
import cllm
def stand_in(kind, tiny):  # the embedded model's, which takes seconds to load
    return lambda worker="", **more: kind("" if worker else tiny, worker=worker, **more)
cllm.LLM, cllm.AsyncLLM = stand_in(cllm.LLM, {tiny!r}), stand_in(cllm.AsyncLLM, {tiny!r})
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_example_runs() -> None:
    (example,) = EXAMPLE.findall((ROOT / "README.md").read_text())
    assert len(example.strip().splitlines()) <= 12
    ends = re.findall(r" (?:length|stop) \d+$", run(example), re.MULTILINE)
    assert len(ends) >= 2, "one for each prompt; what a model says differs from one CPU to the next"


def test_the_page_on_python_runs_from_top_to_bottom(tiny_model: Path) -> None:
    """One program: each example goes on where the one before it ended."""
    examples = EXAMPLE.findall((ROOT / "docs" / "python.md").read_text())
    marks = [f"print('\\nend of {number}')\n" for number in range(len(examples))]
    said = run(
        TINY.format(tiny=str(tiny_model))
        + "".join(example + mark for example, mark in zip(examples, marks, strict=True))
    )
    for number in range(len(examples)):
        assert f"end of {number}\n" in said
    assert "temperature temperature is -1" in said, "errors are caught where the page says so"
