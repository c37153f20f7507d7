"""`cllm pull`, `list`, `show`, `rm` and `search` as their users meet them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from cllm.backend.llama import memory
from cllm.backend.llama.conversion import predict_size
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.kernels import count_weights
from cllm.cli import main
from cllm.cli.pull import parse_rate
from cllm.errors import ConfigError
from cllm.models import fit, store
from cllm.models.files import FILE_TYPES
from cllm.models.store import hf_cache
from tests.driver.hub import FakeHub
from tests.tiny_models import make_dense
from tests.unit.models.conftest import REPO, SPLIT_REPO, caches, hub, repos, running_hub, tiny

__all__ = ["caches", "hub", "repos", "running_hub", "tiny"]  # fixtures
ROOT = Path(__file__).parents[3]
Run = Callable[..., Result]


@pytest.fixture
def run(hub: FakeHub) -> Run:
    """Run a command; its exit code must be the one given."""

    def call(*arguments: str, code: int = 0) -> Result:
        result = CliRunner().invoke(main.app, list(arguments), env={"COLUMNS": "80", "NO_COLOR": "1"})
        assert result.exit_code == code, result.output
        return result

    return call


def test_pull_says_what_fits_and_prints_the_path(run: Run) -> None:
    result = run("pull", f"hf:{REPO}")
    path = Path(result.stdout.strip())
    assert path.name == "tiny-llama-Q4_K_M.gguf" and path.is_file()
    assert "disk    " in result.stderr and "memory  fits: " in result.stderr and "verified" in result.stderr
    again = run("pull", f"hf:{REPO}:Q4_K_M")
    assert again.stdout == result.stdout and "all of it is already in" in again.stderr


def test_a_dry_run_pulls_nothing(run: Run, hub: FakeHub) -> None:
    result = run("pull", "--dry-run", f"hf:{REPO}")
    assert "*  Q4_K_M" in result.stdout and "Q8_0" in result.stdout and result.stdout.count(" fits") == 2
    assert not list(hf_cache().rglob("*.gguf"))


def test_a_model_that_does_not_fit_is_refused_before_it_is_fetched(
    run: Run, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 10 << 20)
    monkeypatch.setattr(fit, "list_devices", tuple)
    result = run("pull", f"hf:{REPO}", code=2)
    assert "would not run on this machine" in result.stderr and "--force" in result.stderr
    assert run("pull", "--force", f"hf:{REPO}").stdout


def test_pull_to_a_folder_offline_and_as_json(run: Run, caches: Path) -> None:
    folder = caches / "größe 模型"
    result = run("pull", "--to", str(folder), "--limit", "50M", "--json", f"hf:{SPLIT_REPO}")
    assert json.loads(result.stdout)["path"] == str(folder / "split-F32-00001-of-00003.gguf")
    error = run("pull", "--offline", f"hf:{SPLIT_REPO}", code=2).stderr
    assert error == f"cllm: hf:{SPLIT_REPO} is not on this machine, and --offline pulls nothing\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((REPO,), f"is hf:{REPO} meant?"),
        (("smollm2",), "names no model of a hub"),
        (("hf:a",), "they look like hf:USER/REPO"),
        ((f"hf:{REPO}:Q1",), "has no Q1; it has Q4_K_M"),
        (("--limit", "fast", f"hf:{REPO}"), "--limit fast: give bytes a second as 5M"),
    ],
)
def test_errors_are_one_line_with_the_next_step(run: Run, arguments: tuple[str, ...], words: str) -> None:
    error = run("pull", *arguments, code=2).stderr
    assert error.startswith("cllm: ") and words in error and error.count("\n") == 1


def test_list_show_and_rm(run: Run) -> None:
    run("pull", f"hf:{SPLIT_REPO}")
    lines = run("list").stdout.splitlines()
    assert lines[0].split() == ["name", "quant", "size", "architecture", "where"]
    assert lines[1].split()[:2] == [f"hf:{SPLIT_REPO}:F32", "F32"] and "llama" in lines[1]
    assert lines[-1].endswith("embedded")
    (first, *_) = json.loads(run("list", "--json").stdout)
    assert len(first["files"]) == 3 and first["context_length"] == 4096 and first["chat_template"] is True
    shown = run("show", "split").stdout
    assert "architecture   llama" in shown and "chat template  yes" in shown and "1 × 4096" in shown
    assert "nothing was removed: --yes" in run("rm", "split", code=2).stderr
    result = run("rm", "--yes", "split")
    assert "frees" in result.stderr and "removed" in result.stderr
    assert run("list").stdout.count("\n") == len(lines) - 1
    assert "`cllm list` shows" in run("rm", "--yes", "split", code=2).stderr


def test_what_a_hub_has_is_shown_without_being_pulled(run: Run) -> None:
    shown = json.loads(run("show", "--json", f"hf:{REPO}:Q8_0").stdout)
    assert shown["architecture"] == "llama" and shown["path"].startswith("not here; `cllm pull hf:")
    assert not list(hf_cache().rglob("*.gguf"))


def test_rm_refuses_what_is_loaded_and_removes_parts(
    run: Run, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("pull", f"hf:{REPO}")
    with monkeypatch.context() as patch:
        patch.setattr(store, "find_users", lambda paths: {42: "python -m cllm serve"})
        error = run("rm", "--yes", "tiny-llama", code=2).stderr
    assert "is used by process 42 (python -m cllm serve); end it first" in error
    hub.faults["416"] = 100
    run("pull", "hf:Example/Big", code=2)
    assert "incomplete: hf:Example/Big, 0 B of 3.0 MB; `cllm pull` continues" in run("list").stderr
    assert "not complete" in run("rm", "--yes", "hf:Example/Big").stderr
    assert "incomplete" not in run("list").stderr
    assert "is not on this machine" in run("rm", "--yes", "hf:Example/Big", code=2).stderr


def test_models_of_a_folder(run: Run, caches: Path, tiny: dict[str, bytes]) -> None:
    folder = caches / "a b"
    folder.mkdir()
    (folder / "mine-Q4_0.gguf").write_bytes(tiny["tiny-llama-Q4_K_M.gguf"])
    assert str(folder) in run("list", "--model-dir", str(folder)).stdout
    assert "architecture   llama" in run("show", str(folder)).stdout
    run("rm", "--yes", str(folder / "mine-Q4_0.gguf"))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("hub_name", ["hf", "ms"])
def test_search(run: Run, hub_name: str) -> None:
    result = run("search", "--hub", hub_name, "tiny", "gguf")
    assert result.stdout.splitlines()[1].split()[0] == f"{hub_name}:{REPO}" and "2: Q4_K_M" in result.stdout
    (found,) = json.loads(run("search", "--json", "--hub", hub_name, "tiny").stdout)
    assert {quant["quant"] for quant in found["quants"]} == {"Q4_K_M", "Q8_0"}
    assert "try fewer words" in run("search", "nothing-like-it", code=2).stderr


def test_the_commands_of_the_document(run: Run) -> None:
    names = {"hf:USER/REPO": f"hf:{REPO}", "hf:USER/REPO:Q4_K_M": f"hf:{REPO}:Q4_K_M", "qwen3": "tiny"}
    names["NAME"] = "tiny-llama"
    block = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").split("```")[1]
    lines = [line.partition("#")[0].split() for line in block.splitlines()[1:]]
    assert [words[1] for words in lines] == ["search", "pull", "pull", "list", "show", "rm"]
    for words in lines:
        arguments = [names.get(word, word) for word in words[1:]]
        run(*arguments, *(["--yes"] if arguments[0] == "rm" else []))


@pytest.mark.parametrize(
    ("text", "rate"), [("", 0), ("500", 500), ("500K", 5e5), ("5M", 5e6), ("1.5GB/s", 1.5e9), ("2 mib", 2e6)]
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate
    with pytest.raises(ConfigError, match="--limit"):
        parse_rate(f"-{text}M" if text else "0")


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_quantize_writes_the_predicted_size(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = make_dense(tmp_path / "small-F32.gguf")
    planned = run("quantize", str(source), "q8_0", "--dry-run").stderr
    assert " KB; as Q8_0 " in planned and list_names(tmp_path) == [source.name]
    said = run("quantize", str(source), "q8_0").stderr
    target = Path("small-Q8_0.gguf")
    assert said.startswith(planned) and "`cllm serve small-Q8_0.gguf`" in said
    assert predict_size(GgufHeader(source), FILE_TYPES["Q8_0"]) == pytest.approx(
        target.stat().st_size, rel=0.02
    )
    assert count_weights(GgufHeader(target)).keys() == {"Q8_0"}
    again = run("quantize", str(source), "q8_0", code=2)
    assert "small-Q8_0.gguf is there already: choose another OUT" in again.stderr
    refused = run("quantize", str(target), "Q4_K_M", "other.gguf", code=2)
    assert "is quantised already (Q8_0)" in refused.stderr and "--allow-requantize" in refused.stderr
    run("quantize", str(target), "Q4_K_M", "other.gguf", "--allow-requantize")
    assert list_names(tmp_path) == ["other.gguf", source.name, target.name]


def test_quantize_leaves_nothing_when_it_fails(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_dense(tmp_path / "small.gguf")
    out = str(tmp_path / "out.gguf")
    assert "choose one of: F32, " in run("quantize", str(source), "Q9", out, code=2).stderr
    assert "a folder that is not there" in run("quantize", str(source), "F16", "no/x.gguf", code=2).stderr
    usage = SimpleNamespace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        assert "not enough space" in run("quantize", str(source), "F16", out, code=2).stderr
    data = bytearray(source.read_bytes())
    data[-64:] = b"\xff" * 64  # weights that are no numbers
    source.write_bytes(data)
    failed = run("quantize", str(source), "Q8_0", out, code=2).stderr
    assert "small.gguf cannot be written as Q8_0: " in failed and "invalid data" in failed
    assert list_names(tmp_path) == [source.name]
