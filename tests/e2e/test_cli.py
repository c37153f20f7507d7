"""The command line: clear lines, exit codes, and which setting wins."""

from __future__ import annotations

import random
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.driver.server import ALIAS, Server, StartServer, cllm

CUT = "cllm: the answer was cut at {} tokens; --max-tokens N allows more\n"


@pytest.fixture
def free_port() -> int:
    """Below those the system hands out by itself (32768 and up): no other process gets it before its use."""
    for _ in range(100):
        port = random.SystemRandom().randrange(20_000, 30_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no free port")


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """What is said by a command that cannot start: one line on standard error, exit code 2."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("cllm: ")
    return line


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    assert "folder" in one_line(cllm("serve", str(tmp_path), "--port", "0"))


def test_run_says_the_same_of_a_bad_model(tmp_path: Path) -> None:
    # Freed memory is overwritten, so that a use of it at exit crashes each time, as with msgspec's structs.
    done = cllm("run", "x", "--model", str(tmp_path / "none.gguf"), PYTHONMALLOC="debug")
    assert "no model file" in one_line(done)


def test_the_earlier_servers_spelling(start: StartServer, tiny_model: Path, free_port: int) -> None:
    server = start(
        "--model-path", str(tiny_model), "--threads", "1", program=ALIAS, port=("--port", str(free_port))
    )
    assert server.port == free_port
    assert server.generate("alias", 4)["generated_tokens"] == 4
    server.stop()


def test_variables_and_a_file_and_the_command_line(
    start: StartServer, tiny_model: Path, tmp_path: Path, free_port: int
) -> None:
    """The command line beats the variable, which beats the file, which beats the default."""
    file = tmp_path / "cllm.toml"
    file.write_text(
        f'model = "{tiny_model}"\n[engine]\nparallel = 3\nthreads = 1\nbatch-tokens = 64\nctx_size = 1536\n'
        '[server]\nport = 1\nqueue_size = 7\nlog_level = "error"\n'
    )
    server = start(
        "--config",
        str(file),
        "--batch-tokens",
        "96",
        port=(),
        CLLM_PORT=str(free_port),
        CLLM_PARALLEL="2",
        CLLM_BATCH_TOKENS="128",
        CLLM_LOG_LEVEL="debug",
    )
    limits = server.get("/model/info")["limits"]
    assert server.port == free_port  # variable over file
    assert limits["sequences"] == 2  # variable over file
    assert limits["batch_tokens"] == 96  # command line over both
    assert limits["cells"] == 1536  # file over default
    server.generate("logged", 2)
    assert "leased seq 0" in server.log_text  # CLLM_LOG_LEVEL=debug, over the file's
    server.stop()


def test_log_level_info_is_the_default(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--parallel", "1", "--threads", "1", CLLM_LOG_LEVEL="")
    server.generate("logged", 2)
    assert " INFO " in server.log_text and " DEBUG " not in server.log_text
    server.stop()


def test_run_prints_an_answer(tiny: Server, tiny_model: Path) -> None:
    greedy = ("--temperature", "0", "--max-tokens", "16", "--model", str(tiny_model))
    done = cllm("run", "Say hello.", *greedy)
    assert (done.returncode, done.stderr) == (0, CUT.format(16))
    asked = {"messages": [{"role": "user", "content": "Say hello."}], "temperature": 0, "max_tokens": 16}
    reply = tiny.post("/v1/chat/completions", asked).json()["choices"][0]["message"]["content"]
    assert done.stdout == f"{reply}\n"


def test_run_without_a_model_uses_the_embedded_one() -> None:
    done = cllm("run", "Say hello.", "--max-tokens", "4", "--local")
    assert done.returncode == 0 and done.stderr in ("", CUT.format(4))


def test_run_of_a_prompt_too_long_is_one_line(tiny_model: Path) -> None:
    done = cllm("run", "0" * 5000, "--raw", "--model", str(tiny_model))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "5000" in line and "4096" in line


def test_doctor_names_what_it_found() -> None:
    done = cllm("doctor", "--threads", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("CPU features", "library", "threads", "memory", "probe", "model"):
        assert name in done.stdout
    assert "works" in done.stdout and "MiB" in done.stdout


def test_doctor_of_a_bad_model_fails(tmp_path: Path, tiny_model: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_model.read_bytes()[:-5000])
    done = cllm("doctor", str(cut))
    assert done.returncode == 1
    assert "truncated" in done.stdout


def test_version() -> None:
    assert cllm("--version").stdout.startswith("cllm 0.")
