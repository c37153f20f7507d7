"""A comparison as Markdown for people and as a record for machines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from statistics import median

import msgspec

from bench.comparison import Comparison, Round
from bench.figures import FIGURES, Completion
from bench.peers import CLLM
from bench.plots import Picture
from bench.report import Spread, Table
from bench.workloads import Definition

QUICK = "A QUICK RUN: fewer requests and rounds. It shows that everything works; its figures mean little."


def make_report(comparison: Comparison, pictures: Sequence[Picture] = ()) -> str:
    """The page in Markdown."""
    bars = [(bar.workload or "all", bar.what, bar.measured, bar.verdict) for bar in comparison.bars()]
    blocks = ["# cllm bench", *_heading(comparison)]
    blocks += ["## Bars", Table(("workload", "bar", "measured", "verdict"), bars).markdown()]
    if comparison.failures:
        blocks.append(_bullets(f"Not run: {failure}" for failure in comparison.failures))
    for definition in comparison.definitions:
        if comparison.peers(definition.name):
            blocks.extend(_section(comparison, definition))
    share = _python_table(comparison)
    if share.rows:
        blocks += ["## Python's share of a step", _PYTHON, share.markdown()]
    if pictures:
        blocks += ["## Plots", *(f"![{caption}]({path})\n\n*{caption}*" for path, caption in pictures)]
    return "\n\n".join(blocks) + "\n"


def record(comparison: Comparison) -> dict[str, object]:
    """For machines: everything but the texts and the paths of this one."""
    return {
        "info": comparison.info,
        "libraries": comparison.libraries,
        "quick": comparison.quick,
        "failures": comparison.failures,
        "definitions": [_without_path(each) for each in comparison.definitions],
        "bars": [{**asdict(bar), "verdict": bar.verdict} for bar in comparison.bars()],
        "references": comparison.references,
        "rounds": [_round_record(each) for each in comparison.rounds],
    }


_PYTHON = (
    "Python is all of a cllm step but the native decode and the KV transfers (cached prefixes and preempted "
    "requests to host RAM and back): scheduling, filling the batch, sampling, text, and what lies between "
    "two steps. From the server's own counters, prefill steps included."
)


def _heading(comparison: Comparison) -> Iterator[str]:
    if comparison.quick:
        yield QUICK
    yield _bullets(f"{name}: {value}" for name, value in comparison.info.items())
    known = {name: digest for name, digest in comparison.libraries.items() if digest}
    if len(known) > 1:
        same = "The same libggml-cpu for all" if len(set(known.values())) == 1 else "NOT the same libggml-cpu"
        yield f"{same}: {', '.join(f'{name} {digest}' for name, digest in known.items())}."
    yield (
        "Figures are medians over interleaved rounds (lowest–highest). A ratio is cllm's figure over the "
        "peer's, round by round. Against llama-server's two KV layouts, a bar counts the better one."
    )


def _section(comparison: Comparison, definition: Definition) -> Iterator[str]:
    name = definition.name
    yield f"## {name}"
    yield f"{definition.about[0].upper()}{definition.about[1:]}."
    conditions = comparison.conditions(name)
    several = len(conditions) > 1
    table = _condition_table(comparison, definition) if several else _table(comparison, definition)
    yield table.markdown()
    yield _bullets(_notes(comparison, name))


def _table(comparison: Comparison, definition: Definition) -> Table:
    """Figures down, servers and ratios across."""
    name, peers = definition.name, comparison.peers(definition.name)
    others = [peer for peer in peers if peer != CLLM]
    rows = []
    for key in definition.figures:
        figure = FIGURES[key]
        cells = [_show(comparison.spread(name, peer, key), figure.digits, figure.scale) for peer in peers]
        ratios = [_show(comparison.ratio(name, key, peer), 3) for peer in others]
        rows.append((figure.label, *cells, *ratios))
    for reference in dict.fromkeys(each.name for each in comparison.references if each.workload == name):
        rounds = [each for each in comparison.references if (each.workload, each.name) == (name, reference)]
        for key in rounds[0].figures:
            figure = FIGURES[key]
            spread = Spread.of(each.figures[key] for each in rounds)
            label = f"{figure.label}, {reference} (no server)"
            rows.append(
                (label, spread.show(figure.digits, figure.scale), *[""] * (len(peers) - 1 + len(others)))
            )
    return Table(("", *peers, *(f"cllm / {peer}" for peer in others)), rows)


def _condition_table(comparison: Comparison, definition: Definition) -> Table:
    """Conditions and servers down, figures across."""
    rows = []
    for condition in comparison.conditions(definition.name):
        for peer in comparison.peers(definition.name):
            cells = (
                _show(
                    comparison.spread(definition.name, peer, key, condition),
                    FIGURES[key].digits,
                    FIGURES[key].scale,
                )
                for key in definition.figures
            )
            against = comparison.ratio(definition.name, definition.figures[0], peer, condition)
            rows.append((condition, peer, *cells, "" if peer == CLLM else _show(against, 3)))
    first = FIGURES[definition.figures[0]].label
    return Table(("", "", *(FIGURES[key].label for key in definition.figures), f"{first}, cllm / it"), rows)


def _notes(comparison: Comparison, workload: str) -> Iterator[str]:
    peers = comparison.peers(workload)
    for peer in peers:
        rounds = comparison.select(workload, peer)
        client = Spread.of(each.load.client_cpu_s / each.load.wall_s for each in rounds)
        server = Spread.of(each.server_cpu_s / each.load.wall_s for each in rounds)
        prompts = [
            each.prompt_tokens
            for one in rounds
            for each in one.load.answered
            if each.prompt_tokens is not None
        ]
        lengths = f", prompts of {_range(prompts)} tokens" if prompts else ""
        pieces = [each.tokens_per_chunk for one in rounds for each in one.load.answered if each.chunks_s]
        yield (
            f"{peer}: {server.median:.2f} cores used, the client beside it {client.median:.2f}; "
            f"{median(pieces or [0]):.2f} tokens a chunk{lengths}; {len(rounds)} rounds"
        )
    for peer in peers[1:]:
        pairs = list(_text_pairs(comparison, workload, peer))
        yield f"same text from cllm and {peer}: {sum(a == b for a, b in pairs)} of {len(pairs)}"


def _text_pairs(comparison: Comparison, workload: str, peer: str) -> Iterator[tuple[str, str]]:
    for condition in comparison.conditions(workload):
        both = zip(
            comparison.select(workload, CLLM, condition),
            comparison.select(workload, peer, condition),
            strict=False,
        )
        for ours, theirs in both:
            for a, b in zip(ours.load.completions, theirs.load.completions, strict=False):
                yield a.text, b.text


def _python_table(comparison: Comparison) -> Table:
    rows = []
    for definition in comparison.definitions:
        for condition in comparison.conditions(definition.name):
            steps = [
                each.steps
                for each in comparison.select(definition.name, CLLM, condition)
                if each.steps is not None and each.steps.steps
            ]
            if steps:
                names = ("python_share", "sample_share", "transfer_share")
                spreads = [Spread.of(getattr(step, name) for step in steps).show(2, 100) for name in names]
                step_ms = Spread.of(step.total_s / step.steps for step in steps).show(2, 1000)
                rows.append((f"{definition.name} {condition}".strip(), *spreads, step_ms))
    columns = ("workload", "Python with sampling, %", "sampling alone, %", "KV transfers, %", "ms a step")
    return Table(columns, rows)


def _without_path(definition: Definition) -> object:
    return msgspec.to_builtins(msgspec.structs.replace(definition, folder=""))


def _round_record(one: Round) -> dict[str, object]:
    return {
        "workload": one.load.workload,
        "peer": one.peer,
        "condition": one.condition,
        "number": one.number,
        "wall_s": one.load.wall_s,
        "client_cpu_s": one.load.client_cpu_s,
        "server_cpu_s": one.server_cpu_s,
        "waiting_cpu_s": one.waiting_cpu_s,
        "figures": {name: one.figure(name) for name in FIGURES},
        "steps": one.steps,
        "requests": [_request_record(each) for each in one.load.completions],
    }


def _request_record(one: Completion) -> dict[str, object]:
    found = asdict(one)
    del found["text"], found["chunks_s"]
    found["first_token_s"] = one.first_token_s
    found["gaps_ms"] = [round(gap * 1000, 1) for gap in one.gaps_s]
    return found


def _show(spread: Spread, digits: int, scale: float = 1.0) -> str:
    return spread.show(digits, scale) if spread.median == spread.median else "–"


def _bullets(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _range(counts: Sequence[int]) -> str:
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
