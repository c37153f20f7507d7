"""Tests in an interpreter in which one module is a mutant from the start.

`python -m proof shared.mutated_module PATH INDEX PIPE FILE…` is started by `mutant_runs`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from itertools import islice
from types import CodeType, ModuleType

import pytest

from proof.command import ROOT
from proof.shared.mutant_runs import OPTIONS, Reporter
from proof.shared.mutation import mutate


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


def main(path: str, index: int, pipe: int, files: Sequence[str]) -> int:
    mutation = next(islice(mutate((ROOT / path).read_text()), index, None))
    code = compile(mutation.code, str(ROOT / path), "exec")
    name = path.removesuffix(".py").replace("/", ".")
    assert name not in sys.modules
    sys.meta_path.insert(0, _Finder(name, str(ROOT / path), code))
    ignored = "ignore::pytest.PytestAssertRewriteWarning"
    return int(pytest.main([*OPTIONS, "-W", ignored, *files], plugins=[Reporter(pipe)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
