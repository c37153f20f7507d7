"""The two wheels: what goes into them, and what the Dockerfile takes of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from cllm.backend.llama.library import find
from cllm.build.toolchain import BINDINGS_VERSION
from cllm.config import ServerConfig
from scripts.wheel import platform_tag, read_elf

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NATIVE = tomllib.loads((ROOT / "native" / "pyproject.toml").read_text())


def test_the_native_package_has_the_version_of_its_source() -> None:
    assert NATIVE["project"]["version"] == BINDINGS_VERSION
    assert PROJECT["project"]["optional-dependencies"]["native"] == [f"cllm-native=={BINDINGS_VERSION}"]


def test_no_dependency_compiles() -> None:
    assert not [name for name in PROJECT["project"]["dependencies"] if "llama" in name]


def test_every_file_of_the_package_is_in_the_wheel() -> None:
    package = ROOT / "cllm"
    packed = {
        path
        for pattern in PROJECT["tool"]["setuptools"]["package-data"]["cllm"]
        for path in package.glob(pattern)
    }
    for path in package.rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            assert path in packed, f"{path.relative_to(ROOT)} is in no line of package-data"


@pytest.mark.skipif(shutil.which("objdump") is None, reason="binutils is not here")
def test_the_tag_is_the_glibc_that_the_symbols_need(tmp_path: Path) -> None:
    files = [find() / name for name in ("libggml-base.so", "libllama.so")]
    needed, versions = read_elf(files[1])
    assert "libggml-base.so" in needed and any(version.startswith("GLIBC_2.") for version in versions)
    with pytest.raises(SystemExit, match="which is not in the wheel"):
        platform_tag([files[1]])
    source, library = tmp_path / "x.c", tmp_path / "x.so"
    source.write_text("int one(void) { return 1; }\n")
    if shutil.which("gcc") is None:
        return
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    assert re.fullmatch(r"manylinux_2_17_\w+", platform_tag([library]))


def test_the_dockerfile_copies_what_the_wheels_are_called() -> None:
    """There is no Docker here: what it names exists, and it does what it should."""
    text = (ROOT / "Dockerfile").read_text()
    (copied,) = re.findall(r"^COPY (.*) /wheels/$", text, re.MULTILINE)
    assert copied.split() == ["dist/cllm-*.whl", "dist/cllm_native-*.whl"]
    assert (ROOT / ".dockerignore").read_text().split() == ["*", "!dist/*.whl"]
    assert re.search(r"^USER cllm$", text, re.MULTILINE) and "HEALTHCHECK" in text
    (check,) = re.findall(r'CMD \["python", "-c", "(.*)"\]', text)
    compile(check, "HEALTHCHECK", "exec")
    for document in re.findall(r"docs/\w+\.md", text):
        assert (ROOT / document).exists()
    assert f"EXPOSE {ServerConfig().port}\n" in text and f":{ServerConfig().port}/health" in check
