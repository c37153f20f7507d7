"""Does the same request take longer later? The machine's own drift is measured beside it and divided out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Self

from cllm.errors import SetupError


@dataclass(frozen=True, slots=True)
class Drift:
    """Requests and probes, one probe taken just before each request; seconds."""

    requests_s: tuple[float, ...]
    probes_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median request time of the last tenth over the first tenth, each in units of its probe.

        A tenth is at least three requests, so that one hiccup in a short series decides nothing.
        """
        costs = [request / probe for request, probe in zip(self.requests_s, self.probes_s, strict=True)]
        return _last_over_first(costs)

    @property
    def raw_ratio(self) -> float:
        """The same without the probe."""
        return _last_over_first(self.requests_s)


class Probe:
    """A bare decode of the same model in a process of its own: what it takes now is the machine's pace."""

    def __init__(self, model: Path, threads: int) -> None:
        arguments = [sys.executable, "-m", "cllm.backend.llama.bare", str(model), str(threads)]
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        if self._answer() != "ready":
            raise SetupError("the bare-decode probe did not start")

    def __call__(self, prompt_tokens: int, count: int) -> float:
        """Seconds to compute that many prompt tokens and generate `count`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{prompt_tokens} {count}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:  # closes its input, which ends it, and waits
            pass


def _last_over_first(values: Sequence[float]) -> float:
    window = min(max(len(values) // 10, 3), max(len(values) // 2, 1))
    return median(values[-window:]) / median(values[:window])
