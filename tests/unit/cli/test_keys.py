"""`cllm keys`: a key is made, listed with its limits, and removed."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from cllm.cli.main import app


def test_keys_are_listed_and_removed(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.toml")

    def keys(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["keys", *arguments, "--file", file])
        assert result.exit_code == 0, result.output
        return result.output

    secret = keys("new", "alice").splitlines()[0]
    keys("new", "ops", "--admin")
    Path(file).write_text(Path(file).read_text().rstrip() + "\nweight = 2.5\nconcurrent = 4\n")
    rows = [line.split(maxsplit=2) for line in keys("list").splitlines()]
    assert rows == [
        ["name", "role", "limits"],
        ["alice", "user"],
        ["ops", "admin", "weight 2.5, concurrent 4"],
    ]
    assert secret not in keys("list") and "SIGHUP" in keys("rm", "alice")
    assert "alice" not in keys("list")


def test_a_missing_keys_file_says_how_to_make_one(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["keys", "list", "--file", str(tmp_path / "none.toml")])
    assert result.exit_code == 2 and "`cllm keys new NAME --file` makes one" in result.output
