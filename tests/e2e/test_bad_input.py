"""What is refused, or read, beside the failure modes: bounds, extreme sampling, bytes that are no HTTP."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.driver.server import PATIENCE_S, Server, get_data


@pytest.fixture(autouse=True, scope="module")
def unharmed(tiny: Server) -> Iterator[None]:
    """After all of them it is alive, empty, and has accepted none of the refused."""
    yield
    assert tiny.get("/health")["status"] == "ok"
    assert tiny.kv_is_zero()
    assert "Traceback" not in tiny.log_text


def test_a_prompt_one_short_of_the_limit_gets_its_token(tiny: Server) -> None:
    limit = tiny.get("/model/info")["limits"]["request_tokens"]
    assert tiny.generate("0" * (limit - 1), 5)["generated_tokens"] == 1


def peak_kib(pid: int) -> int:
    """The peak of the resident memory of a process."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])  # type: ignore[index]


@pytest.mark.parametrize(
    "fields",
    [
        {"penalty_last_n": 2**31 - 1, "repetition_penalty": 1.1},
        {"dry_penalty_last_n": 2**31 - 1, "dry_multiplier": 1.0},
        {"dry_allowed_length": 2**31 - 1, "dry_multiplier": 1.0},
        {"top_k": 2**31 - 1},
        {"typical_p": 1e-300},
        {"temperature": 1e-300},
        {"repetition_penalty": 1e-300},
        {"mirostat": 1, "mirostat_tau": 0, "mirostat_eta": 0},
        {"mirostat": 2, "mirostat_tau": 100, "mirostat_eta": 1},
        {"xtc_probability": 1, "xtc_threshold": 0},
        {"top_n_sigma": 0},
        {"top_p": 0},
        {"min_p": 1},
        {"logit_bias": {str(token): -100 for token in range(512)}, "ignore_eos": True},
    ],
    ids=str,
)
def test_extreme_sampling_costs_the_engine_nothing(tiny: Server, fields: dict[str, Any]) -> None:
    """Whatever is within the bounds is answered, by the same process, in the same memory."""
    engine = tiny.child("engine")
    before = peak_kib(engine)
    data = tiny.generate("all within bounds", 4, **{"temperature": 1.0, "seed": 1, **fields})
    assert data["generated_tokens"] == 4
    assert tiny.child("engine") == engine
    assert peak_kib(engine) - before < 512 * 1024


def test_a_body_of_7_mib_is_read(tiny: Server) -> None:
    answer = tiny.post("/generate", {"prompt": "x", "max_tokens": 2, "other": "x" * (7 << 20)})
    assert get_data(answer)["generated_tokens"] == 2


@pytest.mark.parametrize(
    "sent",
    [b"\0\0\0\0\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /generate HTTP/1.1\r\nContent-Length: x\r\n\r\n"],
)
def test_what_is_not_http_is_refused_or_closed(tiny: Server, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", tiny.port), timeout=PATIENCE_S) as connection:
        connection.sendall(sent)
        answer = connection.recv(1000)
    assert answer == b"" or re.match(rb"HTTP/1\.1 4\d\d ", answer)
