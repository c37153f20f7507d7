"""The proofs of the KV cache and of preemption, in small, and the rules they judge by."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.wire import Address
from bench.workloads.text import prose
from cllm.core.step_cost import StepCost
from proof.conversations import EXACT, OFF, Part, Pass, Turn, change_history, find_faults, run_conversations
from proof.density import run_density
from proof.shared.answers import Answer, Client, compare
from tests.driver.server import Server, environment

COMMAND = (sys.executable, "-m", "cllm")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def answer(text: str, cached: int = 0, source: str = "", gap: float = 1.0) -> Answer:
    tokens = tuple(text.encode())
    return Answer(tokens, (gap,) * len(text), "length", text, 9, cached, source)


def turn(*contents: str, change: str = "continued", said: str = "abcd") -> Turn:
    roles = ("system", *("user", "assistant") * len(contents))
    parts = tuple(Part(role, content) for role, content in zip(roles, contents, strict=False))
    return Turn(parts, change, answer(said))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("continued", [("s1 q1 a1 q2 abcd new")]),
        ("left", ["s1 q1 a1 q2 abcd new"]),
        ("regenerated", ["s1 q1 a1 q2"]),
        ("edited", ["s1 new", "s1 q1 a1 new"]),
        ("cut", ["s1 q2 abcd new"]),
        ("stripped", ["s1 q1 a1 q2 bcd new", "s1 q1 a1 q2 cd new"]),
    ],
)
def test_histories_change_in_these_ways(change: str, expected: list[str]) -> None:
    written = [turn("s1", "q1"), turn("s1", "q1", "a1", "q2")]
    found = {
        " ".join(str(part.content) for part in change_history(written, change, Part("user", "new"), draw))
        for draw in map(random.Random, range(20))
    }
    assert found == set(expected)


def test_a_cut_of_a_short_history_drops_the_system_prompt() -> None:
    history = change_history([turn("s1", "q1")], "cut", Part("user", "new"), random.Random(1))
    assert [part.content for part in history] == ["q1", "abcd", "new"]


def judge(*answers: Answer, off: Answer | None = None, need: str = "") -> list[str]:
    """The faults of one turn, asked with the cache on and perhaps with it off."""
    script = [turn("s", "q")]
    alone = [each.answer for each in script]
    passes = [Pass("", [each], compare(alone, [each]), 1.0) for each in (*answers, *([off] if off else []))]
    return find_faults([script], passes, need)


def test_a_difference_counts_unless_the_control_has_it_too() -> None:
    assert judge(answer("abcd", 5, "ram")) == []
    assert "1 differences" in judge(answer("abXd", 5))[0]
    assert judge(answer("abXd", 5), off=answer("aXcd")) == []
    assert "1 differences" in judge(answer("abXd", 5), off=answer("abcd"))[0]
    assert judge(answer("abcd")) == ["FAIL: nothing was cached: this proves nothing"]
    assert judge(answer("abcd", 5, "device"), need="ram") == ["FAIL: nothing came from ram"]
    assert judge(answer("abcd", 5, "ram+checkpoint"), need="checkpoint") == []
    assert "though the cache was off" in judge(answer("abcd", 5), off=answer("abcd", 3))[0]


def test_conversations_say_the_same_with_the_cache(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert OFF == {"cache_prompt": False}
    code = run_conversations(tiny_model, count=4, at_once=4, flags=EXACT, command=COMMAND, logs=tmp_path)
    assert code == 0, capsys.readouterr().out
    assert "4 of 4" in capsys.readouterr().out


def tokens_of(client: Client, name: str, count: int) -> tuple[int, ...]:
    """The first `count` tokens of a text of that name: a word has one at least."""
    return client.tokenize(prose(name, count))[:count]


def test_second_turns_compute_only_what_is_new(tmp_path: Path) -> None:
    """Users with one system prompt, all at once: what is new is the question, and the answer's last token.

    The embedded model on a server of its own: slots are chosen by price. Of a tiny model a whole conversation
    may be worth less than a gap, as may one where most of what others asked never came back.
    """
    users = 4

    def ask_all(prompts: list[tuple[int, ...]]) -> list[Answer]:
        with ThreadPoolExecutor(users) as pool:
            return list(pool.map(lambda prompt: client.complete(prompt, 16), prompts))

    with Server(tmp_path / "log", "--parallel", str(users), "--ctx-size", "8192") as server:
        client = Client(Address("127.0.0.1", server.port))
        system = tokens_of(client, "system", 120)
        asked = [system + tokens_of(client, f"first {user}", 20 + 5 * user) for user in range(users)]
        first = ask_all(asked)
        assert sum(each.computed_tokens for each in first) < 2 * 120 + 4 * 40, "the system prompt, once"
        new = [tokens_of(client, f"second {user}", 40 - 5 * user) for user in range(users)]
        said: Any = [each.tokens for each in first]
        second = ask_all([sum(parts, ()) for parts in zip(asked, said, new, strict=True)])
    computed = [each.computed_tokens - len(more) for each, more in zip(second, new, strict=True)]
    assert max(computed) <= 1, computed
    assert {each.cached_from for each in second} <= {"device", "ram"}, "a gap may cost more than RAM"


def test_batches_stay_dense(capsys: pytest.CaptureFixture[str]) -> None:
    """With 8 of 16 slots at random it would be 4.5."""
    # As on a machine that is not busy; what is measured there differs.
    cost = StepCost(ubatch=4e-4, prefill_token=4e-5, row=6e-5, attended=1e-8)
    assert run_density(conversations=20, known=cost) == 0, capsys.readouterr().out
    assert "20 conversations, 16 slots: pass" in capsys.readouterr().out


def tied(text: str, ties: str = "", finish: str = "length") -> Answer:
    """One token a letter; a tie where `ties` has an x."""
    gaps = tuple(0.01 if mark == "x" else 1.0 for mark in ties.ljust(len(text)))
    return Answer(tuple(text.encode()), gaps, finish)


def test_texts_may_part_at_a_tie_and_nowhere_else() -> None:
    alone = tied("abcdef", "  x")
    assert compare([alone], [tied("abcdef")])[:4] == (1, 0, 1, 6)
    assert compare([alone], [tied("abXYZ")])[:4] == (0, 1, 1, 2)
    for wrong in (tied("aXcdef"), tied("abcdeX"), tied("abcde"), tied("abcdef", finish="stop")):
        assert len(compare([alone], [wrong]).faults) == 1
