"""Attention on a CPU (`attention.cpp`): what ggml's operation says, for any number of rows."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import numpy.typing as npt
import pytest

from cllm.backend.llama.library import load
from tests.driver.ggml import F16, F32, Q8_0, Graph

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """Queries of `streams` sequences, each `tokens` long, at the end of `cells` cells."""

    tokens: int = 1
    heads: int = 9
    kv_heads: int = 3
    depth: int = 64
    width: int = 64
    streams: int = 1
    cells: int = 256
    kind: int = F16
    bias: float = 0.0
    cap: float = 0.0
    sinks: bool = False
    masked: bool = True


CASES = (
    Case(),
    Case(streams=8, cells=512),
    Case(tokens=5, streams=2, cells=300),  # the last block is not whole
    Case(tokens=64),
    Case(tokens=130, cells=512),
    Case(tokens=63, kv_heads=9, cells=200),
    Case(tokens=3, heads=8, kv_heads=1, depth=128, width=128),
    Case(tokens=7, heads=6, kv_heads=2, depth=80, width=80, kind=F32, cells=90),
    Case(tokens=2, heads=16, kv_heads=1, depth=576, width=512),  # MLA
    Case(cells=4096, heads=2, kv_heads=1),  # divided between threads
    Case(tokens=2, cells=2048, heads=4, kv_heads=2, depth=256, width=256, sinks=True),
    Case(tokens=9, kind=Q8_0, cells=100),
    Case(streams=3, kind=Q8_0),
    Case(tokens=70, heads=9, bias=8.0),
    Case(tokens=70, heads=8, kv_heads=2, cap=30.0),
    Case(tokens=3, heads=8, kv_heads=2, streams=2, sinks=True),
    Case(tokens=100, heads=4, kv_heads=4, cells=100, masked=False),  # as a picture's encoder attends
)


@pytest.fixture
def graph() -> Iterator[Graph]:
    assert load().use_kernels(), "`cllm build` compiles kernels for every CPU that the tests run on"
    with Graph() as graph:
        yield graph


def run(graph: Graph, case: Case, q: Array, k: bytes, v: bytes, mask: Array, sinks: Array) -> Array:
    """The result by stream, token, head and element."""
    tensors = (
        graph.tensor(F32, (case.depth, case.heads, case.tokens, case.streams), q.astype("f4").tobytes()),
        graph.tensor(case.kind, (case.depth, case.kv_heads, case.cells, case.streams), k),
        graph.tensor(case.kind, (case.width, case.kv_heads, case.cells, case.streams), v),
    )
    turned = [graph.add("permute", tensor, 0, 2, 1, 3) for tensor in tensors]
    shape = (case.cells, case.tokens, 1, case.streams)
    hidden = graph.tensor(F16, shape, mask.astype("f2").tobytes()) if case.masked else None
    factors = (ctypes.c_float(value) for value in (case.depth**-0.5, case.bias, case.cap))
    result = graph.add("flash_attn_ext", *turned, hidden, *factors)
    if case.sinks:
        taken = graph.tensor(F32, (case.heads,), sinks.astype("f4").tobytes())
        graph.call("flash_attn_ext_add_sinks", result, taken)
    return graph.compute(result, (case.streams, case.tokens, case.heads, case.width))


def make_cells(random: np.random.Generator, kind: int, shape: tuple[int, ...]) -> tuple[bytes, Array]:
    """What a tensor holds, and what that means."""
    if kind == Q8_0:
        scales = random.uniform(0.005, 0.02, (*shape[:-1], shape[-1] // 32, 1)).astype("f2")
        numbers = random.integers(-127, 128, (*scales.shape[:-1], 32)).astype("i1")
        packed = np.concatenate([scales.view("i1"), numbers], axis=-1)
        return packed.tobytes(), (scales.astype(float) * numbers).reshape(shape)
    values = random.standard_normal(shape).astype("f4" if kind == F32 else "f2")
    return values.tobytes(), values.astype(float)


def attend(case: Case, q: Array, k: Array, v: Array, mask: Array, sinks: Array) -> Array:
    """The result in double precision."""
    group = case.heads // case.kv_heads
    k, v = (np.repeat(each, group, axis=2) for each in (k, v))  # stream, cell, head, element
    scores = np.einsum("sthd,schd->shtc", q, k) * case.depth**-0.5
    if case.cap:
        scores = case.cap * np.tanh(scores / case.cap)
    slopes = np.ones(case.heads)
    if case.bias:
        known = 1 << (case.heads.bit_length() - 1)
        bases = 2 ** (-case.bias / known), 2 ** (-case.bias / 2 / known)
        slopes[:known] = bases[0] ** np.arange(1, known + 1)
        slopes[known:] = bases[1] ** np.arange(1, 2 * (case.heads - known), 2)
    if case.masked:
        scores = scores + slopes[:, None, None] * mask[:, None]
    most = scores.max(axis=-1, keepdims=True)
    if case.sinks:
        most = np.maximum(most, sinks[:, None, None])
    weights = np.exp(scores - most)
    total = weights.sum(axis=-1, keepdims=True)
    if case.sinks:
        total = total + np.exp(sinks[:, None, None] - most)
    found: Array = np.einsum("shtc,schd->sthd", weights / total, v)
    return found


def draw(case: Case) -> tuple[Array, tuple[bytes, Array], tuple[bytes, Array], Array, Array]:
    """Queries, K, V, a causal mask whose streams differ in length, and sinks."""
    random = np.random.default_rng(7)
    q = random.standard_normal((case.streams, case.tokens, case.heads, case.depth)).astype("f4").astype(float)
    shape = (case.streams, case.cells, case.kv_heads)
    k, v = (make_cells(random, case.kind, (*shape, size)) for size in (case.depth, case.width))
    ends = case.cells - case.tokens - np.arange(case.streams)[:, None] + np.arange(case.tokens)
    seen = np.arange(case.cells) <= ends[..., None]
    distance = (np.arange(case.cells) - ends[..., None]) * float(case.bias > 0)
    return q, k, v, np.where(seen, distance, -np.inf), random.standard_normal(case.heads)


@pytest.mark.parametrize("case", CASES, ids=map(str, count()))
def test_attention_equals_its_definition(graph: Graph, case: Case) -> None:
    q, k, v, mask, sinks = draw(case)
    found = run(graph, case, q, k[0], v[0], mask, sinks)
    expected = attend(case, q, k[1], v[1], mask.astype("f2").astype(float), sinks)
    assert np.abs(found - expected).max() < 2e-5


@pytest.mark.parametrize("tokens", [2, 33, 64])
def test_a_token_of_a_prompt_attends_alike_in_every_chunk(graph: Graph, tokens: int) -> None:
    """To the last bit, but for up to four rows: it makes no difference how a prompt is cut."""
    whole = Case(tokens=100)
    q, k, v, mask, sinks = draw(whole)
    found = run(graph, whole, q, k[0], v[0], mask, sinks)
    part = replace(whole, tokens=tokens)
    alone = run(graph, part, q[:, :tokens], k[0], v[0], mask[:, :tokens], sinks)
    assert (alone == found[:, :tokens]).all()


@pytest.mark.parametrize("kind", [F16, F32])
@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("stale", [0.5, np.inf, np.nan])
def test_a_cell_that_is_masked_leaves_no_trace(graph: Graph, tokens: int, kind: int, stale: float) -> None:
    """Whatever another sequence has left there."""
    case = Case(tokens=tokens, cells=128, kind=kind)
    q, k, v, mask, sinks = draw(case)
    mask[..., 40:] = -np.inf
    before = run(graph, case, q, k[0], v[0], mask, sinks)
    others = np.full_like(k[1], stale)
    mixed = [np.concatenate([own[1][:, :40], others[:, 40:]], axis=1) for own in (k, v)]
    mixed = [each.astype("f4" if kind == F32 else "f2") for each in mixed]
    after = run(graph, case, q, mixed[0].tobytes(), mixed[1].tobytes(), mask, sinks)
    assert (before == after).all() and np.isfinite(before).all()


def test_a_row_that_may_see_nothing_is_zero(graph: Graph) -> None:
    case = Case(tokens=2)
    q, k, v, mask, sinks = draw(case)
    mask[:, 0] = -np.inf
    found = run(graph, case, q, k[0], v[0], mask, sinks)
    assert (found[:, 0] == 0).all() and (found[:, 1] != 0).any()
