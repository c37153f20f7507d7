"""`cllm doctor --full`: a model that is broken gets the right ✗, one that is not gets none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cllm.backend.llama.gguf import GgufFile
from cllm.cli.checkup import PARTS, examine
from cllm.config import EngineConfig
from cllm.models.store import embedded_model
from tests.driver.server import cllm
from tests.tiny_media import make_causal
from tests.tiny_models import CHAT_TEMPLATE, make_dense


def find_wrong(path: Path) -> list[str]:
    findings = [finding for part in PARTS.values() for finding in part(EngineConfig(model=str(path)))]
    return [finding.name for finding in findings if finding.passed is False]


def overwrite(path: Path, data: bytes) -> Path:
    """Damage the beginning of a matrix, or all of it."""
    file = GgufFile(path)
    tensor = next(tensor for tensor in file.tensors if tensor.name == "blk.1.ffn_up.weight")
    assert tensor.size is not None
    with path.open("r+b") as opened:
        opened.seek(file.data_begin + tensor.offset)
        opened.write(data or bytes(tensor.size))
    return path


def lose_a_byte(path: Path) -> Path:
    """No token stands for the byte E6 any longer, which 東 begins with: its token has another's text."""
    data = path.read_bytes()
    lost, other = ((2).to_bytes(8, "little") + text.encode() for text in "æç")
    assert data.count(lost) == 1
    path.write_bytes(data.replace(lost, other))
    return path


def misplace_mmproj(path: Path) -> Path:
    make_causal(path.parent).mmproj.rename(path.parent / "mmproj-tiny.gguf")
    return Path(shutil.copy(embedded_model(), path))


def make_with(path: Path, old: str, new: str) -> Path:
    assert old in CHAT_TEMPLATE
    return make_dense(path, templates={"default": CHAT_TEMPLATE.replace(old, new)})


def truncate(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-5000])
    return path


BREAKAGES: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "a template without its end": ("template", lambda path: make_with(path, "{% endfor %}", "")),
    "a template without an end token": ("template", lambda path: make_with(path, "<|im_end|>", "")),
    "an mmproj of another model": ("mmproj", misplace_mmproj),
    "a value that is not finite": ("tensors", lambda path: overwrite(make_dense(path), b"\xff" * 4)),
    "a hole that a download left": ("tensors", lambda path: overwrite(make_dense(path), b"")),
    "a truncated file": ("tensors", lambda path: truncate(make_dense(path))),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_model_gets_the_right_cross(tmp_path: Path, breakage: str) -> None:
    expected, break_model = BREAKAGES[breakage]
    wrong = find_wrong(break_model(tmp_path / "model.gguf"))
    assert wrong[:1] == [expected]
    assert len(wrong) == 1 or "template without its end" in breakage or "truncated" in breakage


@pytest.mark.parametrize("kind", ["dense", "hybrid", "experts", "sliding"])
def test_a_whole_model_gets_no_cross(models: dict[str, Path], kind: str) -> None:
    assert find_wrong(models[kind]) == []


def test_a_template_that_drops_the_user_gets_a_cross(tmp_path: Path) -> None:
    dropped = make_with(tmp_path / "model.gguf", "in messages", "in messages if message.role != 'user'")
    assert "template" in find_wrong(dropped)


def test_a_vocabulary_that_kills_llama_is_named(tmp_path: Path) -> None:
    path = lose_a_byte(make_dense(tmp_path / "model.gguf"))
    wrong = [finding.name for finding in examine(EngineConfig(model=str(path))) if not finding.passed]
    assert wrong == ["vocabulary"]


def test_a_report_is_complete_and_holds_no_text(models: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = cllm("doctor", str(models["hybrid"]), "--full", "--json", "--html", str(page), "--threads", "1")
    report = json.loads(done.stdout)
    findings = {each["name"]: each["passed"] for each in report["findings"]}
    served = {"memory", "tool calls", "JSON schema", "turns", "prefix cache", "embeddings", "speed"}
    assert served <= findings.keys(), done.stderr
    assert findings.pop("prose") is False, "its weights are random"
    findings.pop("speed")  # of a busy machine
    assert False not in findings.values(), report
    assert done.returncode == 1 and "✗" in page.read_text()
    assert not any(text in done.stdout for text in ("apples", "Oslo", str(Path.home())))
