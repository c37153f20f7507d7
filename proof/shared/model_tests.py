"""Pytest plugin: select the tests that load a model.

    pytest --ignore=tests/unit -p proof.shared.model_tests --loads model|embedded

`embedded` selects the tests that load the embedded model: those with the fixture of that name, and those
whose code, or that of their fixtures and helpers, opens it. `model` adds the other tests of their files, and
the contract tests on llama.cpp, which load tiny models; those on the fake runner load none.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.driver.kinds import Kind

CONTRACTS = "tests/contract/"
# The fixture, the function that finds the file, the classes that open it where no model is named, and the
# document whose example does.
EMBEDDED = frozenset(("embedded", "embedded_model", "LLM", "AsyncLLM", "README"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--loads", choices=("model", "embedded"), default="model", help="tests to select")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selected = {item for item in items if loads_embedded(item)}
    if config.getoption("--loads") == "model":
        files = {item.path for item in selected}
        selected |= {item for item in items if item.path in files or item.nodeid.startswith(CONTRACTS)}
        selected -= {item for item in items if is_fake(item)}
    config.hook.pytest_deselected(items=[item for item in items if item not in selected])
    items[:] = [item for item in items if item in selected]


def is_fake(item: pytest.Item) -> bool:
    """True for a contract test on the fake runner, by its parameter of the type `Kind`."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return any(isinstance(each, Kind) and not each.native for each in parameters)


def loads_embedded(item: pytest.Item) -> bool:
    """True if a test, one of its fixtures or a helper of them names what opens the embedded model."""
    assert isinstance(item, pytest.Function)
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    functions = [item.function, *(definitions[-1].func for definitions in fixtures)]
    return not EMBEDDED.isdisjoint((*item.fixturenames, *find_names(functions)))


def find_names(functions: list[Any]) -> set[str]:
    """Collect the names in the code of some functions, and of the functions and classes of tests they use."""
    names: set[str] = set()
    seen: set[int] = set()
    waiting = list(functions)
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if isinstance(function, type):
            waiting += (each for each in vars(function).values() if isinstance(each, FunctionType))
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        found = set(_names_of(function.__code__))
        names |= found
        used = (function.__globals__.get(name) for name in found)
        waiting += (each for each in used if getattr(each, "__module__", "").startswith(("tests.", "proof.")))
    return names


def _names_of(code: CodeType) -> Iterator[str]:
    """Yield the global names and attributes that code and the code inside it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of(constant)
