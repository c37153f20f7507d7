"""Embeddings on llama.cpp equal those of each input alone by the bare bindings, whatever is around it."""

from __future__ import annotations

import ctypes
import math
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from cllm.backend.base import Batch, BatchKind, Row, StepStatus
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.library import load
from cllm.backend.llama.memory import EmbeddingMemory, prepare
from cllm.backend.llama.runner import LlamaRunner
from cllm.config import EngineConfig
from cllm.errors import ModelFileError, NotEnoughMemory
from cllm.types import EmbedLimits, Pooling
from tests.driver.engine import StepDriver, Tokens, ask, words
from tests.driver.kinds import DENSE
from tests.driver.same_text import Reference
from tests.tiny_encoders import CLS, SEP, TOKENS, make_encoder, make_reranker
from tests.tiny_models import make_dense

Vector = npt.NDArray[np.float32]
CODES = {"mean": 1, "cls": 2, "last": 3, "rank": 4}
DECODERS = ("dense", "sliding", "recurrent")
SAME = 0.9999


class Bare:
    """The bindings and nothing of cllm: one input in a context of its own."""

    def __init__(self, path: Path, pooling: int) -> None:
        self.api = load().api
        params = self.api.llama_model_default_params()
        self.model = self.api.llama_model_load_from_file(str(path).encode(), params)
        assert self.model
        self.pooling = pooling

    def tokens(self, tokens: Sequence[int]) -> Vector:
        """The embedding of the whole input."""
        api = self.api
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = 1
        params.embeddings = True
        params.pooling_type = self.pooling
        params.flash_attn_type = 0
        context = api.llama_init_from_model(self.model, params)
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        assert api.llama_decode(context, api.llama_batch_get_one(array, len(tokens))) == 0
        length = api.llama_model_n_embd_out(self.model) if self.pooling != CODES["rank"] else 1
        found = np.ctypeslib.as_array(api.llama_get_embeddings_seq(context, 0), (length,)).copy()
        api.llama_free(context)
        return found

    def close(self) -> None:
        self.api.llama_model_free(self.model)


@pytest.fixture(scope="module")
def files(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    encoders = {
        f"encoder-{pooling}": make_encoder(
            folder / f"{pooling}.gguf", pooling=gguf.PoolingType[pooling.upper()]
        )
        for pooling in ("mean", "cls", "last")
    }
    templates = {"rerank": "<|im_start|>{query}|{document}<|im_end|>"}
    return {
        **models,
        **encoders,
        "reranker": make_reranker(folder / "reranker.gguf"),
        "template": make_dense(folder / "template.gguf", templates=templates),
    }


Open = Callable[..., LlamaRunner]


@pytest.fixture
def opened_for(files: dict[str, Path]) -> Iterator[Open]:
    """Runners that are ready to embed, closed when the test is over."""
    runners: list[LlamaRunner] = []

    def make(name: str, **settings: Any) -> LlamaRunner:
        plain = {"parallel": 2, "ctx_size": 1024, "threads": 1, "batch_tokens": 128, **settings}
        runner = LlamaRunner(prepare(EngineConfig(model=str(files[name]), **plain)))
        runner.open_embedding()
        runners.append(runner)
        return runner

    yield make
    for runner in runners:
        runner.close()


@pytest.fixture
def bare(files: dict[str, Path]) -> Iterator[Callable[..., Bare]]:
    opened: list[Bare] = []

    def make(name: str, pooling: int) -> Bare:
        opened.append(Bare(files[name], pooling))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def cosine(a: Vector, b: Vector) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def embed(runner: LlamaRunner, *inputs: Sequence[int]) -> list[Vector]:
    """All inputs in one batch; the memory is empty afterwards."""
    rows = tuple(Row(number, 0, tuple(tokens), 1, None) for number, tokens in enumerate(inputs))
    result = runner.run(Batch(rows, BatchKind.EMBED))
    assert result.status is StepStatus.DONE
    assert cells(runner) == 0
    return [np.frombuffer(outcome.embedding, np.float32) for outcome in result.rows]


def in_chunks(runner: LlamaRunner, tokens: Sequence[int], *ends: int) -> Vector:
    begin = 0
    for end in (*ends, len(tokens)):
        row = Row(0, begin, tuple(tokens[begin:end]), int(end == len(tokens)), None)
        result = runner.run(Batch((row,), BatchKind.EMBED))
        assert result.status is StepStatus.DONE
        begin = end
    assert cells(runner) == 0
    return np.frombuffer(result.rows[0].embedding, np.float32)


def cells(runner: LlamaRunner) -> int:
    """KV cells that embedding uses, all ids together: 0 between two inputs."""
    context = runner._embedding
    assert context is not None
    position = context._api.llama_memory_seq_pos_max
    return sum(int(position(context._memory, row)) + 1 for row in range(runner.limits.embed.rows))


def inputs_for(name: str, *lengths: int) -> list[Tokens]:
    """Different inputs of these lengths, of tokens that the model has."""
    end = len(TOKENS) if name not in DECODERS else 127
    return [tuple(4 + (token * 31) % (end - 4) for token in words(seed, n)) for seed, n in enumerate(lengths)]


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("name", ["encoder", *DECODERS])
def test_a_model_says_what_it_says_alone(
    name: str, pooling: str, opened_for: Open, bare: Callable[..., Bare]
) -> None:
    encodes = name == "encoder"
    name, settings = (f"encoder-{pooling}", {}) if encodes else (name, {"pooling": pooling})
    runner = opened_for(name, **settings)
    assert runner.info.pooling.value == pooling and runner.info.vector_length == 64
    assert runner.info.generates is runner.limits.embed.chunked is not encodes
    alone = bare(name, CODES[pooling])
    inputs = inputs_for(name, 1, 2, 30, 7, 30, 50)
    together = embed(runner, *inputs)
    for tokens, vector in zip(inputs, together, strict=True):
        assert cosine(vector, alone.tokens(tokens)) > SAME
        assert cosine(vector, embed(runner, tokens)[0]) > SAME, "alone or in a batch"
    assert cosine(together[2], together[4]) < 0.99, "different inputs have different vectors"


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_a_long_input_in_chunks_is_the_input_as_a_whole(
    name: str, pooling: str, opened_for: Open, bare: Callable[..., Bare]
) -> None:
    runner = opened_for(name, pooling=pooling)
    (tokens,) = inputs_for(name, 300)
    wanted = bare(name, CODES[pooling]).tokens(tokens)
    assert cosine(in_chunks(runner, tokens, 128, 256), wanted) > SAME
    assert cosine(in_chunks(runner, tokens, 1, 100, 101, 229), wanted) > SAME


def test_a_reranker_scores_a_pair(opened_for: Open, bare: Callable[..., Bare]) -> None:
    runner = opened_for("reranker")
    assert runner.info.pooling is Pooling.RANK and runner.info.vector_length == 1
    alone = bare("reranker", CODES["rank"])
    pairs = [
        runner.vocabulary.tokenize_pair("hello", text) for text in ("hello you", "x", "9 lives", "q" * 90)
    ]
    scores = [float(vector[0]) for vector in embed(runner, *pairs[:3])]
    scores.append(float(embed(runner, pairs[3])[0][0]))
    wanted = [float(alone.tokens(pair)[0]) for pair in pairs]
    np.testing.assert_allclose(scores, wanted, atol=1e-3)
    assert len({round(score, 3) for score in scores}) == 4, "every pair has its own score"


def test_a_pair_is_framed_as_the_model_was_trained(opened_for: Open) -> None:
    vocabulary = opened_for("reranker").vocabulary
    query, document = (
        vocabulary.tokenize(text, add_special=False, parse_special=False) for text in ("ab", "cd 1")
    )
    assert vocabulary.tokenize_pair("ab", "cd 1") == [CLS, *query, SEP, *document, SEP]
    framed = vocabulary.tokenize_pair("[SEP]", "[CLS]")
    assert framed.count(SEP) == 2 and framed.count(CLS) == 1, "no control token comes from a text"


def test_a_rerank_template_is_filled_and_not_parsed_out_of_the_texts(opened_for: Open) -> None:
    vocabulary = opened_for("template").vocabulary
    plain = partial(vocabulary.tokenize, add_special=False, parse_special=False)
    assert vocabulary.tokenize_pair("a", "{query}") == [257, *plain("a|{query}"), 258]
    hostile = [257, *plain("<|im_end|>"), *plain("|"), *plain("b"), 258]
    assert vocabulary.tokenize_pair("<|im_end|>", "b") == hostile


@pytest.mark.parametrize("name", ["encoder-mean", *DECODERS])
@pytest.mark.parametrize("fault", ["no such token", "negative token"])
def test_a_refused_batch_leaves_the_memory_empty_and_the_next_right(
    name: str, fault: str, opened_for: Open
) -> None:
    runner = opened_for(name)
    good, other = inputs_for(name, 20, 20)
    before = embed(runner, good)[0]
    bad = (*other[:-1], runner.vocabulary.size if fault == "no such token" else -1)
    rows = (Row(0, 0, good, 1, None), Row(1, 0, bad, 1, None))
    result = runner.run(Batch(rows, BatchKind.EMBED))
    assert result.status is StepStatus.BAD_BATCH and result.rows == ()
    assert cells(runner) == 0
    assert cosine(embed(runner, good)[0], before) > SAME


@pytest.mark.parametrize("name", ["encoder-mean", *DECODERS])
def test_an_aborted_batch_leaves_the_memory_empty_and_the_next_right(name: str, opened_for: Open) -> None:
    runner = opened_for(name)
    assert runner._embedding is not None
    good, other = inputs_for(name, 60, 30)
    before = embed(runner, good)[0]
    api, pointer = runner.api, runner._embedding.pointer
    nodes = iter(range(1000))
    stop = api.ggml_abort_callback(lambda _: next(nodes) >= 20)
    api.llama_set_abort_callback(pointer, stop, None)
    rows = (Row(0, 0, good, 1, None), Row(1, 0, other, 1, None))
    result = runner.run(Batch(rows, BatchKind.EMBED))
    api.llama_set_abort_callback(pointer, api.ggml_abort_callback(), None)
    assert result.status is StepStatus.ABORTED
    assert cells(runner) == 0
    assert cosine(embed(runner, good)[0], before) > SAME


@pytest.mark.parametrize("name", ["dense", "recurrent"])
def test_a_forgotten_half_leaves_nothing_behind(name: str, opened_for: Open) -> None:
    runner = opened_for(name)
    (tokens,) = inputs_for(name, 100)
    before = embed(runner, tokens)[0]
    half = Row(0, 0, tokens[:50], 0, None)
    assert runner.run(Batch((half,), BatchKind.EMBED)).rows[0].embedding == b""
    assert cells(runner) > 0
    runner.reset_embedding()
    assert cells(runner) == 0
    assert cosine(embed(runner, tokens)[0], before) > SAME


@pytest.mark.parametrize("name", ["encoder-mean", "dense"])
def test_a_batch_over_the_limit_raises_and_nothing_is_computed(name: str, opened_for: Open) -> None:
    runner = opened_for(name, embed_tokens=200)
    limits = runner.limits.embed
    assert limits.tokens == 200 and limits.batch_tokens == 128
    limit = limits.batch_tokens if limits.chunked else limits.tokens
    (tokens,) = inputs_for(name, limit + 1)
    with pytest.raises(ValueError, match="over the limit"):
        embed(runner, tokens)
    assert cells(runner) == 0
    embed(runner, tokens[:-1])


# Was: llama.cpp dies (GGML_ASSERT) while it lays out a graph whose tokens the rows do not divide.
@pytest.mark.parametrize("name", ["encoder-mean", "dense"])
@pytest.mark.parametrize(("embed_tokens", "batch_tokens"), [(1, 128), (7, 33), (200, 100), (333, 512)])
def test_any_limits_will_do(name: str, embed_tokens: int, batch_tokens: int, opened_for: Open) -> None:
    runner = opened_for(name, embed_tokens=embed_tokens, batch_tokens=batch_tokens)
    limits = runner.limits.embed
    (tokens,) = inputs_for(name, limits.tokens)
    embed(runner, tokens[: limits.batch_tokens])
    if not limits.chunked:
        embed(runner, tokens)


def test_as_many_rows_as_a_step_may_have(opened_for: Open) -> None:
    for name in ("encoder-mean", *DECODERS):
        runner = opened_for(name)
        inputs = inputs_for(name, *[4] * runner.limits.embed.rows)
        vectors = embed(runner, *inputs)
        assert cosine(vectors[-1], embed(runner, inputs[-1])[0]) > SAME


@pytest.mark.parametrize("name", DECODERS)
def test_embeddings_and_generation_do_not_disturb_each_other(
    name: str, opened_for: Open, reference: Reference, bare: Callable[..., Bare]
) -> None:
    kind = DENSE._replace(model=name)
    runner = opened_for(name)
    driver = StepDriver(runner)
    alone = bare(name, CODES["mean"])
    inputs = inputs_for(name, 10, 300, 40, 128, 5, 60)
    driver.submit(*(ask(f"r{seed}", words(seed, 30 + 60 * seed), 12) for seed in range(4)))
    calls = [driver.embed(*inputs), driver.embed(*inputs)]
    answers = driver.finish()
    for seed in range(4):
        reference.check(kind, words(seed, 30 + 60 * seed), 12, answers[f"r{seed}"])
    for call in calls:
        for tokens, data in zip(inputs, answers[call].embeddings, strict=True):
            assert cosine(np.frombuffer(data, np.float32), alone.tokens(tokens)) > SAME
    kinds = [batch.kind for batch in driver.runner.batches]
    assert BatchKind.EMBED in kinds and BatchKind.GENERATE in kinds
    assert cells(runner) == 0


def test_generation_alone_pays_nothing_for_embeddings(files: dict[str, Path]) -> None:
    config = EngineConfig(model=str(files["dense"]), parallel=1, ctx_size=512, threads=1)
    runner = LlamaRunner(prepare(config))
    assert runner._embedding is None
    runner.reset_embedding()
    runner.close()


def test_memory_stays_flat(opened_for: Open) -> None:
    for name in ("encoder-mean", "dense"):
        runner = opened_for(name)
        inputs = inputs_for(name, 60, 5, 40)

        def some(count: int, runner: LlamaRunner = runner, inputs: list[Tokens] = inputs) -> int:
            for _ in range(count):
                embed(runner, *inputs)
            return resident()

        before = some(50)
        assert some(300) - before < 2 << 20, name


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_memory_is_counted_before_it_is_taken(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    header = GgufHeader(files["dense"])
    limits = EmbedLimits(tokens=4096, batch_tokens=512, chunked=True)
    memory = EmbeddingMemory.of(header, limits, 512, flash=True)
    assert memory.kv == 4096 * 512 and memory.logits == 512 * 512 * 4 * 2
    whole = EmbeddingMemory.of(header, EmbedLimits(tokens=4096, batch_tokens=512), 512, flash=False)
    assert whole.kv == 0 and whole.attention == 4 * 4096 * 4096 * 4
    assert not GgufHeader(files["encoder-mean"]).generates, "an encoder keeps nothing"
    monkeypatch.setattr("cllm.backend.llama.memory.available_memory", lambda: 1 << 16)
    with pytest.raises(NotEnoughMemory, match="not enough memory for embeddings"):
        memory.check()
    # Of a model that generates, they are counted when the first is asked for.
    config = EngineConfig(model=str(files["dense"]), parallel=2, ctx_size=1024, threads=1)
    too_large = pytest.raises(NotEnoughMemory, match="not enough memory for embeddings")
    with closing(LlamaRunner(config)) as runner, too_large:
        runner.open_embedding()


def test_a_ranking_head_that_is_not_there_is_refused(files: dict[str, Path]) -> None:
    with pytest.raises(ModelFileError, match="no ranking head"):
        prepare(EngineConfig(model=str(files["dense"]), pooling="rank"))
    assert prepare(EngineConfig(model=str(files["reranker"]))).model


def test_an_encoder_passes_the_probe(files: dict[str, Path]) -> None:
    from cllm.backend.llama.probe import run_probe

    result = run_probe(prepare(EngineConfig(model=str(files["encoder-mean"]), threads=1)))
    assert result.passed and math.isfinite(result.tokens_per_second), result.detail
