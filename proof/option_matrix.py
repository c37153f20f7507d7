"""A server with each option of `cllm serve`: started, asked, stopped; no worker dies.

    make proof ARGS="option-matrix -n 2 -k draft"

Its riskiest rows are part of tests/e2e/test_default_settings.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.driver.option_matrix import ROWS, Row, make_places, run_row, run_with_defaults

pytestmark = pytest.mark.timeout(600)  # a busy machine takes long to load


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_places(tmp_path_factory.mktemp("places"))


def test_embedded_model_with_default_settings(tmp_path: Path) -> None:
    run_with_defaults(tmp_path)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)
def test_option(row: Row, places: dict[str, str], tmp_path: Path) -> None:
    run_row(row, places, tmp_path)
