"""`python -m proof`: its names, and those that the documents and the evidence use."""

from __future__ import annotations

import ast
import re

import pytest

from proof.__main__ import find_proofs, main
from proof.command import ROOT

PROOFS = find_proofs()
DOCUMENTS = ("CONTRIBUTING.md", "bench/README.md", "CHANGELOG.md", "docs/*.md")


def test_each_proof_has_a_line_in_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PROOFS)
    assert all(ast.get_docstring(tree) for tree in PROOFS.values())


def test_an_unknown_name_is_an_error() -> None:
    assert main(["nonsense"]) == 2


def test_documents_name_proofs_that_exist() -> None:
    texts = [path.read_text() for pattern in DOCUMENTS for path in ROOT.glob(pattern)]
    named = {name for text in texts for name in re.findall(r'make proof ARGS="?([a-z][a-z-]+)', text)}
    assert named and named <= set(PROOFS)


def test_evidence_is_named_by_its_proof() -> None:
    assert {path.stem for path in (ROOT / "docs" / "reliability").glob("*.json")} <= set(PROOFS)
