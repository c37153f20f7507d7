"""Media rows on llama.cpp: the same logits as its own helper, whatever is cut, saved, or computed beside."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cllm.backend.base import Batch, BatchKind, MediaRows, Row, StepResult, StepStatus
from cllm.backend.llama.library import DeferredFrees, load
from cllm.backend.llama.media import MediaEncoder, Picture, PromptText, Rows, Sound
from cllm.backend.llama.model import LlamaModel
from cllm.backend.llama.runner import LlamaRunner
from cllm.backend.llama.token_rows import find_token_rows
from cllm.config import EngineConfig
from cllm.errors import InvalidRequest, ModelFileError
from cllm.types import make_pseudo_ids
from tests.driver.engine import StepDriver
from tests.driver.media import (
    compute,
    encode,
    encode_all,
    make_picture,
    media_row,
    open_encoder,
    open_media_runner,
)
from tests.driver.runner import GREEDY
from tests.tiny_media import MediaModel

TIE = 1e-4  # of logits of F32 sums in another order
QUESTION = (" and this one? ", " Say which.")


@pytest.fixture(scope="module")
def encoder(files: MediaModel) -> Iterator[MediaEncoder]:
    with open_encoder(files) as opened:
        yield opened


@pytest.fixture(scope="module", params=[False, True], ids=["split", "unified"])
def runner(files: MediaModel, request: pytest.FixtureRequest) -> Iterator[LlamaRunner]:
    opened = open_media_runner(files, unified=request.param)
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def _empty_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "runner" in request.fixturenames:
        opened: LlamaRunner = request.getfixturevalue("runner")
        for seq_id in range(2):
            opened.remove(seq_id)


def helper_logits(encoder: MediaEncoder, runner: LlamaRunner, *parts: PromptText | Picture) -> Rows:
    """What llama.cpp's own helper makes of these parts, in one sequence."""
    api = runner.api
    with encoder.tokenize(parts) as tokenized:
        past = ctypes.c_int32()
        chunks, batch = tokenized.pointer, runner.limits.batch_tokens
        code = api.mtmd_helper_eval_chunks(
            encoder.pointer, runner.pointer, chunks, 0, 0, batch, True, ctypes.byref(past)
        )
        assert code == 0 and past.value == tokenized.prompt.position(len(tokenized.prompt))
    logits = np.array(runner.logits(1)[0])
    runner.remove(0)
    return logits


def test_logits_are_those_of_llama_cpps_helper(encoder: MediaEncoder, runner: LlamaRunner) -> None:
    pictures = make_picture(1), make_picture(2, 40, 72)
    parts = ("Look at ", pictures[0], QUESTION[0], pictures[1], QUESTION[1])
    native = [PromptText(part) if isinstance(part, str) else part for part in parts]
    expected = helper_logits(encoder, runner, *native)
    prompt, rows = encode(encoder, *parts)
    assert len(prompt.spans) == 2 and np.array_equal(compute(runner, prompt, rows), expected)
    other, other_rows = encode(encoder, "Look at ", pictures[1], QUESTION[0], pictures[0], QUESTION[1])
    runner.remove(0)
    assert not np.allclose(compute(runner, other, other_rows), expected, atol=0.1), "pictures are seen"


def test_chunks_of_causal_rows_add_up(encoder: MediaEncoder, runner: LlamaRunner) -> None:
    prompt, rows = encode(encoder, "Look at ", make_picture(1), QUESTION[1])
    whole = compute(runner, prompt, rows)
    runner.remove(0)
    assert np.allclose(compute(runner, prompt, rows, chunk=5), whole, atol=TIE)


def test_text_beside_a_picture_goes_with_it(encoder: MediaEncoder, runner: LlamaRunner) -> None:
    """Its tokens as rows, in one batch with those of the picture: the logits of three batches."""
    prompt, rows = encode(encoder, "Look at ", make_picture(1), QUESTION[1])
    (span,), end = prompt.spans, len(prompt)
    expected = compute(runner, prompt, rows)
    runner.remove(0)
    table = find_token_rows(runner, runner._model)
    assert runner.next_position(0) == 0 and (table is None) != span.causal, "Gemma scales tokens, but no rows"
    if table is None:
        return
    parts = table(prompt.items[: span.begin]), rows[span.media], table(prompt.items[span.end :])
    borders = itertools.pairwise(sorted({0, span.begin, span.end, end}))
    places = np.concatenate([prompt.places(*pair) for pair in borders], axis=1)
    row = Row(0, 0, prompt.items, 1, None, media=MediaRows(np.concatenate(parts), places))
    assert runner.decode((row,)) == 0
    assert np.allclose(runner.logits(1)[0], expected, atol=TIE)


def test_half_of_the_threads_are_left_to_the_encoder(files: MediaModel) -> None:
    runner = LlamaRunner(EngineConfig(model=str(files.model), threads=4, parallel=1, ctx_size=64))
    for position, encoding in enumerate((False, True, False)):
        runner.encoding = encoding
        assert runner.run(Batch((Row(0, position, (1,), 0, None),))).status is StepStatus.DONE
        assert runner.workers.threads == (2 if encoding else 4)
    runner.close()


def test_a_saved_picture_is_restored(encoder: MediaEncoder, runner: LlamaRunner) -> None:
    prompt, rows = encode(encoder, "Look at ", make_picture(1), QUESTION[1])
    expected = compute(runner, prompt, rows)
    runner.remove(0)
    for end in (prompt.spans[0].end, prompt.spans[0].end + 3):  # right after the picture, and later
        compute(runner, prompt, rows, end=end)
        state = runner.save(0)
        assert state is not None
        runner.remove(0)
        assert runner.restore(1, state) and runner.next_position(1) == prompt.next_position(end)
        assert np.allclose(compute(runner, prompt, rows, begin=end, seq_id=1), expected, atol=TIE)
        runner.remove(1)


def test_memory_is_cut_before_and_after_a_picture(encoder: MediaEncoder, runner: LlamaRunner) -> None:
    prompt, rows = encode(encoder, "Look at ", make_picture(1), QUESTION[1])
    expected = compute(runner, prompt, rows)
    for length in (prompt.spans[0].end, prompt.spans[0].begin):
        position = prompt.next_position(length)
        assert runner.truncate(0, position) == position
        assert np.allclose(compute(runner, prompt, rows, begin=length), expected, atol=TIE)


def test_rows_of_two_sequences_share_a_batch(encoder: MediaEncoder, runner: LlamaRunner) -> None:
    prompts = [encode(encoder, "Look at ", make_picture(seed), QUESTION[1]) for seed in (1, 2)]
    if not prompts[0][0].spans[0].causal:
        pytest.skip("such a picture is alone in its batch")
    expected = []
    for prompt, rows in prompts:
        expected.append(compute(runner, prompt, rows))
        runner.remove(0)
    for seq_id, (prompt, rows) in enumerate(prompts):
        compute(runner, prompt, rows, end=prompt.spans[0].begin, seq_id=seq_id)
    both = [
        media_row(prompt, rows, prompt.spans[0].begin, prompt.spans[0].end, seq_id)
        for seq_id, (prompt, rows) in enumerate(prompts)
    ]
    assert runner.run(Batch(tuple(both), BatchKind.MEDIA)).status is StepStatus.DONE
    for seq_id, (prompt, rows) in enumerate(prompts):
        logits = compute(runner, prompt, rows, begin=prompt.spans[0].end, seq_id=seq_id)
        assert np.allclose(logits, expected[seq_id], atol=TIE)


def test_a_picture_over_the_ubatch_raises_in_python(encoder: MediaEncoder, files: MediaModel) -> None:
    runner = open_media_runner(files, batch_tokens=12)
    try:
        prompt, rows = encode(encoder, make_picture(1), QUESTION[1])
        span = prompt.spans[0]
        begin = compute(runner, prompt, rows, end=span.begin, chunk=12) if span.begin else None
        with pytest.raises(ValueError, match="over the limit of 12"):
            runner.run(Batch((media_row(prompt, rows, span.begin, span.end),), BatchKind.MEDIA))
        again = compute(runner, prompt, rows, end=span.begin, chunk=12, seq_id=1) if span.begin else None
        assert begin is None or again is None or np.array_equal(begin, again), "attention is causal as before"
    finally:
        runner.close()


def test_the_encoder_takes_several_prompts_at_once(encoder: MediaEncoder) -> None:
    pictures = make_picture(1), make_picture(2), make_picture(1)
    alone = [encode(encoder, "Look at ", picture) for picture in pictures]
    prompts = [encoder.tokenize([PromptText("Look at "), picture]) for picture in pictures]
    together = encode_all(encoder, *prompts)
    assert len(together) == 2, "the same picture is encoded once"
    for (prompt, rows), native in zip(alone, prompts, strict=True):
        assert prompt == native.prompt
        for media, values in rows.items():
            assert np.allclose(together[media], values, atol=TIE)
    for native in prompts:
        native.close()


def test_items_name_the_picture_and_the_projector(encoder: MediaEncoder) -> None:
    prompts = [encode(encoder, picture)[0] for picture in (make_picture(1), make_picture(2))]
    same = encode(encoder, "But ", make_picture(1))[0]
    for prompt in (*prompts, same):
        (span,) = prompt.spans
        items = prompt.items[span.begin : span.end]
        assert items == make_pseudo_ids(span.media, len(items)) and max(items) < 0
        assert min(prompt.text) >= 0 if prompt.text else True
    assert prompts[0].spans[0].media == same.spans[0].media != prompts[1].spans[0].media


def test_text_of_a_user_has_no_control_tokens(encoder: MediaEncoder) -> None:
    parsed, plain = (
        encoder.tokenize([PromptText("<|im_start|>", parse_special=special), make_picture()])
        for special in (True, False)
    )
    assert len(parsed.prompt) < len(plain.prompt)
    parsed.close()
    plain.close()


def test_what_the_projector_cannot_take_is_refused(encoder: MediaEncoder) -> None:
    assert encoder.sees and not encoder.sample_rate
    with pytest.raises(InvalidRequest, match="sound"):
        encoder.tokenize([Sound(np.zeros(16000, np.float32))])
    with pytest.raises(InvalidRequest, match="3 bytes"):
        encoder.tokenize([Picture(4, 4, bytes(47))])
    with pytest.raises(InvalidRequest, match="3 bytes"):
        encoder.tokenize([Picture(0, 0, b"")])


def test_a_projector_of_another_width_is_refused(files: MediaModel, models: dict[str, Path]) -> None:
    library, frees = load(), DeferredFrees()
    config = EngineConfig(model=str(files.model), gpu_layers=0)
    with (
        LlamaModel(library, config, frees, weights=False) as model,
        pytest.raises(ModelFileError, match="cannot be loaded"),
    ):
        MediaEncoder(library, model, models["dense"], frees, threads=1)


def test_answers_under_load_are_those_alone(encoder: MediaEncoder, files: MediaModel) -> None:
    """Sixteen requests in four slots of one pool: preempted, cached, in chunks beside streams."""
    prompts = [
        encode(encoder, f"Number {seed}: ", make_picture(seed % 3), " and ", make_picture(7), f" {seed}?")
        for seed in range(8)
    ]
    prompts += [encode(encoder, "Look at ", make_picture(1), QUESTION[1] + "x" * seed) for seed in range(8)]
    alone = []
    for prompt, rows in prompts:
        driver = StepDriver(open_media_runner(files, unified=True))
        name = driver.add_media(prompt, rows, 12, sampling=GREEDY)
        alone.append(driver.finish()[name].tokens)
        driver.runner.close()
    runner = open_media_runner(files, unified=True, sequences=4, cells=256, batch_tokens=32)
    runner.token_rows = find_token_rows(runner, runner._model)  # those alone compute text as tokens
    driver = StepDriver(runner, cache_mb=16)

    def fail(number: int, _: Batch) -> StepResult | None:
        preempts = (
            number % 5 == 4 and len(driver.scheduler.running) > 1 and not driver.prefix_cache.device.entries
        )
        return StepResult(StepStatus.NO_ROOM) if preempts else None

    driver.runner.fail = fail
    names = [driver.add_media(prompt, rows, 12, sampling=GREEDY) for prompt, rows in prompts]
    text = driver.add(tuple(b"a text beside them"), 40)
    answers = driver.finish()
    again = driver.add_media(*prompts[-1], 12, sampling=GREEDY)
    answers = driver.finish()
    assert driver.scheduler.transfer.swap_outs > 0
    assert [answers[name].tokens for name in (*names, again)] == [*alone, alone[-1]]
    assert answers[again].work.decoded_tokens < 30 and answers[text].finish_reason is not None
    runner.close()
