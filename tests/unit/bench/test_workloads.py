"""Workloads: the built-in ones say what they promise, files are checked, rounds share nothing."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.workloads import Definition, Group, built_in, find, make_plan, read_file
from bench.workloads.definition import ORDER, clients_of
from bench.workloads.plan import make_fill
from bench.workloads.text import TEXTS, prose
from cllm.errors import SetupError

ROOT = Path(__file__).parents[3]
GPU = [read_file(path) for path in sorted((ROOT / "bench" / "gpu" / "workloads").glob("*.toml"))]
LENGTHS = st.integers(1, 60) | st.tuples(st.integers(1, 30), st.integers(30, 60))


def prompts(definition: Definition, salt: str | int) -> list[str]:
    plan = make_plan(definition, salt)
    return [turn.prompt for group in plan.groups for session in group.sessions for turn in session.turns]


def common_words(first: str, second: str) -> int:
    pairs = zip(first.split(), second.split(), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.mark.parametrize("name", ORDER)
def test_a_round_is_the_same_again_and_of_no_use_to_another(name: str) -> None:
    definition = built_in()[name]
    assert make_plan(definition, 3) == make_plan(definition, 3)
    for salt in (4, "3 busy"):
        for ours, theirs in itertools.product(prompts(definition, 3), prompts(definition, salt)):
            assert common_words(ours, theirs) <= 3


@pytest.mark.parametrize("name", [name for name in ORDER if name != "shared"])
def test_prompts_of_a_round_share_no_beginning(name: str) -> None:
    found = prompts(built_in()[name], 1)
    assert all(common_words(*pair) <= 3 for pair in itertools.combinations(found, 2))


def test_the_built_in_workloads_are_those_of_the_table() -> None:
    known = {
        name: [
            (len(group.sessions), group.clients, len(group.sessions[0].turns))
            for group in make_plan(definition, 1).groups
        ]
        for name, definition in built_in().items()
    }
    assert known == {
        "real": [(12, 8, 1)],
        "agents": [(8, 8, 4)],
        "chat": [(16, 16, 3)],
        "burst": [(16, 16, 1)],
        "arrivals": [(20, 0, 1)],
        "stall": [(6, 6, 1), (1, 1, 1)],
        "shared": [(24, 8, 1)],
        "agent": [(1, 1, 10)],
        "long": [(8, 8, 1)],
        "distinct": [(32, 8, 1)],
        "single": [(6, 1, 1)],
        "stale": [(10, 1, 1)],
        "contended": [(16, 8, 1)],
        "sweep": [(32, 8, 1)],
    }


@pytest.mark.parametrize("definition", [*built_in().values(), *GPU], ids=lambda each: each.name)
def test_every_request_fits_into_its_server(definition: Definition) -> None:
    """A sequence of a split cache gets its part of the cells and no more."""
    for group in definition.groups:
        lengths = [group.prompt_tokens, group.output_tokens]
        turn = sum(length if isinstance(length, int) else max(length) for length in lengths)
        longest = group.shared_prefix_tokens + group.prefix_tokens + group.turns * turn
        assert longest <= definition.ctx_size / definition.parallel
    assert len(make_fill(definition).groups[0].sessions) == definition.fill


def test_shared_questions_follow_one_text() -> None:
    found = prompts(built_in()["shared"], 1)
    text = found[0].partition("\n\n")[0]
    assert len(text.split()) == 800
    assert {prompt.partition("\n\n")[0] for prompt in found} == {text}
    questions = [prompt.partition("\n\n")[2] for prompt in found]
    assert len(set(questions)) == 24 and {len(question.split()) for question in questions} == {16}


def test_each_agent_begins_with_a_text_of_its_own() -> None:
    (group,) = make_plan(built_in()["agents"], 1, tokens_per_word=1.2).groups
    for session in group.sessions:
        text, _, question = session.turns[0].prompt.partition("\n\n")
        assert (len(text.split()), len(question.split())) == (333, 67)
        assert [len(turn.prompt.split()) for turn in session.turns[1:]] == [67] * 3
    assert len({session.turns[0].prompt for session in group.sessions}) == 8


@pytest.mark.parametrize("name", ["real", "agents", "chat", "burst", "arrivals"])
def test_answers_of_a_list_are_unequal_and_the_same_every_round(name: str) -> None:
    """They lie between a third and five thirds of their mean, so that no two requests end in lockstep."""
    definition = built_in()[name]
    rounds = [
        [
            turn.max_tokens
            for session in make_plan(definition, salt).groups[0].sessions
            for turn in session.turns
        ]
        for salt in (1, 2)
    ]
    assert rounds[0] == rounds[1]
    assert all(before != after for before, after in itertools.pairwise(rounds[0]))
    lengths = definition.groups[0].output_tokens
    assert isinstance(lengths, tuple) and set(rounds[0]) == set(lengths)
    assert 3 * min(lengths) >= sum(lengths) / len(lengths) >= 3 / 5 * max(lengths)


def test_users_send_chats_at_a_temperature() -> None:
    for name in ("real", "chat", "arrivals"):
        (group,) = make_plan(built_in()[name], 1).groups
        assert all(session.is_chat for session in group.sessions)
        assert {turn.temperature for session in group.sessions for turn in session.turns} == {0.8}
    assert not make_plan(built_in()["burst"], 1).groups[0].sessions[0].is_chat


def test_a_workload_is_greedy_or_sampled_as_asked() -> None:
    definition = built_in()["agents"]
    temperatures = {group.temperature for group in definition.at_temperature(0.8).groups}
    assert temperatures == {0.8} and {group.temperature for group in definition.groups} == {0.0}
    (planned,) = make_plan(definition.at_temperature(0.8), 1).groups
    assert {turn.temperature for session in planned.sessions for turn in session.turns} == {0.8}
    assert prompts(definition.at_temperature(0.8), 1) == prompts(definition, 1)


def test_a_sweep_has_two_requests_for_every_client() -> None:
    definition = built_in()["sweep"]
    assert [clients_of(condition) for condition in definition.conditions()] == [1, 2, 4, 8, 16, 32]
    for clients in (1, 2, 8, 32):
        (group,) = make_plan(definition, 1, clients=clients).groups
        assert (group.clients, len(group.sessions)) == (clients, max(4, 2 * clients))


@given(LENGTHS, LENGTHS, st.integers(1, 40), st.integers(1, 3), st.floats(0.3, 6.0))
def test_lengths_are_as_asked_for(
    prompt: int | tuple[int, int],
    output: int | tuple[int, int],
    count: int,
    turns: int,
    tokens_per_word: float,
) -> None:
    group = Group(count=count, prompt_tokens=prompt, output_tokens=output, turns=turns)
    definition = Definition(name="x", about="x", groups=(group,))
    (planned,) = make_plan(definition, 1, tokens_per_word=tokens_per_word).groups
    assert len(planned.sessions) == count
    min_in, max_in = (prompt, prompt) if isinstance(prompt, int) else prompt
    min_out, max_out = (output, output) if isinstance(output, int) else output
    for session in planned.sessions:
        assert len(session.turns) == turns
        for turn in session.turns:
            tokens = len(turn.prompt.split()) * tokens_per_word
            assert min_in - tokens_per_word <= tokens <= max_in + tokens_per_word
            assert min_out <= turn.max_tokens <= max_out


@given(st.floats(0.5, 50.0), st.integers(2, 300))
def test_open_loop_arrivals_come_at_the_rate(rate: float, count: int) -> None:
    group = Group(count=count, rate=rate)
    (planned,) = make_plan(Definition(name="x", about="x", groups=(group,)), 1).groups
    times = [session.at_s for session in planned.sessions]
    assert planned.clients == 0
    assert times[0] == 0 and times == sorted(times)
    mean = times[-1] / (count - 1) * rate  # of exponential gaps: 1, give or take 1 / √count
    assert abs(mean - 1) < 6 / (count - 1) ** 0.5


@pytest.mark.parametrize("kind", TEXTS)
def test_words_are_as_many_as_asked_for(kind: str) -> None:
    text = TEXTS[kind]
    for count in (1, 2, 3, 4, 1200, 40_000):
        assert len(text("a", count).split()) == count
    assert text("a", 5) == text("a", 5) != text("b", 5)


def test_prose_is_continuous() -> None:
    """Where a text has come to its source's end it goes on at its beginning: a second time round is equal."""
    text = prose("a", 300_000).split()[3:]
    around = next(size for size in range(1000, len(text)) if text[:50] == text[size : size + 50])
    assert text[: len(text) - around] == text[around:]
    assert sum(word.endswith(".") for word in text) > len(text) / 50


FILE = """
name = "desk"
about = "an example"
parallel = 4

[[groups]]
count = 3
prompt_tokens = [8, 16]
output_tokens = 4
rate = 2.5

[[bars]]
figure = "first_token_p99_s"
at_most = 0.5
"""


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "desk.toml"
    file.write_text(FILE)
    (definition,) = find([str(file)])
    assert definition.groups[0].prompt_tokens == (8, 16) and definition.bars[0].at_most == 0.5
    assert definition.conditions() == ("",)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("count = 3", "count = 0", "count"),
        ("count = 3", "cuont = 3", "cuont"),
        ("[8, 16]", "[16, 8]", "prompt_tokens"),
        ("[8, 16]", "0", "prompt_tokens"),
        ("[8, 16]", "[]", "prompt_tokens"),
        ("[8, 16]", "[8, 0, 16]", "prompt_tokens"),
        ("first_token_p99_s", "speed", "speed"),
        ("at_most = 0.5", "", "at_least or at_most"),
        ("at_most = 0.5", "at_most = 1\nat_least = 1", "at_least or at_most"),
        ("rate = 2.5", "after_chunks = 3", "begin by itself"),
        ("rate = 2.5", 'prompts_file = "none.txt"', "none.txt"),
        ("[[groups]]", "[[groups]", ""),
        ('"desk"', '"a desk"', "name"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in FILE
    file = tmp_path / "desk.toml"
    file.write_text(FILE.replace(old, new))
    with pytest.raises(SetupError) as caught:
        read_file(file)
    assert str(file) in str(caught.value) and words in str(caught.value)


def test_unknown_and_doubled_workloads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="real, agents"):
        find(["fastest"])
    with pytest.raises(SetupError, match=r"none\.toml"):
        find([str(tmp_path / "none.toml")])
    with pytest.raises(SetupError, match="two workloads"):
        find(["distinct", "distinct"])


def test_prompts_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"Question {number}?", "max_tokens": 5}) for number in range(2))
    )
    (tmp_path / "p.txt").write_text("One?\n\nTwo?\n")
    group = Group(count=3, prompts_file="p.jsonl", salt=False)
    definition = Definition(name="x", about="x", groups=(group,), folder=str(tmp_path))
    assert prompts(definition, 1) == ["Question 0?", "Question 1?", "Question 0?"]
    (planned,) = make_plan(definition, 1).groups
    assert planned.sessions[0].turns[0].max_tokens == 5
    salted = Definition(
        name="x", about="x", groups=(Group(count=2, prompts_file="p.txt"),), folder=str(tmp_path)
    )
    assert [prompt.endswith(end) for prompt, end in zip(prompts(salted, 1), ("One?", "Two?"), strict=True)]
    assert not set(prompts(salted, 1)) & set(prompts(salted, 2))
    (tmp_path / "p.jsonl").write_text("[]")
    with pytest.raises(SetupError, match=r"p\.jsonl"):
        make_plan(definition, 1)


def test_the_example_in_the_documentation_is_a_workload(tmp_path: Path) -> None:
    readme = (ROOT / "bench" / "README.md").read_text()
    example = readme.partition("```toml\n")[2].partition("```")[0]
    (tmp_path / "desk.toml").write_text(example)
    (tmp_path / "letters.txt").write_text("Dear all\n")
    plan = make_plan(read_file(tmp_path / "desk.toml"), 1)
    assert [(group.name, len(group.sessions), group.clients) for group in plan.groups] == [
        ("questions", 60, 0),
        ("letters", 4, 1),
    ]
