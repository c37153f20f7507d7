"""Figures against plain computations of the same."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.figures import (
    FIGURES,
    MIN_CHUNKS,
    Completion,
    LoadResult,
    all_generating,
    decode_rate,
    first_token_growth,
    last_turns,
    percentile,
    recomputed_tokens,
    stall_gap,
    step_seconds,
    streams_rate,
)

TIMES = st.floats(0.001, 100.0)


def completion(
    times: list[float], index: int = 0, *, late: bool = False, started_s: float = 0.0
) -> Completion:
    return Completion(
        index,
        started_s,
        late=late,
        total_s=times[-1] - started_s if times else 0.0,
        chunks_s=tuple(times),
        generated_tokens=len(times),
    )


def load(*completions: Completion, wall_s: float = 1.0) -> LoadResult:
    return LoadResult("w", wall_s, 0.0, completions)


@given(st.lists(TIMES, min_size=1, max_size=50), st.floats(0, 100))
def test_a_percentile_lies_between_its_neighbours(values: list[float], rank: float) -> None:
    ordered = sorted(values)
    place = rank / 100 * (len(values) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    expected = low + (high - low) * (place - math.floor(place))
    assert percentile(values, rank) == pytest.approx(expected)


def test_nothing_measured_is_no_number() -> None:
    assert math.isnan(percentile([], 50))
    for name, figure in FIGURES.items():
        if name not in ("tokens_per_second", "wall_s"):
            assert math.isnan(figure.of([load()])), name


@given(st.lists(st.lists(TIMES, min_size=1, max_size=20), min_size=1, max_size=5))
def test_gaps_are_counted_within_a_stream_only(steps: list[list[float]]) -> None:
    streams = [list(accumulate(each)) for each in steps]
    gaps = [later - earlier for stream in streams for earlier, later in pairwise(stream)]
    found = FIGURES["gap_worst_s"].of([load(*map(completion, streams))])
    assert found == pytest.approx(max(gaps)) if gaps else math.isnan(found)


def test_a_failed_request_is_in_no_figure() -> None:
    good = completion([0.1, 0.2])
    bad = Completion(1, 0.0, chunks_s=(5.0, 9.0), error="died")
    for name, figure in FIGURES.items():
        both, alone = figure.of([load(good, bad)]), figure.of([load(good)])
        assert both == alone or math.isnan(alone), name


def test_the_stall_is_what_the_others_wait_while_the_late_prompt_is_read() -> None:
    """A gap before the late one was sent and one after its first token do not count."""
    stream = completion([0.0, 3.0, 3.1, 4.1, 4.2, 9.0])
    late = completion([4.15, 4.3], 1, late=True, started_s=3.05)
    assert stall_gap([load(stream, late)]) == pytest.approx(1.0)
    assert math.isnan(stall_gap([load(stream)]))
    assert FIGURES["late_first_token_s"].of([load(stream, late)]) == pytest.approx(1.1)
    assert FIGURES["first_token_p50_s"].of([load(stream, late)]) == 0.0


def test_the_rate_of_streams_ends_with_the_last_of_them() -> None:
    streams = [completion([1.0, 2.0, 3.0]), completion([1.0, 4.0], 1)]
    late = completion([9.0], 2, late=True, started_s=2.0)
    assert streams_rate([load(*streams, late, wall_s=9.0)]) == pytest.approx(5 / 4)


@given(
    st.lists(st.integers(0, 500).map(lambda hundredths: hundredths / 100), min_size=1, max_size=8),
    st.floats(0.001, 0.5),
    st.integers(1, 4),
    st.integers(MIN_CHUNKS + 1, 40),
)
def test_a_step_is_measured_where_all_generate(
    delays: list[float], step_s: float, tokens_per_chunk: int, count: int
) -> None:
    """Streams begin late and end late; alone they run twice as fast, which must not count."""
    begin = max(delays)
    streams = []
    for index, delay in enumerate(delays):
        alone = [delay + number * (begin - delay) / 7 for number in range(7)] if delay < begin else []
        together = [begin + number * step_s * tokens_per_chunk for number in range(count)]
        times = alone + together
        streams.append(
            Completion(index, 0.0, chunks_s=tuple(times), generated_tokens=tokens_per_chunk * len(times))
        )
    window = all_generating(streams)
    assert window is not None and window[0] == begin
    assert step_seconds([load(*streams)]) == pytest.approx(step_s)
    assert decode_rate([load(*streams)]) == pytest.approx(len(delays) / step_s)


def test_streams_that_never_all_generate_have_no_step() -> None:
    early, late = completion([0.1, 0.2, 0.3]), completion([0.4, 0.5], 1)
    assert all_generating([early, late]) is None
    assert math.isnan(step_seconds([load(early, late)]))
    few = completion([0.1 * number for number in range(MIN_CHUNKS - 1)])
    assert math.isnan(step_seconds([load(few)]))


def series(times: list[float]) -> LoadResult:
    return load(*(completion([time], index) for index, time in enumerate(times)))


def test_growth_is_pooled_over_rounds() -> None:
    assert first_token_growth([series([1.0] * 10)]) == 1.0
    assert first_token_growth([series([1.0] * 7 + [2.0] * 3)]) == 2.0
    hiccup = series([1.0] * 7 + [9.0] * 3)
    assert first_token_growth([hiccup, *[series([1.0] * 10)] * 2]) == 1.0
    assert FIGURES["first_token_growth"].pooled


@given(st.integers(2, 50), st.integers(1, 5), st.floats(0.001, 1.0))
def test_time_per_token_does_not_depend_on_chunks(chunks: int, tokens_per_chunk: int, token_s: float) -> None:
    times = tuple(number * token_s * tokens_per_chunk for number in range(chunks))
    one = Completion(0, 0.0, chunks_s=times, generated_tokens=chunks * tokens_per_chunk)
    assert FIGURES["token_p50_s"].of([load(one)]) == pytest.approx(token_s)


def turn(number: int, prompt: int, cached: int | None, total_s: float = 1.0) -> Completion:
    """A turn of ten generated tokens."""
    return Completion(
        number,
        0.0,
        turn=number,
        total_s=total_s,
        generated_tokens=10,
        prompt_tokens=prompt,
        cached_tokens=cached,
    )


def test_what_a_turn_computes_again_is_what_the_one_before_had() -> None:
    """Turn 1 has 110 tokens at its end; of turn 2, 105 are cached. Conversations are counted apart."""
    talk = [turn(0, 100, 0), turn(1, 130, 105), turn(2, 160, 160)]
    other = [turn(0, 500, 0), turn(1, 520, 500)]
    assert recomputed_tokens([load(*talk, *other)]) == [5, 0, 10]
    assert FIGURES["recomputed_tokens"].of([load(*talk, *other)]) == 5
    assert FIGURES["recomputed_worst"].of([load(*talk, *other)]) == 10
    assert FIGURES["computed_tokens"].of([load(*talk), load(*other)]) == ((100 + 25) + (500 + 20)) / 2
    assert recomputed_tokens([load(turn(0, 100, None), turn(1, 130, None))]) == []
    failed = Completion(1, 0.0, turn=1, error="died")
    assert recomputed_tokens([load(turn(0, 100, 0), failed, turn(2, 160, 90))]) == []


def test_the_last_turns_of_every_conversation_count() -> None:
    talk = [turn(number, 100, 0, total_s=number) for number in range(5)]
    assert last_turns([load(*talk, *talk)]) == [2, 3, 4] * 2
    assert last_turns([load(*map(completion, [[1.0]] * 5))]) == []


def test_cached_tokens_are_a_share() -> None:
    known = [
        Completion(index, 0.0, prompt_tokens=100, cached_tokens=cached)
        for index, cached in enumerate((0, 90))
    ]
    unknown = Completion(2, 0.0, prompt_tokens=100)
    assert FIGURES["cached_share"].of([load(*known, unknown)]) == pytest.approx(0.45)
