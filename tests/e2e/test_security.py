"""TLS, and secrets that must never appear: not in an answer, not in a log."""

from __future__ import annotations

import itertools
import json
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from tests.driver.server import PATIENCE_S, Server, StartServer, cllm, wait_for
from tests.tiny_models import make_dense

CANARY = "xyzzyplugh"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def certificate(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Certificate and key of 127.0.0.1, as files."""
    folder = tmp_path_factory.mktemp("tls")
    issued = authority.issue_cert("127.0.0.1", "localhost")
    chain, key = folder / "cert.pem", folder / "key.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(key)
    return chain, key


def test_https_is_served(
    start: StartServer, tiny_model: Path, authority: trustme.CA, certificate: tuple[Path, Path]
) -> None:
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    chain, key = map(str, certificate)
    options = ("--tls-cert", chain, "--tls-key", key, "--header-timeout-s", "1", "--threads", "1")
    server = start(str(tiny_model), *options)
    assert server.url.startswith("https://")
    server.client = httpx.Client(base_url=server.url, verify=trusting, timeout=PATIENCE_S, trust_env=False)
    assert server.generate("over TLS", 4)["generated_tokens"] == 4
    with server.client.stream("POST", "/generate_stream", json={"prompt": "x", "max_tokens": 4}) as answer:
        assert '"done":true' in list(answer.iter_lines())[-2]
    with pytest.raises(httpx.ConnectError):  # who does not know the authority
        httpx.get(server.url + "/health", trust_env=False)
    with pytest.raises(httpx.TransportError):  # plain HTTP
        httpx.get(server.url.replace("https", "http") + "/health", trust_env=False)
    # A handshake that never comes, and a header that never ends, are closed as on a plain connection.
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as silent:
        assert silent.recv(10) == b""
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as bare,
        trusting.wrap_socket(bare, server_hostname="127.0.0.1") as slow,
    ):
        slow.sendall(b"GET /health HTTP/1.1\r\n")
        assert slow.recv(100).startswith(b"HTTP/1.1 408 ")
    assert server.kv_is_zero()
    server.stop()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tls-cert", "{chain}"), "belong together"),
        (("--tls-cert", "{chain}", "--tls-key", "/nowhere.pem"), "No such file"),
        (("--tls-cert", "{key}", "--tls-key", "{chain}"), "cannot be used"),
        (("--api-keys", "/nowhere.toml"), "keys file"),
        (("--api-keys", "{chain}"), "keys file"),
    ],
)
def test_settings_that_cannot_be_are_one_line(
    tiny_model: Path, certificate: tuple[Path, Path], options: tuple[str, ...], said: str
) -> None:
    given = [option.format(chain=certificate[0], key=certificate[1]) for option in options]
    done = cllm("serve", str(tiny_model), "--port", "0", *given)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


# Secrets that never appear ----------------------------------------------------------------------------------


def wrong_requests() -> list[tuple[str, str, Any]]:
    """A wrong request of every kind, each with the canary in whatever a client may write."""
    prompt = f"my secret is {CANARY}"
    messages = [{"role": "user", "content": prompt}]
    fields: list[dict[str, Any]] = [
        {"max_tokens": CANARY},
        {"temperature": CANARY},
        {"stop": [CANARY * 30]},
        {"logit_bias": {"512": 1}},
        {"grammar": f"root ::= {CANARY} ::="},
        {"grammar": f'root ::= "{CANARY}'},
        {"regex": f"({CANARY}"},
        {"json_schema": {"$ref": f"#/{CANARY}"}},
        {"json_schema": {"type": CANARY}},
        {"choice": []},
    ]
    routes = ("/generate", "/generate_stream", "/completion", "/v1/completions", "/v1/chat/completions")
    requests: list[tuple[str, str, Any]] = [
        ("POST", route, {"prompt": prompt, "messages": messages, **extra})
        for route, extra in itertools.product(routes, fields)
    ]
    requests += [
        ("POST", route, {"prompt": prompt * 400, "messages": [{"role": "user", "content": prompt * 400}]})
        for route in routes
    ]
    requests += [
        ("POST", "/v1/chat/completions", {"messages": [{"role": CANARY, "content": prompt}]}),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": CANARY}]}]}),
        ("POST", "/v1/completions", {"prompt": prompt, "model": f"../{CANARY}"}),
        ("POST", "/encode", {"text": [prompt]}),
        ("POST", "/decode", {"tokens": [prompt]}),
        ("POST", "/tokenize", {"content": {CANARY: 1}}),
        ("POST", "/apply-template", {"messages": prompt}),
        ("POST", "/generate", prompt),
        ("GET", f"/{CANARY}", None),
        ("PUT", "/generate", {"prompt": prompt}),
        ("POST", "/generate", {"prompt": f"\ud800{CANARY}"}),
    ]
    return requests


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Everything at the lowest log level; the model lies at a path that can be recognised."""
    folder = tmp_path_factory.mktemp(f"path-{CANARY}")
    model = make_dense(folder / "plain.gguf")
    options = (str(model), "--threads", "1", "--log-level", "debug", "--ctx-size", "4096")
    with Server(folder / "log", *options, CLLM_API_KEY=f"key-{CANARY}") as server:
        server.client.headers["authorization"] = f"Bearer key-{CANARY}"
        yield server


def test_no_answer_and_no_log_tells_a_prompt_a_key_or_a_path(talkative: Server) -> None:
    refused = 0
    for method, path, body in wrong_requests():
        content = json.dumps(body).encode() if body is not None else None
        headers = {"content-type": "application/json"}
        answer = talkative.client.request(method, path, content=content, headers=headers)
        assert 400 <= answer.status_code < 500, (path, body, answer.text)
        refused += 1
        # What a client gets back of its own grammar or field is no leak; a prompt, key or path is.
        for secret in (
            f"my secret is {CANARY}",
            f"key-{CANARY}",
            f"path-{CANARY}",
            "plain.gguf",
            "Traceback",
        ):
            assert secret not in answer.text, (path, body, answer.text)
    wrong_key = {"authorization": f"Bearer wrong-{CANARY}"}
    assert talkative.client.get("/v1/models", headers=wrong_key).status_code == 401
    for right in ("/generate", "/v1/completions", "/completion", "/generate_stream"):
        body = {"prompt": f"my secret is {CANARY}", "max_tokens": 3, "n_predict": 3, "stop": [CANARY]}
        assert talkative.client.post(right, json=body).status_code == 200
    chat = {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 3}
    assert talkative.client.post("/v1/chat/completions", json=chat).status_code == 200
    metrics = talkative.client.get("/metrics").text
    wait_for(lambda: talkative.log_text.count("released seq") >= 5)
    assert refused > 60 and CANARY not in metrics
    leaks = [line for line in talkative.log_text.splitlines() if CANARY in line or "Traceback" in line]
    assert leaks == []
