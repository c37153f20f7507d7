"""cllm's own kernels against ggml's, on the CPU, with the embedded model: their speed, and what it says.

Prefill and decode alternate between the two, in processes of their own. Then both compute prose of Python's
language reference: how far their next tokens differ, and how well each predicts the text. Kernels round
activations, each in its own way: as a control, both are compared with the same weights in F32.
"""

from __future__ import annotations

import ctypes
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bench.command import run_command
from bench.decode_bench import DecodeBench
from bench.workloads.text import prose
from cllm.backend.base import Row
from cllm.backend.llama.library import load
from cllm.backend.llama.runner import LlamaRunner
from cllm.build.options import features, machine
from cllm.config import EngineConfig
from cllm.errors import LibraryError
from cllm.models.store import embedded_model
from proof.command import make_parser
from proof.evidence import Bar, Evidence, record

TEXTS, TOKENS = 48, 128
PIECE = 32  # tokens whose logits are kept at a time
ROUNDS = 7
PROMPTS = {1: 512, 8: 64}  # tokens, by rows
OUTPUT = 33
MIN_PREFILL, MIN_DECODE, MAX_KL, MAX_PERPLEXITY = 1.9, 0.9, 1.1, 1.005
_F32_FILE = 0  # LLAMA_FTYPE_ALL_F32
Logits = npt.NDArray[np.float64]


class Speeds(NamedTuple):
    """Times of ggml's kernels over those of the own ones, as medians of alternating rounds."""

    prefill: float
    decode: dict[int, float]  # by rows


def measure_speed(model: Path, threads: int, rounds: int) -> Speeds:
    prefill: list[float] = []
    decode: dict[int, list[float]] = {rows: [] for rows in PROMPTS}
    with ExitStack() as stack:
        benches = [stack.enter_context(DecodeBench(model, threads, own_kernels=own)) for own in (False, True)]
        for number in range(-1, rounds):  # the first is a warm-up
            for rows, ratios in decode.items():
                before, now = (bench(rows, PROMPTS[rows], OUTPUT) for bench in benches)
                if number >= 0:
                    ratios.append(before.generate_s / now.generate_s)
                    prefill += [before.prompt_s / now.prompt_s] if rows == 1 else []
    return Speeds(
        statistics.median(prefill), {rows: statistics.median(found) for rows, found in decode.items()}
    )


def dequantise(source: Path, target: Path) -> Path:
    """Write the weights of a model as F32. Raises LibraryError."""
    api = load().api
    params = api.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = _F32_FILE, True
    if code := api.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
        raise LibraryError(f"llama_model_quantize returned {code}")
    return target


class Scorer:
    """A model that is computed with one kind of kernels."""

    def __init__(self, runner: LlamaRunner, *, own: bool) -> None:
        self.runner, self._own = runner, own

    def score(self, tokens: Sequence[int]) -> Iterator[Logits]:
        """Logarithms of the probabilities of the next token, after each token of a text."""
        for begin in range(0, len(tokens), PIECE):
            piece = tuple(tokens[begin : begin + PIECE])
            load().use_kernels(self._own)
            assert self.runner.decode((Row(0, begin, piece, len(piece), None),)) == 0
            logits = self.runner.logits(len(piece)).astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            yield logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        self.runner.remove(0)


class Comparison:
    """How far models differ from each other on texts. The first is the one that others are compared with."""

    def __init__(self, runners: dict[str, Scorer]) -> None:
        self._runners = runners
        self.divergences: dict[tuple[str, str], list[float]] = {}  # by pair, of each token
        self.losses: dict[str, list[float]] = {name: [] for name in runners}  # of each text

    def add(self, text: str) -> None:
        first, *_ = self._runners.values()
        tokens = first.runner.vocabulary.tokenize(text, add_special=True, parse_special=False)[:TOKENS]
        losses: dict[str, float] = dict.fromkeys(self._runners, 0.0)
        runs = [runner.score(tokens) for runner in self._runners.values()]
        for place, rows in enumerate(zip(*runs, strict=True)):
            found = dict(zip(self._runners, rows, strict=True))
            following = np.array(tokens[place * PIECE + 1 :][:PIECE])
            for name, row in found.items():
                losses[name] -= float(row[np.arange(len(following)), following].sum())
                for other in list(found)[: list(found).index(name)]:
                    kl = (np.exp(found[other]) * (found[other] - row)).sum(axis=1)
                    self.divergences.setdefault((other, name), []).extend(kl.tolist())
        for name, loss in losses.items():
            self.losses[name].append(loss / (len(tokens) - 1))

    def get_divergence(self, first: str, second: str) -> float:
        return statistics.fmean(self.divergences[first, second])

    def compare_perplexity(self, first: str, second: str) -> tuple[float, float]:
        """The perplexity of the second over that of the first, and its standard error."""
        pairs = zip(self.losses[first], self.losses[second], strict=True)
        differences = [after - before for before, after in pairs]
        ratio = math.exp(statistics.fmean(differences))
        return ratio, ratio * statistics.stdev(differences) / math.sqrt(len(differences))


def compare_text(model: Path, threads: int, texts: int) -> Comparison:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        exact = dequantise(model, Path(folder, "exact.gguf"))
        runners = {}
        for name, path in {"F32": exact, "ggml": model, "own": model}.items():
            config = EngineConfig(
                model=str(path), parallel=1, ctx_size=512, threads=threads, gpu_layers=0, draft_tokens=0
            )
            runner = stack.enter_context(closing(LlamaRunner(config)))
            runners[name] = Scorer(runner, own=name == "own")
        comparison = Comparison(runners)
        for number in range(texts):
            comparison.add(prose(f"weights {number}", TOKENS))
        load().use_kernels()
        return comparison


def make_evidence(speeds: Speeds, comparison: Comparison) -> Evidence:
    """The row of the proof. AMX has kernels for the embedded model's type, other CPUs of x86 none."""
    slow = machine().endswith("x86_64") and "amx_int8" not in features()
    least = MIN_PREFILL if slow else MIN_DECODE
    ratio, error = comparison.compare_perplexity("ggml", "own")
    divergences = {pair: comparison.get_divergence(*pair) for pair in comparison.divergences}
    kl = divergences["F32", "own"] / divergences["F32", "ggml"]
    controls = {f"KL divergence of {one} and {other}": value for (one, other), value in divergences.items()}
    perplexity = math.exp(statistics.fmean(comparison.losses["ggml"]))
    return Evidence(
        name="kernels",
        order=85,
        title="Kernels of cllm's own",
        about=(
            f"The embedded model with ggml's kernels and with cllm's own: prompts of {PROMPTS[1]} tokens and "
            f"{OUTPUT - 1} steps of decode in alternating rounds, then "
            f"{len(comparison.losses['own'])} texts of {TOKENS} tokens from Python's language reference. As "
            "a control, both are compared with the same weights in F32."
        ),
        bars=[
            Bar("prefill, times ggml's", f"≥ {least}", f"{speeds.prefill:.2f}", speeds.prefill >= least),
            *(
                Bar(f"decode of {rows}", f"≥ {MIN_DECODE}", f"{found:.2f}", found >= MIN_DECODE)
                for rows, found in speeds.decode.items()
            ),
            Bar("KL divergence from F32, times ggml's", f"≤ {MAX_KL}", f"{kl:.3f}", kl <= MAX_KL),
            Bar("perplexity", f"≤ {MAX_PERPLEXITY}", f"{ratio:.4f} ± {error:.4f}", ratio <= MAX_PERPLEXITY),
        ],
        figures={**controls, "perplexity with ggml's": perplexity},
    )


def run_kernels(threads: int = 0, rounds: int = ROUNDS, texts: int = TEXTS) -> int:
    model = embedded_model()
    evidence = make_evidence(measure_speed(model, threads, rounds), compare_text(model, threads, texts))
    print(*(f"{name}: {value:.4f}" for name, value in evidence.figures.items()), sep="\n")
    if rounds >= ROUNDS and texts >= TEXTS:
        return record(evidence)
    with tempfile.TemporaryDirectory() as folder:  # a short run is no evidence
        return record(evidence, Path(folder))


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__, __doc__, "--threads", rounds=(ROUNDS, "of each speed"), texts=(TEXTS, "of prose")
    )
    return run_command(parser, arguments, run_kernels)
