"""The mutations that `proof/mutants.py` draws from."""

from __future__ import annotations

import ast

import pytest

from proof.mutants import COUNT, draw
from proof.shared.mutation import mutate


def changes(source: str) -> list[str]:
    return [mutation.change for mutation in mutate(source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", ["comparison: a < b → a <= b", "comparison: a < b → a >= b"]),
        ("x = a + b", ["arithmetic: a + b → a - b"]),
        ("x = a and b", ["boolean: a and b → a or b"]),
        ("x = 3", ["constant: 3 → 4", "constant: 3 → 2"]),
        ("x = True", ["constant: True → False"]),
        ("x = min(a, b)", ["min/max: min(a, b) → max(a, b)"]),
        ("x = a if b else c", ["condition: if b → if not b"]),
        ("if not a: f()", ["condition: if not a → if a", "not: not a → a"]),
        ("def f() -> int: return a", ["return: return a → return a + 1"]),
        ("def f() -> bool: return a", ["return: return a → return not a"]),
        ("def f(): return a", ["return: return a → return None"]),
        ("def f(): a()", ["deleted: a() → pass"]),
        ("while a: break", ["condition: if a → if not a", "loop: break → continue"]),
    ],
)
def test_each_kind_of_change(source: str, expected: list[str]) -> None:
    assert changes(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""Text of 3."""',
        "def f(a: Literal[3]) -> Literal[4]: ...",
        "def f(): log.debug('%d', 3 + 4)",
        "def f(): assert a < 3",
        "x = f'{a + 1}'",
        "import a",
        "class A:\n    __slots__ = ('a',)",
    ],
)
def test_what_is_no_behaviour_is_left_alone(source: str) -> None:
    assert changes(source) == []


def test_the_source_is_as_before_when_all_are_made() -> None:
    source = "def f(a):\n    if not a and -1 < a:\n        return [b for b in a if b > 2]\n    a += 1\n"
    tree = None
    for mutation in mutate(source):
        tree = mutation.code
        compile(tree, "f", "exec")
    assert tree is not None and ast.dump(tree) == ast.dump(ast.parse(source))


def test_the_same_mutants_are_drawn_each_time() -> None:
    drawn = draw()
    assert len(drawn) == len({mutant.key for mutant in drawn}) == COUNT and drawn == draw()
