"""Media steps: pictures among text, in chunks or whole, and the prefix cache that knows them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from cllm.backend.base import BatchKind, StepStatus
from cllm.core.prefill_budget import PrefillBudget
from cllm.core.sequence import Rows
from cllm.types import FinishReason, Prompt, SamplingParams, Span, make_pseudo_ids
from tests.driver.engine import StepDriver, words
from tests.driver.fake_runner import MEDIA_WIDTH, FakeRunner

Media = dict[str, Rows]
ENDLESS = SamplingParams(ignore_eos=True)


def make_prompt(*parts: str | tuple[str, int], causal: bool = True) -> tuple[Prompt, Media]:
    """A prompt of texts and of pictures (name, rows)."""
    items: list[int] = []
    spans: list[Span] = []
    for part in parts:
        if isinstance(part, str):
            items += part.encode()
            continue
        name, rows = part
        spans.append(Span(len(items), len(items) + rows, rows, name, causal=causal))
        items += make_pseudo_ids(name, rows)
    media = {span.media: np.zeros((span.end - span.begin, MEDIA_WIDTH), np.float32) for span in spans}
    return Prompt(tuple(items), tuple(spans)), media


def beside(*, unified: bool = False) -> StepDriver:
    """A driver whose runner computes text as rows."""
    fake = FakeRunner(batch_tokens=512, cells=8192, unified=unified)
    fake.token_rows = lambda tokens: np.zeros((len(tokens), MEDIA_WIDTH), np.float32)
    return StepDriver(fake)


def media_batches(driver: StepDriver) -> list[list[int]]:
    """The rows of each sequence in the media batches so far."""
    batches = (batch for batch in driver.runner.batches if batch.kind is BatchKind.MEDIA)
    return [[len(row.tokens) for row in batch.rows] for batch in batches]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("rows", [False, True])
def test_pictures_and_text_are_computed_in_turn(causal: bool, unified: bool, rows: bool) -> None:
    driver = beside(unified=unified) if rows else StepDriver(FakeRunner(unified=unified))
    names = [
        driver.add_media(
            *make_prompt("Look at ", (f"a{n}", 20), " and ", (f"b{n}", 30), "?", causal=causal), 12
        )
        for n in range(6)
    ]
    names += [driver.add(words(seed, 50), 20) for seed in range(3)]
    driver.finish()
    for name in names:
        driver.check_answer(name)
        assert driver.text(name) == driver.expected(name)
    together = max(map(len, media_batches(driver)))
    assert together > (not rows) if causal else together == 1, "one that is not causal is alone"


@pytest.mark.parametrize("causal", [True, False])
def test_pictures_are_charged_for(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a tenant that sends pictures would have them for nothing."""
    driver, charged = StepDriver(FakeRunner()), []
    monkeypatch.setattr(
        driver.scheduler.budget, "charge_step", lambda running, decoding, chunks=(): charged.extend(chunks)
    )
    prompt, media = make_prompt("Look at ", ("a", 20), " this.", causal=causal)
    driver.add_media(prompt, media, 4)
    driver.finish()
    assert sum(part for _, part in charged) == len("Look at ") + 20 + len(" this.")


def test_causal_chunks_keep_the_target_beside_streams() -> None:
    driver = StepDriver(FakeRunner(batch_tokens=512, cells=8192))
    stream = driver.add(words(0, 5), 200, ignore_eos=True)
    driver.step(2)
    picture = driver.add_media(*make_prompt("Look at ", ("a", 400), "?"), 4)
    driver.finish()
    sizes = [sum(rows) for rows in media_batches(driver)]
    assert (
        sum(sizes) == 400
        and max(sizes) <= PrefillBudget(512, 1.0, driver.scheduler.budget.cost).first_chunk + 1
    )
    kinds = [batch.kind for batch in driver.runner.batches]
    len(kinds) - kinds[::-1].index(BatchKind.MEDIA)
    pairs = itertools.pairwise(kinds)
    assert all(BatchKind.GENERATE in pair for pair in pairs), "a stream waits for one chunk at most"
    assert [driver.text(name) == driver.expected(name) for name in (stream, picture)] == [True, True]


def test_a_picture_alone_is_as_large_as_the_batch() -> None:
    driver = StepDriver(FakeRunner(batch_tokens=512, cells=8192))
    driver.add_media(*make_prompt("Look at ", ("a", 400), "?"), 4)
    driver.finish()
    assert media_batches(driver) == [[400]]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (("Look at ", ("a", 40), " and ", ("b", 30), "?"), [[8 + 40 + 5 + 30 + 1]]),
        (("x" * 65, ("a", 40), "x" * 65, ("b", 30), "x" * 64), [[40], [30]]),
        (("x" * 64, ("a", 40), "x" * 64, ("b", 30), "x" * 63), [[64 + 40 + 64 + 30 + 63]]),
    ],
)
def test_text_of_less_than_a_tile_goes_with_a_picture(
    parts: tuple[str | tuple[str, int], ...], expected: list[list[int]]
) -> None:
    driver = beside()
    name = driver.add_media(*make_prompt(*parts), 4)
    driver.finish()
    assert media_batches(driver) == expected and driver.text(name) == driver.expected(name)


def test_a_first_token_under_a_mask_is_sampled_by_a_step_of_text() -> None:
    driver = beside()
    name = driver.add_media(*make_prompt("Look at ", ("a", 40), "?"), 4, min_tokens=2)
    driver.finish()
    assert media_batches(driver) == [[48]] and driver.usage(name).completion_tokens >= 2


def test_a_whole_picture_is_not_cut_beside_streams() -> None:
    driver = StepDriver(FakeRunner(batch_tokens=512, cells=8192))
    driver.add(words(0, 5), 200, ignore_eos=True)
    driver.step(2)
    name = driver.add_media(*make_prompt("Look at ", ("a", 400), "?", causal=False), 4)
    driver.finish()
    assert media_batches(driver) == [[400]] and driver.text(name) == driver.expected(name)


def test_what_cannot_be_computed_is_refused_alone() -> None:
    driver = StepDriver(FakeRunner(batch_tokens=64))
    prompt, media = make_prompt("Look at ", ("a", 65), "?", causal=False)
    large = driver.add_media(prompt, media, 4)
    missing = driver.add_media(prompt, {}, 4)
    narrow = driver.add_media(prompt, {"a": media["a"][:, :1]}, 4)
    last = driver.add_media(*make_prompt("Look at ", ("a", 5)), 4)
    scored = driver.add_media(*make_prompt(("a", 5), "?"), 4, prompt_logprobs=1)
    fine = driver.add_media(*make_prompt("Look at ", ("a", 64), "?", causal=False), 4)
    answers = driver.finish()
    assert "65 rows, and a step at most 64" in answers[large].error_message
    assert "--batch-tokens 65" in answers[large].error_message
    assert "ends with a picture" in answers[last].error_message
    assert "log-probabilities" in answers[scored].error_message
    assert [answers[name].error_code for name in (missing, narrow)] == ["engine_error"] * 2
    assert driver.text(fine) == driver.expected(fine)


@pytest.mark.parametrize("tier", ["device", "ram", "disk"])
def test_the_prefix_cache_knows_pictures(tier: str, tmp_path: Path) -> None:
    def open_driver() -> StepDriver:
        disk_mb = 16 if tier == "disk" else 0
        return StepDriver(FakeRunner(cells=4096), cache_mb=16, cache_disk_mb=disk_mb, cache_dir=str(tmp_path))

    driver = open_driver()
    first = driver.add_media(*make_prompt("Look at this: ", ("a", 200), " What is it?"), 4)
    driver.finish()
    if tier == "ram":
        driver.offload()
    elif tier == "disk":
        driver.close_disk()
        driver = open_driver()
    same = driver.add_media(*make_prompt("Look at this: ", ("a", 200), " Or?"), 4)
    driver.finish()
    other = driver.add_media(*make_prompt("Look at this: ", ("b", 200), " Or?"), 4)
    driver.finish()
    assert driver.usage(same).cached_tokens == len(b"Look at this: ") + 200 + 1
    assert driver.usage(same).cached_from == tier
    assert driver.usage(other).cached_tokens == len(b"Look at this: ")
    for name in (same, other):
        assert driver.text(name) == driver.expected(name)
    assert driver.core.idle and first


def test_ids_that_collide_are_not_taken_for_the_picture() -> None:
    driver = StepDriver(FakeRunner(cells=4096), cache_mb=16)
    prompt, media = make_prompt("Look at this: ", ("a", 200), " What is it?")
    driver.add_media(prompt, media, 4)
    driver.finish()
    forged = Prompt(prompt.items, (Span(14, 214, 200, "b"),))
    name = driver.add_media(forged, {"b": media["a"]}, 4)
    running = driver.add_media(prompt, media, 4)
    driver.finish()
    assert driver.usage(name).cached_tokens == len(b"Look at this: ")
    assert driver.usage(running).cached_tokens > 200


@pytest.mark.parametrize("status", [StepStatus.ABORTED, StepStatus.FAILED, StepStatus.NO_ROOM])
def test_a_failed_step_inside_a_picture_is_rolled_back(status: StepStatus) -> None:
    failures = iter([status])

    def fail(_: int, call: str) -> StepStatus | None:
        inside = any(len(memory) > 0 for memory in fake.memory) and len(media_batches(driver)) == 2
        return next(failures, None) if call == "collect" and inside else None

    fake = FakeRunner(batch_tokens=64, fail=fail)
    driver = StepDriver(fake)
    driver.kv_runs_out = True
    names = [driver.add_media(*make_prompt("Look at ", (str(n), 150), "?"), 8) for n in range(2)]
    driver.finish()
    assert next(failures, None) is None, "it failed"
    assert [driver.text(name) for name in names] == [driver.expected(name) for name in names]


def test_a_preempted_picture_is_resumed() -> None:
    driver = StepDriver(FakeRunner(unified=True, cells=400, batch_tokens=64))
    names = [
        driver.add_media(*make_prompt("Look at ", (str(n), 100), "?"), 80, sampling=ENDLESS) for n in range(4)
    ]
    driver.finish()
    assert driver.scheduler.transfer.swap_outs > 0
    for name in names:
        driver.check_answer(name)
        assert driver.outcome(name) in (FinishReason.STOP, FinishReason.LENGTH)


def test_media_requests_draft_nothing_and_skip_pseudo_ids() -> None:
    driver = StepDriver(FakeRunner(), draft_tokens=4)
    prompt, media = make_prompt("Look at ", ("a", 40), "?")
    name = driver.add_media(prompt, media, 8)
    assert driver.scheduler.live[name].drafts is None
    driver.finish()
    assert prompt.text == tuple(b"Look at ?") and driver.usage(name).drafted_tokens == 0
