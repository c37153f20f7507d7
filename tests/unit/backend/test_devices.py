"""The GPUs that the library lists: asked for in a process of its own, and none where it cannot answer."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cllm.backend.llama import devices
from cllm.backend.llama.library import may_use_gpu


@pytest.fixture(autouse=True)
def _forget_devices() -> Iterator[None]:
    devices.list_devices.cache_clear()
    yield
    devices.list_devices.cache_clear()


def test_a_library_for_a_gpu_is_known_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLLM_LIBRARY", str(tmp_path))
    assert not may_use_gpu()
    (tmp_path / "libggml-cuda.so").touch()
    assert may_use_gpu()
    assert devices.list_devices() == (), "a library that cannot be loaded has no GPU"


def test_a_library_for_the_cpu_lists_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked, and answers."""
    if may_use_gpu():
        pytest.skip("this library is for a GPU")
    assert devices.list_devices() == ()
    answers: list[bytes] = []
    run = subprocess.run

    def record(*arguments: Any, **options: Any) -> Any:
        done = run(*arguments, **options)
        answers.append(done.stdout)
        return done

    monkeypatch.setattr(subprocess, "run", record)
    assert devices.ask_library() == ()
    assert answers == [b"[]\n"]
