"""What the same work takes with no server around it: llama-bench, and another build of the library."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Protocol

from bench.decode_bench import BareDecode
from bench.peers import ServerSettings, embedded_model
from bench.workloads import Definition
from bench.workloads.definition import Length
from cllm.errors import SetupError

_LIMIT_S = 300.0


class Reference(Protocol):
    """Something that yields figures of a workload, measured once in each round."""

    @property
    def name(self) -> str: ...

    def measure(self) -> dict[str, float]:
        """By the figure's name. Raises SetupError."""


class LlamaBench:
    """llama.cpp's own benchmark: a prompt and an answer of the same lengths, one stream."""

    name = "llama-bench"

    def __init__(self, executable: Path, settings: ServerSettings, prompt: int, output: int) -> None:
        self._output = output
        self._command = [str(executable), "-m", str(settings.model or embedded_model())]
        self._command += ["-p", "0", "-n", "0", "-pg", f"{prompt},{output}", "-r", "4", "-o", "json"]
        self._command += ["-t", str(settings.thread_count)]

    def measure(self) -> dict[str, float]:
        """The tokens of the answer per second of both, as a client sees it."""
        try:
            done = subprocess.run(self._command, capture_output=True, check=True, timeout=_LIMIT_S)
            (test,) = json.loads(done.stdout)
            return {"tokens_per_second": self._output * 1e9 / test["avg_ns"]}
        except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
            raise SetupError(f"llama-bench: {error}") from None


class PlainBuild:
    """Bare decodes with another build of the library: as many streams at as much context."""

    name = "plain-build"

    def __init__(self, library: Path, settings: ServerSettings, prompt: int, steps: int = 17) -> None:
        self._library, self._settings = library, settings
        self._prompt, self._steps = prompt, steps

    def measure(self) -> dict[str, float]:
        streams = self._settings.parallel
        model = self._settings.model or embedded_model()
        with BareDecode(model, self._settings.thread_count, self._library) as bare:
            took = bare(streams, self._prompt, self._steps).generate_s / (self._steps - 1)
        return {"step_s": took, "decode_tokens_per_second": streams / took}


def references_for(
    definition: Definition, settings: ServerSettings, llama_bench: Path | None, plain_library: Path | None
) -> list[Reference]:
    """Those that the workload's bars ask for, and that are there."""
    wanted = {bar.against for bar in definition.bars}
    group = definition.groups[0]
    prompt, output = _middle(group.prompt_tokens), _middle(group.output_tokens)
    found: list[Reference] = []
    if "llama-bench" in wanted and llama_bench is not None:
        found.append(LlamaBench(llama_bench, settings, prompt, output))
    if "plain-build" in wanted and plain_library is not None:
        found.append(PlainBuild(plain_library, settings, prompt + output // 2))
    return found


def _middle(length: Length) -> int:
    return length if isinstance(length, int) else sum(length) // 2
