"""Products of quantized weights with tokens (`products.cpp`): what the numbers of both stand for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from cllm.build.options import features
from tests.driver.ggml import F32, Graph

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
BLOCK = 32


VNNI = "avx512_vnni" in features()


def own_kinds() -> Sequence[str]:
    """Those with a kernel of our own here, but for those of superblocks, which ggml rounds tokens by, too."""
    some = KINDS[1:4:2] if {"avx2", "asimddp"} & {*features()} else ()
    return KINDS[:5] if VNNI else some


def round_tokens(tokens: np.ndarray, size: int) -> np.ndarray:
    """Tokens in bytes, with a scale for each block of a size."""
    blocks = tokens.reshape(-1, size)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / 127
    rounded: np.ndarray = np.rint(blocks / scales) * scales
    return rounded.reshape(tokens.shape)


def make_weights(kind: GGMLQuantizationType, rows: int, depth: int) -> tuple[bytes, np.ndarray]:
    """Random blocks of a type, whose scales are small, and the weights that they stand for."""
    random = np.random.default_rng(3)
    size, count = quants.GGML_QUANT_SIZES[kind][1], rows * depth // quants.GGML_QUANT_SIZES[kind][0]
    blocks = random.integers(0, 256, (count, size), np.uint8)
    scales = random.uniform(0.01, 0.02, (count, 2)).astype("<f2").view(np.uint8)
    if kind.name == "Q6_K":
        blocks[:, -2:] = scales[:, :2]
    else:
        both = 2 if kind.name.endswith(("_0",)) else 4
        blocks[:, :both] = scales[:, :both]
    return blocks.tobytes(), quants.dequantize(blocks.reshape(rows, -1), kind).astype(float)


@pytest.mark.parametrize("tokens", [1, 2, 3, 13, 32, 64])  # Q5_K: from 64 on
@pytest.mark.parametrize("name", KINDS)
def test_products_are_those_of_what_is_stored(name: str, tokens: int) -> None:
    kind, rows, depth = GGMLQuantizationType[name], 48, 768
    data, weights = make_weights(kind, rows, depth)
    given = np.random.default_rng(4).standard_normal((tokens, depth)).astype("f4")
    with Graph() as graph:
        result = graph.add(
            "mul_mat",
            graph.tensor(int(kind), (depth, rows), data),
            graph.tensor(F32, (depth, tokens), given.tobytes()),
        )
        found = graph.compute(result, (tokens, rows))
    # ggml's own kernels round tokens by 256 for some types; the error is that of bytes, in either case.
    exact = given.astype(float) @ weights.T
    assert np.abs(found - exact).max() < 0.02 * np.abs(exact).max()
    if name in own_kinds() and (tokens > 12 or (name == "Q4_1" and VNNI)):
        rounded = round_tokens(given.astype(float), BLOCK) @ weights.T
        assert np.abs(found - rounded).max() < 1e-4 * np.abs(exact).max()


@pytest.mark.parametrize("tokens", [16, 17, 31])
def test_a_token_has_the_same_products_in_every_step(tokens: int) -> None:
    """To the last bit, from as many tokens on as its kernel takes."""
    kind = GGMLQuantizationType.Q4_1
    data, _ = make_weights(kind, 32, 1536)
    given = np.random.default_rng(4).standard_normal((40, 1536)).astype("f4")
    found = []
    for count in (40, tokens):
        with Graph() as graph:
            weights = graph.tensor(int(kind), (1536, 32), data)
            result = graph.add("mul_mat", weights, graph.tensor(F32, (1536, count), given[:count].tobytes()))
            found.append(graph.compute(result, (count, 32)))
    assert (found[0][:tokens] == found[1]).all()
