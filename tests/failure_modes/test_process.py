"""Processes: signals, crashes, bad model files, too little memory, illegal instructions."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import signal
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from cllm.backend.llama.library import find
from cllm.testing import say
from tests.driver.http import HealthWatch, read_all
from tests.driver.same_text import EXACT
from tests.driver.server import (
    PATIENCE_S,
    SERVE,
    Server,
    StartServer,
    Stopwatch,
    alive,
    cllm,
    get_children,
    stream_text,
    wait_for,
)
from tests.e2e.golden.record import scripted_server

LONG = 4000
_IMPORTS = "from cllm.workers.supervisor import Backoff, Supervisor, WorkerProcess; "
# Workers are killed after two seconds of silence, not ten; and half a second after their input has ended.
SHORT_SILENCE = _IMPORTS + "Supervisor.SILENCE_LIMIT_S = 2.0; WorkerProcess.END_LIMIT_S = 0.5; "
NO_RETRIES = _IMPORTS + "Backoff.MAX_IN_A_ROW = 0; "  # the first crash is one too many


def kill_engine(server: Server) -> None:
    server.kill_worker("engine")


def after(setting: str) -> tuple[str, ...]:
    """The program of a server that runs this code first."""
    return (setting + SERVE[0], *SERVE[1:])


def ready_status(server: Server) -> int:
    return server.client.get("/ready").status_code


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """What a command that cannot start says at the end; exit code 2, no traceback."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("cllm: ")
    return line


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    """The same of one that has not even begun to probe or load anything."""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return last_line(done)


def refused(server: Server) -> bool:
    """True when a new request is refused: 503, or a closed port."""
    body = {"prompt": "too late", "max_tokens": 1}
    try:
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=60, trust_env=False)
    except httpx.TransportError:
        return True
    return answer.status_code == 503 and answer.json()["error"] == "shutting_down"


@pytest.mark.failure_mode("shutdown-while-streaming")
def test_sigterm_while_streaming(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--parallel", "2", "--threads", "1", "--drain-s", "60")
    with server.open_stream("last words", 1000) as events:
        first = next(events)
        children = get_children(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "draining" in server.log_text)
        assert refused(server)
        rest = list(events)
    stream_text([first, *rest])
    assert rest[-1]["finish_reason"] == "length" and rest[-1]["generated_tokens"] == 1000
    server.wait_gone(children)


@pytest.mark.failure_mode("shutdown-while-streaming")
def test_an_error_event_when_the_drain_is_over(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--parallel", "2", "--threads", "1", "--drain-s", "0.3")
    with server.open_stream("cut short", LONG) as events:
        next(events)
        children = get_children(server.process.pid)
        watch = Stopwatch(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        *_, last = events
        assert watch.seconds < 0.3 + 2.0
    assert last.pop("id") and last.pop("message")
    assert last == {"error": "shutting_down", "done": True}
    server.wait_gone(children)


@pytest.mark.failure_mode("engine-killed")
def test_kill_of_the_engine_in_mid_stream(start: StartServer, tiny_model: Path) -> None:
    """The stream goes on where it was; requests without output are answered all the same."""
    server = start(str(tiny_model), "--parallel", "1", "--threads", "1", *EXACT)
    expected = [server.generate(f"queued {number}", 8)["text"] for number in range(5)]
    begun = server.generate("begun", 1500)
    assert ready_status(server) == 200
    with ThreadPoolExecutor(5) as pool, server.open_stream("begun", 1500) as events:
        said = [next(events)]
        queued = [pool.submit(server.generate, f"queued {number}", 8) for number in range(5)]
        wait_for(lambda: len(server.get("/debug/requests")["requests"]) == 6)
        old = server.kill_worker("engine")
        wait_for(lambda: ready_status(server) == 503, 5, "/ready never said 503")
        assert server.client.get("/health").status_code == 200
        wait_for(lambda: ready_status(server) == 200)
        said += events
        assert stream_text(said) == begun["text"]
        assert said[-1]["finish_reason"] == "length"
        assert said[-1]["usage"]["completion_tokens"] == begun["usage"]["completion_tokens"]
        assert [future.result(PATIENCE_S)["text"] for future in queued] == expected
    assert server.child("engine") != old
    assert server.generate("queued 0", 8)["text"] == expected[0]
    metrics = server.metrics()
    assert metrics["cllm_engine_restarts_total"] == 1
    assert "cllm_requests_finished_total{outcome=error}" not in metrics
    assert metrics["cllm_requests_finished_total{outcome=length}"] == 13
    assert metrics["cllm_requests_accepted_total"] == 13
    assert server.kv_is_zero()
    server.stop()


@pytest.mark.failure_mode("engine-killed")
def test_a_request_that_is_there_at_every_crash_fails(tmp_path: Path) -> None:
    """Replayed once with its neighbours and once alone; the third crash is its own. They are answered.

    On the scripted model, whose steps take 300 ms however fast the machine is.
    """
    with (
        scripted_server(tmp_path / "log", "--step-ms", "300", "--parallel", "2") as server,
        ThreadPoolExecutor(2) as pool,
    ):

        def in_engine() -> bool:
            requests = server.get("/debug/requests")["requests"]
            return any(it["place"] == "engine" and it["prompt_tokens"] > 1000 for it in requests)

        body = {"prompt": "This takes seconds to read. " * 130, "max_tokens": 4, "temperature": 0}
        poison = pool.submit(httpx.post, f"{server.url}/generate", json=body, timeout=90, trust_env=False)
        wait_for(in_engine)
        neighbour = pool.submit(server.generate, say("whole"), 4)
        wait_for(lambda: len(server.get("/debug/requests")["requests"]) == 2)
        for _ in range(3):
            wait_for(in_engine)
            kill_engine(server)
            wait_for(lambda: ready_status(server) == 503)
        answer = poison.result(PATIENCE_S)
        assert neighbour.result(PATIENCE_S)["generated_tokens"] == 4
        assert (answer.status_code, answer.json()["error"]) == (500, "poison_request")
        assert server.generate(say("whole"), 4)["generated_tokens"] == 4
        assert server.kv_is_zero()


@pytest.mark.failure_mode("worker-stopped")
def test_stopped_workers_are_replaced_and_stop_nothing_else(start: StartServer, tiny_model: Path) -> None:
    """Was: a text too large for the socket's buffer stopped the event loop, for 40 s and longer."""
    server = start(
        str(tiny_model), "--parallel", "2", "--threads", "1", "--drain-s", "1", program=after(SHORT_SILENCE)
    )
    expected = server.generate("stopped", 8)["text"]
    text = "x" * 200_000
    with ThreadPoolExecutor(6) as pool, HealthWatch(server.url, server.process.pid) as health:
        stopped = [server.kill_worker("engine", signal.SIGSTOP)]
        waiting = [pool.submit(server.generate, "stopped", 8) for _ in range(2)]
        wait_for(lambda: len(server.get("/debug/requests")["requests"]) == 2)
        stopped += [server.kill_worker("tokenizer", signal.SIGSTOP)]
        large = [pool.submit(server.post, "/encode", {"text": text}) for _ in range(4)]
        wait_for(lambda: ready_status(server) == 503, 30)
        assert [future.result(PATIENCE_S)["text"] for future in waiting] == [expected] * 2
        assert [len(future.result(PATIENCE_S).json()["tokens"]) for future in large] == [len(text)] * 4
    assert health.median < 0.1 and max(health.took) < 1.0
    assert not any(map(alive, stopped))
    assert server.metrics()["cllm_engine_restarts_total"] == 1
    assert server.kv_is_zero()
    children = get_children(server.process.pid)
    server.expect_failure("did not exit by itself|the engine died|the tokenizer process ended")
    for pid in children:
        os.kill(pid, signal.SIGSTOP)
    with server.connect({"text": text}, "/encode") as late:
        for _ in range(3):
            server.get("/health")  # so it has been read, and waits for a worker
        server.process.send_signal(signal.SIGTERM)
        answer = read_all(late)
        assert answer.startswith(b"HTTP/1.1 503 ") and b'"shutting_down"' in answer, answer
    server.wait_gone(children, limit_s=10)


@pytest.mark.failure_mode("engine-keeps-crashing")
def test_an_engine_that_keeps_crashing_is_503_until_it_is_back(start: StartServer, tiny_model: Path) -> None:
    """Was: 200 from /health, 500 for every request, and no other start."""
    server = start(str(tiny_model), "--parallel", "2", "--threads", "1", program=after(NO_RETRIES))
    kill_engine(server)
    server.expect_failure("the engine is given up", 1)
    wait_for(lambda: server.client.get("/health").status_code == 503, 10)
    assert server.client.get("/health").json() == {"status": "failed", "engine": "failed"}
    assert ready_status(server) == 503
    answer = server.post("/generate", {"prompt": "x", "max_tokens": 4})
    assert answer.status_code == 503 and answer.json()["error"] == "engine_not_ready"
    assert int(answer.headers["retry-after"]) >= 1
    wait_for(lambda: server.client.get("/health").status_code == 200)
    assert server.generate("x", 4)["generated_tokens"] == 4
    assert server.kv_is_zero()
    server.stop()


def bad_file(kind: str, folder: Path, good: Path) -> Path:
    path = folder / f"{kind}.gguf"
    data = good.read_bytes()
    contents = {
        "missing": None,
        "text": b"this is not a model\n" * 100,
        "cut-in-tensors": data[:-5000],
        "absurd-metadata": b"GGUF" + struct.pack("<IQQ", 3, 1, 2**60) + data[24:],
        "absurd-string": b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, 2**62) + data[32:],
    }
    content = contents[kind]
    if content is not None:
        path.write_bytes(content)
    return path


@pytest.mark.failure_mode("bad-model-file")
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("missing", "no model file"),
        ("text", "not a GGUF"),
        ("cut-in-tensors", "truncated"),
        ("absurd-metadata", str(2**60)),
        ("absurd-string", "corrupt"),
    ],
)
def test_a_bad_model_file_is_one_line(tmp_path: Path, tiny_model: Path, kind: str, said: str) -> None:
    line = only_line(cllm("serve", str(bad_file(kind, tmp_path, tiny_model)), "--port", "0"))
    assert said in line


@pytest.mark.failure_mode("not-enough-memory")
def test_a_context_that_cannot_fit_is_refused_with_the_sum(tiny_model: Path) -> None:
    line = only_line(cllm("serve", str(tiny_model), "--port", "0", "--ctx-size", str(10**12)))
    assert "MiB" in line and "--ctx-size" in line


# A real instruction that no CPU runs, put into a copy of the library.

UNDEFINED = {"x86_64": b"\x0f\x0b", "aarch64": b"\x00\x00\x00\x00"}


def with_undefined_instruction(folder: Path, name: str, function: str) -> Path:
    """A copy of the native library whose `function` begins with an instruction that raises SIGILL."""
    copy = Path(shutil.copytree(find(), folder / "library"))
    library = copy / name
    address = ctypes.cast(getattr(ctypes.CDLL(str(library)), function), ctypes.c_void_p).value
    assert address is not None
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, _, offset, _, _, *path = line.split()
        start, end = (int(number, 16) for number in place.split("-"))
        if start <= address < end:
            assert path == [str(library)]
            with library.open("rb") as file:
                data = bytearray(file.read())
            where = address - start + int(offset, 16)
            instruction = UNDEFINED[platform.machine()]
            data[where : where + len(instruction)] = instruction
            library.unlink()  # it is mapped here: the new one is another file
            library.write_bytes(data)
            return copy
    raise AssertionError(f"{function} is not mapped")


needs_elf = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() not in UNDEFINED, reason="patches ELF machine code"
)


@pytest.mark.failure_mode("illegal-instruction")
@needs_elf
@pytest.mark.parametrize(
    ("file", "function", "flags", "served"),
    [
        ("libcllm-kernels.so", "_Z14find_attentionPK11ggml_tensor", (), "with llama.cpp's kernels"),
        (
            "libggml-cpu.so",
            "ggml_compute_forward_flash_attn_ext",
            ("--no-own-kernels",),
            "without flash attention",
        ),
    ],
)
def test_sigill_in_a_kernel_falls_back(
    start: StartServer,
    tiny_model: Path,
    tmp_path: Path,
    file: str,
    function: str,
    flags: tuple[str, ...],
    served: str,
) -> None:
    """A kernel cannot run here: it is found out beforehand, and others are used."""
    library = with_undefined_instruction(tmp_path, file, function)
    folders = {"CLLM_LIBRARY": str(library), "CLLM_CACHE_DIR": str(tmp_path / "cache")}
    server = start(str(tiny_model), "--threads", "1", *flags, **folders)
    assert "SIGILL" in server.log_text and served in server.log_text
    assert server.generate("it works", 4)["generated_tokens"] == 4
    assert server.metrics()["cllm_engine_restarts_total"] == 0
    server.stop()


@pytest.mark.failure_mode("illegal-instruction")
@needs_elf
def test_sigill_in_every_library_says_what_to_install(tiny_model: Path, tmp_path: Path) -> None:
    library = with_undefined_instruction(tmp_path, "libllama.so", "llama_decode")
    arguments = ("serve", str(tiny_model), "--port", "0", "--threads", "1")
    line = last_line(cllm(*arguments, CLLM_LIBRARY=str(library), CLLM_CACHE_DIR=str(tmp_path / "cache")))
    assert "SIGILL" in line and "cllm build --force --portable" in line
