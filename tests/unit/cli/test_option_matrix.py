"""The option matrix names every option of `cllm serve`, each with a value that is not its default."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from cllm.cli.main import app
from tests.driver.option_matrix import REASONS, ROWS, Row

COMMAND = typer.main.get_command(app).get_command(None, "serve")  # type: ignore[attr-defined]
OPTIONS: dict[str, Any] = {option.name: option for option in COMMAND.params}


def test_every_option_has_a_row_or_a_reason() -> None:
    tried = {option for row in ROWS for option in row.options.split()}
    assert tried | REASONS.keys() == OPTIONS.keys(), "see tests/driver/option_matrix.py"
    assert not tried & REASONS.keys()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)
def test_row_sets_its_options(row: Row) -> None:
    words = [word.replace("{{", "{").replace("}}", "}") for word in row.words.split()]
    model = [f"{{{row.model}}}"] if row.model else []
    eager = any(OPTIONS[name].is_eager for name in row.options.split())  # its file is read at once
    context = COMMAND.make_context("serve", [*model, *([] if eager else words)])
    for name in row.options.split():
        option = OPTIONS[name]
        if eager:
            assert option.opts[0] in words
        else:
            assert context.get_parameter_source(name).name == "COMMANDLINE"
            assert context.params[name] != option.default
