"""Every tiny architecture loads, its text depends on all of its context, and a partial state is smaller."""

from __future__ import annotations

import ctypes
import itertools

import pytest

from cllm.backend.llama.runner import LlamaRunner
from tests.driver.engine import words
from tests.driver.kinds import DENSE, HYBRIDS, RECURRENT, SLIDING, Kind, Opened
from tests.driver.runner import feed, native

ATTENTION = (DENSE, Kind("experts"), Kind("compressed"))
KINDS = (*ATTENTION, SLIDING, RECURRENT, *HYBRIDS)
PARTIAL_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: without the cells that attend to everything

each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)


def continue_text(runner: LlamaRunner, seq_id: int, prompt: list[int], count: int) -> list[int]:
    """The greedy continuation of a prompt."""
    tokens = list(prompt)
    pending = tokens[:]
    for _ in range(count):
        found = feed(runner, seq_id, pending, logprobs=1)
        assert found is not None
        pending = [found.token]
        tokens += pending
    return tokens[len(prompt) :]


@each_kind
def test_greedy_text_varies_and_depends_on_the_whole_context(kind: Kind, opened: Opened) -> None:
    runner = native(opened(kind, sequences=4))
    prompt = list(words(1, 30))
    answers = [continue_text(runner, 0, prompt, 24), continue_text(runner, 1, prompt, 24)]
    assert answers[0] == answers[1]
    changed = [prompt[0] ^ 1, *prompt[1:]]
    answers = [answers[0], continue_text(runner, 2, changed, 24), continue_text(runner, 3, prompt[::-1], 24)]
    assert all(len(set(answer)) > 8 for answer in answers)
    assert all(first != second for first, second in itertools.combinations(answers, 2))


def state_bytes(runner: LlamaRunner, seq_id: int, flags: int = 0) -> int:
    """Bytes of a sequence's state, written in full."""
    api, pointer = runner.api, runner.pointer
    size = int(api.llama_state_seq_get_size_ext(pointer, seq_id, flags))
    buffer = (ctypes.c_uint8 * size)()
    assert api.llama_state_seq_get_data_ext(pointer, buffer, size, seq_id, flags) == size
    return size


@pytest.mark.parametrize("kind", (SLIDING, *HYBRIDS), ids=lambda kind: kind.label)
def test_a_partial_state_leaves_out_the_cells_that_see_everything(kind: Kind, opened: Opened) -> None:
    runner = native(opened(kind))
    sizes = []
    for length in (100, 300):
        feed(runner, 0, words(0, length))
        sizes.append((state_bytes(runner, 0), state_bytes(runner, 0, PARTIAL_ONLY)))
    (full, partial), (longer_full, longer_partial) = sizes
    assert partial < full and longer_partial < longer_full
    if kind in HYBRIDS:
        assert partial == longer_partial, "the state of a sequence is as large at any length"
