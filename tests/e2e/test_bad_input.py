"""Whatever a client sends, it gets a 4xx that names the field; the server does not notice."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.driver.server import PATIENCE_S, Server, get_data

JSON = {"content-type": "application/json"}


def nested(depth: int) -> bytes:
    """A body that would be fine but for a field we do not know."""
    return b'{"prompt": "x", "max_tokens": 1, "other": ' + b"[" * depth + b"]" * depth + b"}"


BODIES = {
    "empty": b"",
    "not JSON": b"{prompt: x",
    "cut off": b'{"prompt": "x"',
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "a list": b"[]",
    "null": b"null",
    "a string": b'"x"',
    "a number": b"5",
    "nested 100 deep": nested(100),
    "nested 100,000 deep": nested(100_000),
    "large, nested 300,000 deep": nested(300_000),
    "large, cut off": b'{"prompt": "' + b"x" * 300_000,
    "large, not UTF-8": b'{"prompt": "\xff' + b"x" * 300_000 + b'"}',
    "large, not a number": b'{"prompt": "x", "max_tokens": NaN, "other": "' + b"x" * 300_000 + b'"}',
}
# What is put beside {"prompt": "x"}, as JSON text; the message must begin with the field's name.
FIELDS = {
    "prompt": ["null", "5", '["x"]', '{"a": 1}', '""', r'"\ud83d"', r'"x\udc00y"'],
    "max_tokens": ["true", '"16"', "1.5", "NaN", "1e400", "-2", "0", "[]"],
    "temperature": ["-1", "11", "NaN", "Infinity", "-Infinity", "1e400", '"0"', "true"],
    "top_p": ["2", "-0.1", "NaN", '"x"'],
    "top_k": ["-2", "1.5", "true", "3000000000"],
    "min_p": ["1.5", "-1", "NaN"],
    "typical_p": ["0", "2"],
    "repetition_penalty": ["0", "-1", "11", "1e400"],
    "frequency_penalty": ["3", "-3"],
    "presence_penalty": ["3", "-3"],
    "mirostat": ["3", "-1", "true"],
    "seed": [str(-(2**63) - 1), "1.5", "true", "1e400", str(2**63)],
    "stop": ["5", "[5]", '""', '[""]', json.dumps("s" * 257), json.dumps(["s"] * 17), r'"a\u0000b"', "{}"],
    "stream": ["1", '"true"'],
    "ignore_eos": ["1"],
    "logit_bias": ['{"512": 1}', '{"-1": 1}', '{"x": 1}', '{"1": 101}', '{"1": NaN}', "[1]", '{"1": "x"}'],
}


@pytest.fixture(autouse=True, scope="module")
def unharmed(tiny: Server) -> Iterator[None]:
    """After all of them it is alive, empty, and has accepted none of the refused."""
    yield
    assert tiny.get("/health")["status"] == "ok"
    assert tiny.kv_is_zero()
    assert "Traceback" not in tiny.log_text
    assert tiny.generate("still here", 4)["generated_tokens"] == 4


def refusal(answer: httpx.Response, status: int = 400) -> str:
    """The message of an error in cLLM's shape; it leaks nothing."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"success", "error", "message"}
    assert body["success"] is False and re.fullmatch("[a-z_]+", body["error"])
    message = body["message"]
    assert isinstance(message, str) and message
    for leak in ("/home", "/root", "/tmp", "Traceback", ".py", ".gguf", "pydantic", 'File "'):
        assert leak not in message
    return message


@pytest.mark.parametrize("route", ["/generate", "/generate_stream", "/encode", "/decode"])
@pytest.mark.parametrize("body", list(BODIES.values()), ids=list(BODIES))
def test_a_body_that_is_no_object_is_400(tiny: Server, route: str, body: bytes) -> None:
    refusal(tiny.client.post(route, content=body, headers=JSON))


CASES = [
    pytest.param(field, value, id=f"{field}={value[:12]}")
    for field, values in FIELDS.items()
    for value in values
]


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
@pytest.mark.parametrize(("field", "value"), CASES)
def test_a_bad_field_is_400_and_named(tiny: Server, route: str, field: str, value: str) -> None:
    prompt = "" if field == "prompt" else '"prompt": "x", '
    body = f"{{{prompt}{json.dumps(field)}: {value}}}".encode()
    assert refusal(tiny.client.post(route, content=body, headers=JSON)).startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        (["s"] * 17, "16"),
        (["s" * 257], "256"),
        (["ok", "s" * 257], "256"),
        ([""], "1 character"),
        (["a\0b"], "NUL"),
    ],
    ids=["17 of them", "257 characters", "the second of 257", "empty", "NUL"],
)
def test_a_bad_list_of_stops_is_refused_with_the_limit(tiny: Server, stop: list[str], said: str) -> None:
    message = refusal(tiny.post("/generate", {"prompt": "x", "stop": stop}))
    assert message.startswith("stop: ") and said in message


def test_a_missing_prompt_is_named(tiny: Server) -> None:
    assert "prompt" in refusal(tiny.post("/generate", {}))


def test_unknown_fields_are_ignored(tiny: Server) -> None:
    plain = tiny.generate("the same", 6)["text"]
    assert tiny.generate("the same", 6, wibble={"a": [1]}, n=10**9, model="x")["text"] == plain


def test_a_list_of_no_stops_is_fine(tiny: Server) -> None:
    assert tiny.generate("the same", 6, stop=[])["generated_tokens"] == 6


def test_16_stops_of_256_characters_are_fine(tiny: Server) -> None:
    stops = [f"{number:0256d}" for number in range(16)]
    assert tiny.generate("the same", 6, stop=stops)["generated_tokens"] == 6


@pytest.mark.parametrize("max_tokens", [4097, 2**31, 10**30])
def test_huge_max_tokens_is_clamped(tiny: Server, max_tokens: int) -> None:
    limit = tiny.get("/model/info")["limits"]["request_tokens"]
    prompt = "0" * (limit - 20)  # every digit is a token
    data = tiny.generate(prompt, max_tokens)
    assert data["generated_tokens"] == 20
    assert data["finish_reason"] == "length"


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
@pytest.mark.parametrize("beyond", [0, 1, 5000])
def test_a_prompt_too_long_is_400_with_both_numbers(tiny: Server, route: str, beyond: int) -> None:
    limit = tiny.get("/model/info")["limits"]["request_tokens"]
    answer = tiny.post(route, {"prompt": "0" * (limit + beyond), "max_tokens": 1})
    message = refusal(answer)
    assert answer.json()["error"] == "context_length_exceeded"
    assert str(limit + beyond) in message and str(limit) in message


def test_a_prompt_one_short_of_the_limit_gets_its_token(tiny: Server) -> None:
    limit = tiny.get("/model/info")["limits"]["request_tokens"]
    assert tiny.generate("0" * (limit - 1), 5)["generated_tokens"] == 1


def test_nul_in_a_prompt_is_kept(tiny: Server) -> None:
    answers = [tiny.generate(prompt, 6) for prompt in ("a\0b", "a")]
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [3, 1]
    assert tiny.post("/encode", {"text": "a\0b"}).json()["tokens"] == [ord("a"), 0, ord("b")]


@pytest.mark.parametrize("tokens", [[512], [-1], ["1"], [True], [1.0], [10**30], "x", None])
def test_bad_token_ids_are_400(tiny: Server, tokens: Any) -> None:
    assert refusal(tiny.post("/decode", {"tokens": tokens})).startswith("tokens: ")


@pytest.mark.parametrize("text", [5, None, ["x"]])
def test_bad_text_is_400(tiny: Server, text: Any) -> None:
    assert refusal(tiny.post("/encode", {"text": text})).startswith("text: ")


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


# HTTP ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["/generate", "/encode", "/decode", "/generate_stream"])
def test_the_wrong_method_is_405(tiny: Server, route: str) -> None:
    refusal(tiny.client.get(route), 405)
    refusal(tiny.client.put(route, json={"prompt": "x"}), 405)


def test_a_get_route_refuses_post(tiny: Server) -> None:
    for route in ("/health", "/ready", "/metrics", "/debug/kv", "/debug/requests", "/model/info"):
        refusal(tiny.post(route, {}), 405)


@pytest.mark.parametrize("path", ["/nope", "/generate/x", "/debug", "/..%2f..%2fetc/passwd"])
def test_an_unknown_path_is_404(tiny: Server, path: str) -> None:
    assert "/docs" in refusal(tiny.post(path, {"prompt": "x"}), 404)


def test_another_content_type_is_415(tiny: Server) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        answer = tiny.client.post("/generate", content=body, headers={"content-type": kind})
        assert "application/json" in refusal(answer, 415)


def test_a_body_over_8_mib_is_413(tiny: Server) -> None:
    body = json.dumps({"prompt": "x" * (8 << 20)}).encode()
    assert str(8 << 20) in refusal(tiny.client.post("/generate", content=body, headers=JSON), 413)


def test_a_chunked_body_over_8_mib_is_413(tiny: Server) -> None:
    chunks = (b"x" * (1 << 20) for _ in range(9))
    refusal(tiny.client.post("/generate", content=chunks, headers=JSON), 413)


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
