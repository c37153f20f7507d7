"""Bare decodes in a process of their own, driven from here: the machine's pace, and a library's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, Self

from cllm.errors import SetupError


class BareTime(NamedTuple):
    prompt_s: float
    generate_s: float

    @property
    def total_s(self) -> float:
        return self.prompt_s + self.generate_s


class BareDecode:
    """A running `bench.decode_worker`. A context manager; SetupError if it does not start."""

    def __init__(
        self,
        model: Path,
        threads: int = 0,
        library: Path | None = None,
        *,
        streams: int = 8,
        cells: int = 1024,
    ) -> None:
        """Room for `streams` of `cells` tokens each."""
        environment = dict(os.environ)
        if library is not None:
            environment["CLLM_LIBRARY"] = str(library)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.decode_worker", *map(str, (model, threads, streams, cells))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        if self._answer() != "ready":
            raise SetupError(f"bare decodes do not start with the library {library or 'in use'}")

    def __call__(self, streams: int, prompt_tokens: int, count: int) -> BareTime:
        """Seconds for `streams` prompts of that length, and to generate `count` tokens after each."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{streams} {prompt_tokens} {count}\n")
            self._process.stdin.flush()
            return BareTime(*map(float, self._answer().split()))
        except (OSError, TypeError):
            raise SetupError("the bare decode died: this library does not work here") from None

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:  # closes its input, which ends it, and waits
            pass
