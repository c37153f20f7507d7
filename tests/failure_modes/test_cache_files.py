"""Cache files: one that is corrupt, and a disk that is full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.driver.http import refusal, unharmed
from tests.driver.server import SERVE, Server, StartServer

PROMPT = "a long prefix that is worth keeping, " * 20


def use(server: Server, action: str, name: str = "warm", slot: int = 0) -> httpx.Response:
    return server.post(f"/slots/{slot}?action={action}", {"filename": name})


def save(server: Server) -> httpx.Response:
    """Save the slot that holds most."""
    held = {slot["tokens"]: slot["seq_id"] for slot in server.get("/debug/kv")["cached"]}
    return use(server, "save", slot=held[max(held)])


def cached(server: Server) -> int:
    """Ask with the long prefix: how many of its tokens came from the cache."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    usage = server.post("/v1/completions", body).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.failure_mode("corrupt-cache-file")
def test_a_saved_slot_that_is_corrupt(start: StartServer, tiny_model: Path, tmp_path: Path) -> None:
    arguments = (str(tiny_model), "--threads", "1", "--cache-dir", str(tmp_path), "--cache-disk-mb", "64")
    server = start(*arguments)
    text = server.generate(PROMPT, 16)["text"]
    done = save(server).json()
    assert done["n_saved"] > 64
    server.stop()
    # Another process, which knows nothing but the file.
    for path in tmp_path.glob("kv/*/*.kv"):
        path.unlink()
    server = start(*arguments)
    (file,) = tmp_path.glob("kv/*/warm.slot")
    good = file.read_bytes()
    middle = len(good) // 2
    damaged = {
        "checksum": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
        "truncated": good[:-100],
        "not a cache file": b"\0" * len(good),
    }
    for said, data in damaged.items():
        file.write_bytes(data)
        assert said in refusal(use(server, "restore"), 400, "cache_file_invalid")
        assert server.metrics()["cllm_prefix_ram_bytes"] == 0
        unharmed(server)
    file.write_bytes(good)
    restored = use(server, "restore").json()
    assert (restored["n_restored"], restored["n_read"]) == (done["n_saved"], done["n_written"])
    assert cached(server) > 64
    assert server.generate(PROMPT, 16)["text"] == text
    refusal(use(server, "restore", "another"), 404)
    refusal(use(server, "restore", "../warm"), 400)
    unharmed(server)
    # The same file is no good for another layout of the same model.
    server.stop()
    server = start(*arguments, "--unified-kv")
    assert "layout" in refusal(use(server, "restore"), 404)
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
def test_without_a_disk_cache_the_refusal_says_how(tiny: Server) -> None:
    for action in ("save", "restore"):
        assert "--cache-disk-mb" in refusal(use(tiny, action), 501)


@pytest.fixture
def full_disk(start: StartServer, tiny_model: Path, tmp_path: Path) -> Iterator[tuple[Server, Path, bool]]:
    """A server whose folder takes a few KiB; the folder, and True where that is a limit of the process."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    arguments = (str(tiny_model), "--threads", "1", "--cache-dir", str(folder), "--cache-disk-mb", "64")
    if mounted:
        yield start(*arguments), folder, False
        subprocess.run(["umount", str(folder)], check=True)
    else:  # the limit on the size of files fails writes the same way; the log would hit it, too
        limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384)); "
        program = (limit + SERVE[0], *SERVE[1:])
        yield start(*arguments, program=program, CLLM_LOG_LEVEL="error"), folder, True


@pytest.mark.failure_mode("disk-full")
def test_disk_full(full_disk: tuple[Server, Path, bool]) -> None:
    """Saving is answered with an error, a stream meanwhile goes on, nothing is left on the disk."""
    server, folder, _ = full_disk
    alone = server.generate("go on", 300)["text"]
    server.generate(PROMPT, 16)
    with server.open_stream("go on", 300) as events:
        seen = [next(events)]
        for _ in range(3):
            said = refusal(save(server), 507, "storage_failed")
            assert "no space left" in said or "too large" in said
        seen += list(events)
    assert server.metrics()["cllm_prefix_disk_failures_total"] == 3
    assert "".join(event["token"] for event in seen) == alone
    assert [path for path in folder.rglob("*") if not path.is_dir()] == []
    assert cached(server) > 64, "what is in RAM is not lost"
    unharmed(server)
    server.stop()


@pytest.mark.failure_mode("disk-full")
def test_a_disk_cache_without_space(full_disk: tuple[Server, Path, bool]) -> None:
    """The exit is a clean one, nothing is left on the disk."""
    server, folder, limited = full_disk
    server.generate(PROMPT, 16)
    assert cached(server) > 64
    server.stop()
    assert [path for path in folder.rglob("*") if not path.is_dir()] == []
    assert limited or server.log_text.count("no space left") == 1
