"""Cache files: a saved prefix cache that is corrupt, and a disk that is full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.driver.http import refusal, unharmed
from tests.driver.server import SERVE, Server, StartServer

PROMPT = "a long prefix that is worth keeping, " * 20


def save(server: Server, name: str = "warm") -> httpx.Response:
    return server.post("/admin/prefixes/save", {"name": name})


def restore(server: Server, name: str = "warm") -> httpx.Response:
    return server.post("/admin/prefixes/restore", {"name": name})


def cached(server: Server) -> int:
    """Ask with the long prefix: how many of its tokens came from the cache."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    usage = server.post("/v1/completions", body).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def failures(server: Server) -> float:
    return server.metrics()["cllm_state_file_failures_total"]


@pytest.mark.failure_mode("corrupt-cache-file")
def test_a_saved_state_that_is_corrupt(start: StartServer, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    server = start(str(tiny_model), "--threads", "1", "--state-dir", str(folder))
    text = server.generate(PROMPT, 16)["text"]
    done = save(server).json()
    assert done["entries"] >= 1 and done["tokens"] > 64
    server.stop()
    # Another process, which knows nothing but the file.
    server = start(str(tiny_model), "--threads", "1", "--state-dir", str(folder))
    file = folder / "warm.prefixes"
    good = file.read_bytes()
    middle = len(good) // 2
    damaged = {
        "checksum": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
        "truncated": good[:-100],
        "not a state file": b"\0" * len(good),
    }
    for number, (said, data) in enumerate(damaged.items(), 1):
        file.write_bytes(data)
        assert said in refusal(restore(server), 400, "state_file_invalid")
        assert failures(server) == number
        assert server.metrics()["cllm_prefix_ram_bytes"] == 0
        unharmed(server)
    file.write_bytes(good)
    assert restore(server).json() == {**done, "skipped": 0}
    assert cached(server) > 64
    assert server.generate(PROMPT, 16)["text"] == text
    refusal(restore(server, "another"), 404)
    refusal(restore(server, "../warm"), 400)
    unharmed(server)
    # The same file is no good for another layout of the same model.
    server.stop()
    server = start(str(tiny_model), "--threads", "1", "--unified-kv", "--state-dir", str(folder))
    assert "layout" in refusal(restore(server), 400, "state_file_invalid")
    assert server.generate(PROMPT, 16)["text"] == text
    server.stop()


@pytest.mark.failure_mode("corrupt-cache-file")
def test_a_damaged_file_of_the_disk_cache(start: StartServer, tiny_model: Path, tmp_path: Path) -> None:
    """It is a miss, said in one line; the answer is the same."""
    arguments = (str(tiny_model), "--threads", "1", "--cache-dir", str(tmp_path), "--cache-disk-mb", "64")
    server = start(*arguments)
    text = server.generate(PROMPT, 16)["text"]
    server.stop()
    (path,) = tmp_path.glob("kv/*/*")
    data = path.read_bytes()
    path.write_bytes(data[:-100] + bytes(100))
    path.with_name("0" * 32 + ".kv").write_bytes(data)
    server = start(*arguments)
    assert server.generate(PROMPT, 16)["text"] == text
    assert server.log_text.count("WARNING") == 2
    assert "1 files are damaged" in server.log_text and "does not match its checksum" in server.log_text
    unharmed(server)
    server.stop()


@pytest.mark.failure_mode("corrupt-cache-file")
def test_without_a_cache_folder_the_refusal_says_how(tiny: Server) -> None:
    assert "--state-dir" in refusal(save(tiny), 403)
    assert "--state-dir" in refusal(restore(tiny), 403)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder that takes a few KiB, and what a server has to do first to be held to it."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    # Where mounting is not allowed: the limit on the size of files, which fails writes the same way.
    yield (
        folder,
        "" if mounted else "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384)); ",
    )
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.failure_mode("disk-full")
def test_disk_full(
    start: StartServer, tiny_model: Path, tmp_path: Path, small_disk: tuple[Path, str]
) -> None:
    """Saving is answered with an error, a stream meanwhile goes on, nothing is left on the disk."""
    folder, limit = small_disk
    arguments = (str(tiny_model), "--threads", "1", "--state-dir", str(folder))
    if limit:  # the log would hit the limit, too
        server = start(*arguments, program=(limit + SERVE[0], *SERVE[1:]), CLLM_LOG_LEVEL="error")
    else:
        server = start(*arguments)
    alone = server.generate("go on", 300)["text"]
    server.generate(PROMPT, 16)
    with server.open_stream("go on", 300) as events:
        seen = [next(events)]
        for number in range(1, 4):
            said = refusal(save(server), 507, "storage_failed")
            assert "no space left" in said or "too large" in said
            assert failures(server) == number
        seen += list(events)
    assert "".join(event["token"] for event in seen) == alone
    assert list(folder.iterdir()) == []
    assert cached(server) > 64, "what is in RAM is not lost"
    unharmed(server)
    server.stop()


@pytest.mark.failure_mode("disk-full")
def test_a_disk_cache_without_space(
    start: StartServer, tiny_model: Path, small_disk: tuple[Path, str]
) -> None:
    """The exit is a clean one, nothing is left on the disk."""
    folder, limit = small_disk
    arguments = (str(tiny_model), "--threads", "1", "--cache-dir", str(folder), "--cache-disk-mb", "64")
    if limit:
        server = start(*arguments, program=(limit + SERVE[0], *SERVE[1:]), CLLM_LOG_LEVEL="error")
    else:
        server = start(*arguments)
    server.generate(PROMPT, 16)
    assert cached(server) > 64
    server.stop()
    assert [path for path in folder.rglob("*") if not path.is_dir()] == []
    assert limit or server.log_text.count("no space left") == 1
