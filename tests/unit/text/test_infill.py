"""A gap in a text: the order of its parts, what is cut when it is long, and models that cannot."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.errors import InvalidRequest
from cllm.messages import Prepare, Prepared
from cllm.testing import FakeVocabulary
from cllm.text.prompt import Gap, Snippet, infill_prompt
from cllm.types import Failure, InfillTokens, TokenBound
from cllm.workers.tokenizer import TokenizerWorker

PRE, SUF, MID, REP, SEP, BOS = range(300, 306)
CONTROL = 257


class Taught(FakeVocabulary):
    """The fake vocabulary of a model that fills gaps."""

    def __init__(self, *, project: bool = True, begins: bool = False) -> None:
        self.infill = InfillTokens(
            prefix=PRE,
            suffix=SUF,
            middle=MID,
            repository=REP if project else None,
            separator=SEP if project else None,
            begin=BOS if begins else None,
        )


def test_a_text_with_a_gap() -> None:
    gap = Gap(prefix="a<|x|>", suffix="b<|x|>")
    assert infill_prompt(Taught(begins=True), gap) == [BOS, PRE, *b"a<|x|>", SUF, *b"b<|x|>", MID]
    assert infill_prompt(Taught(), Gap(prefix=(1, 2), suffix="b")) == [PRE, 1, 2, SUF, *b"b", MID]


def test_a_file_of_a_project_comes_after_the_others_and_only_the_prompt_may_hold_control_tokens() -> None:
    gap = Gap(prefix="p", suffix="s", prompt="q<|x|>", snippets=(Snippet("text<|x|>", "util.py"),))
    around = [REP, *b"myproject\n", SEP, *b"util.py\n", *b"text<|x|>", SEP, *b"filename\n"]
    assert infill_prompt(Taught(), gap) == [*around, PRE, *b"pq", CONTROL, SUF, *b"s", MID]
    plain = infill_prompt(Taught(project=False), gap)
    assert plain[-7:] == [PRE, *b"pq", CONTROL, SUF, *b"s", MID]
    assert bytes(plain[: plain.index(PRE)]).endswith(b"text<|x|>") and REP not in plain


@given(
    prefix=st.integers(0, 60),
    suffix=st.integers(0, 60),
    snippet=st.integers(0, 60),
    prompt=st.integers(0, 5),
    room=st.integers(10, 120),
    begins=st.booleans(),
)
def test_what_does_not_fit_is_cut_at_the_far_ends(
    prefix: int, suffix: int, snippet: int, prompt: int, room: int, begins: bool
) -> None:
    gap = Gap(
        prefix="".join(chr(33 + index % 90) for index in range(prefix)),
        suffix="".join(chr(33 + index % 90) for index in range(suffix)),
        prompt="Q" * prompt,
        snippets=(Snippet("s" * snippet),),
    )
    whole = infill_prompt(Taught(begins=begins), gap)
    cut = infill_prompt(Taught(begins=begins), msgspec.structs.replace(gap, cut_to=room))
    if len(whole) <= room:
        assert cut == whole
        return
    assert len(cut) == room, "nothing of the room is wasted, and nothing is over it"
    before, after = cut.index(PRE), cut.index(SUF)
    kept_prefix, kept_suffix = bytes(cut[before + 1 : after]), bytes(cut[after + 1 : -1])
    assert (gap.prefix + gap.prompt).encode().endswith(kept_prefix)  # type: ignore[operator]
    assert gap.suffix.encode().startswith(kept_suffix)
    if kept_prefix != (gap.prefix + gap.prompt).encode():  # type: ignore[operator]
        assert before == begins, "other files go before the file itself is cut"


def test_a_model_that_was_not_taught_says_so() -> None:
    with pytest.raises(InvalidRequest, match="no fill-in-the-middle tokens") as refusal:
        infill_prompt(FakeVocabulary(), Gap(prefix="a", suffix="b"))
    assert refusal.value.field == "suffix"
    answer = TokenizerWorker(FakeVocabulary(), None).perform(
        Prepare((Gap(prefix="a", suffix="b", snippets=()),))
    )
    assert isinstance(answer, Failure) and answer.field == "input_suffix"


def test_without_room_a_long_text_is_refused() -> None:
    worker = TokenizerWorker(Taught(), None)
    gap = Gap(prefix="a" * 50, suffix="b")
    refused = worker.perform(Prepare((gap,), 20))
    assert isinstance(refused, Failure) and refused.code == "context_length_exceeded"
    cut = worker.perform(Prepare((msgspec.structs.replace(gap, cut_to=15),), 20))
    assert isinstance(cut, Prepared) and len(cut.prompts[0].prompt.items) == 15


@given(
    prefix=st.integers(0, 300),
    suffix=st.integers(0, 300),
    snippets=st.lists(st.integers(0, 300), max_size=4),
    room=st.integers(10, 60),
)
def test_text_that_is_cut_away_is_not_tokenised(
    prefix: int, suffix: int, snippets: list[int], room: int
) -> None:
    """The prompt is the same as if it were."""

    class Counting(Taught):
        tokenized = 0

        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            self.tokenized += len(text)
            return super().tokenize(text, add_special=add_special, parse_special=parse_special)

    class Unbounded(Taught):
        bound = TokenBound()

    texts = tuple(Snippet(chr(97 + number) * size) for number, size in enumerate(snippets))
    before = "0123456789" * 30 + "p" * prefix
    gap = Gap(prefix=before, suffix="s" * suffix, snippets=texts, cut_to=room)
    vocabulary = Counting()
    assert infill_prompt(vocabulary, gap) == infill_prompt(Unbounded(), gap)
    assert vocabulary.tokenized <= 3 * room * vocabulary.bound.longest + 100
