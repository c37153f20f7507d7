"""The README's example runs as it is written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.driver.server import environment

README = Path(__file__).parents[2] / "README.md"


def test_the_python_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(example.strip().splitlines()) <= 12
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=300, env=environment()
    )
    assert done.returncode == 0, done.stderr
    ends = re.findall(r" (?:length|stop) \d+$", done.stdout, re.MULTILINE)
    assert len(ends) >= 2, "one for each prompt; what a model says differs from one CPU to the next"
