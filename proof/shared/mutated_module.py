"""Pytest plugin: one module is a mutant from the start.

The variable `MUTANT` is the module's path and the number of the mutation, `MUTANT_REPORT` a file to which the
name of each test is written when it begins. The module must not have been imported before.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import CodeType, ModuleType

import hypothesis

from proof.shared.mutation import mutate

ROOT = Path(__file__).parents[2]
MEMORY_LIMIT = 6 << 30


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads the changed code instead of the file's."""

    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        return self._code


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the changed module; every other is found as always."""

    def __init__(self, name: str, path: str, code: CodeType) -> None:
        self._name, self._path, self._code = name, path, code

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        loader = _Loader(fullname, self._path, self._code)
        return importlib.util.spec_from_file_location(fullname, self._path, loader=loader)


def install() -> None:
    """Before pytest imports the tests: when it imports this plugin."""
    path, _, index = os.environ["MUTANT"].partition(":")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    if not index:
        return  # the source as it is
    mutation = next(islice(mutate((ROOT / path).read_text()), int(index), None))
    code = compile(mutation.code, str(ROOT / path), "exec")
    name = path.removesuffix(".py").replace("/", ".")
    assert name not in sys.modules
    sys.meta_path.insert(0, _Finder(name, str(ROOT / path), code))


def pytest_sessionstart() -> None:
    """An example that fails is enough: a smaller one is not looked for."""
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("unit", hypothesis.settings.get_profile("unit"), phases=phases)
    hypothesis.settings.load_profile("unit")


def pytest_runtest_logstart(nodeid: str) -> None:
    with Path(os.environ["MUTANT_REPORT"]).open("w") as file:
        file.write(nodeid)


install()
