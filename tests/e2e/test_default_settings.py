"""Servers as users start them, with disk cache and all threads; and the riskiest options on top."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.driver.option_matrix import RISKY, Row, make_places, run_row, run_with_defaults


def test_server_with_default_settings(tiny_model: Path, tmp_path: Path) -> None:
    run_with_defaults(tmp_path, str(tiny_model))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_places(tmp_path_factory.mktemp("places"))


@pytest.mark.parametrize("row", RISKY, ids=lambda row: row.label)
def test_option(row: Row, places: dict[str, str], tmp_path: Path) -> None:
    run_row(row, places, tmp_path)
