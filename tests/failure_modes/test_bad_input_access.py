"""Bad input: API keys, and the Host and Origin headers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.driver.http import dial, refusal, unharmed
from tests.driver.server import Server, StartServer, cllm, make_client, wait_for

OK = {"prompt": "x", "max_tokens": 1}

# API keys -------------------------------------------------------------------------------------------


class Keyed:
    """A server with a keys file, a user's key and an admin's."""

    def __init__(self, start: StartServer, file: Path) -> None:
        self.file = file
        self.user, self.admin = self.new("canary-user"), self.new("boss", "--admin")
        self.server = start("--api-keys", str(file))
        self.server.client.headers["authorization"] = f"Bearer {self.admin}"
        self.client = make_client()  # without a key

    def new(self, name: str, *arguments: str) -> str:
        done = cllm("keys", "new", name, "--file", str(self.file), *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def get(self, path: str, key: str | None, scheme: str = "Bearer") -> httpx.Response:
        headers = {b"authorization": f"{scheme} {key}".strip().encode()} if key is not None else {}
        return self.client.get(self.server.url + path, headers=headers)


@pytest.fixture(scope="module")
def keyed_server(start_for_module: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    keyed = Keyed(start_for_module, tmp_path_factory.mktemp("keys") / "keys.toml")
    yield keyed
    keyed.client.close()


@pytest.fixture
def keyed(keyed_server: Keyed) -> Iterator[Keyed]:
    yield keyed_server
    unharmed(keyed_server.server)


PRIVATE = ("/v1/models", "/model/info", "/props", "/docs", "/openapi.json", "/generate", "/nothing")
OPERATORS = ("/metrics", "/slots", "/debug/kv", "/debug/requests", "/debug/nothing", "/admin/reload")


@pytest.mark.failure_mode("wrong-key")
@pytest.mark.parametrize("path", PRIVATE + OPERATORS)
def test_without_a_right_key_401(keyed: Keyed, path: str) -> None:
    wrong = [None, "", "x", keyed.user[:-1], keyed.user + "x", keyed.user.upper(), "é", f"{keyed.user} x"]
    for key in wrong:
        answer = keyed.get(path, key)
        refusal(answer, 401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    refusal(keyed.get(path, keyed.user, "Basic"), 401)


@pytest.mark.failure_mode("wrong-key")
def test_every_method_of_every_route_needs_a_key(keyed: Keyed) -> None:
    """As the server itself describes them: a new route cannot be forgotten."""
    routes = keyed.get("/openapi.json", keyed.user).json()["paths"]
    assert "/v1/chat/completions" in routes and "/debug/kv" in routes
    for path, methods in routes.items():
        for method in {*methods, "options", "head"}:
            answer = keyed.client.request(method, keyed.server.url + path)
            expected = answer.status_code if path in ("/health", "/ready") else 401
            assert answer.status_code == expected, (method, path)


@pytest.mark.failure_mode("wrong-key")
def test_health_and_ready_need_no_key(keyed: Keyed) -> None:
    assert keyed.get("/health", None).status_code == keyed.get("/ready", None).status_code == 200
    for path in ("/health/", "/ready/", "/health/x", "//health", "/Health"):
        assert keyed.get(path, None).status_code == 401


@pytest.mark.failure_mode("wrong-key")
def test_a_right_key_is_let_in(keyed: Keyed) -> None:
    for key in (keyed.user, keyed.admin):
        assert keyed.get("/v1/models", key).status_code == 200
        assert keyed.get("/v1/models", key, "bearer").status_code == 200
        headers = {"x-api-key": key}
        answer = keyed.client.post(keyed.server.url + "/generate", json=OK, headers=headers)
        assert answer.status_code == 200
    assert keyed.get("/nothing", keyed.user).status_code == 404


@pytest.mark.failure_mode("wrong-key")
@pytest.mark.parametrize("path", OPERATORS)
def test_admin_routes_need_the_admin_key(keyed: Keyed, path: str) -> None:
    assert "admin" in refusal(keyed.get(path, keyed.user), 403, "forbidden")
    assert keyed.get(path, keyed.admin).status_code in (200, 404, 405)


@pytest.mark.failure_mode("wrong-key")
def test_keys_are_hashed_at_rest_and_in_no_log(keyed: Keyed) -> None:
    text = keyed.file.read_text()
    assert keyed.file.stat().st_mode & 0o777 == 0o600
    for key in (keyed.user, keyed.admin):
        assert len(key) >= 40 and key not in text and key not in keyed.server.log_text


@pytest.mark.failure_mode("wrong-key")
def test_sighup_reads_the_keys_again(keyed: Keyed) -> None:
    def hang_up(line: str) -> None:
        before = keyed.server.log_text.count(line)
        os.kill(keyed.server.process.pid, signal.SIGHUP)
        wait_for(lambda: keyed.server.log_text.count(line) > before)

    good = keyed.file.read_text()
    late = keyed.new("late")
    assert keyed.get("/v1/models", late).status_code == 401
    hang_up("3 keys are in force")
    assert keyed.get("/v1/models", late).status_code == 200
    keyed.file.write_text(good)
    hang_up("2 keys are in force")
    assert keyed.get("/v1/models", late).status_code == 401


@pytest.mark.failure_mode("wrong-key")
def test_without_keys_admin_routes_are_for_loopback_only(start_for_module: StartServer) -> None:
    """On an address others can reach it says so, loudly, and shows them nothing of its insides."""
    open_server = start_for_module("--host", "0.0.0.0")
    assert open_server.url == f"http://127.0.0.1:{open_server.port}", "an address that can be opened"
    assert "no API key is set" in open_server.log_text
    for path in OPERATORS:
        assert "loopback" in refusal(open_server.client.get(path), 403, "forbidden")
    assert open_server.generate("x", 1)["generated_tokens"] == 1
    assert open_server.client.get("/health", headers={"host": "any.name"}).status_code == 200
    for path, body in UNLOADING.items():
        assert open_server.post(path, {"keep_alive": 0, "model": "x"}).status_code == 403
        assert open_server.post(path, {"keep_alive": 0, "model": "x", **body}).status_code == 200
        assert open_server.get("/ready")["status"] == "ready"
    assert " is unloaded: " not in open_server.log_text


# What any client may do beside reading. A new route that changes the server's state is not one of them.
FOR_ALL = {
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/completion", "/infill"),
    *("/generate", "/generate_stream", "/api/chat", "/api/generate", "/encode", "/decode", "/tokenize"),
    *("/detokenize", "/apply-template", "/v1/messages/count_tokens", "/v1/responses/input_tokens"),
    *("/chat/completions/input_tokens", "/v1/embeddings", "/embedding", "/v1/rerank", "/v1/score"),
    *("/api/show", "/api/embed", "/api/embeddings", "/v1/responses/{response_id}", "/v1/files"),
    *("/v1/files/{file_id}", "/v1/batches", "/v1/batches/{batch_id}/cancel"),
    *("/v1/responses/{response_id}/cancel", "/v1/streams/{stream_id}", "/v1/audio/transcriptions"),
    *("/v1/conversations", "/v1/conversations/{conversation_id}"),
}
UNLOADING = {
    "/api/generate": {"prompt": "x", "options": {"num_predict": 1}, "stream": False},
    "/api/chat": {
        "messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 1}, "stream": False,
    },
}  # fmt: skip


@pytest.mark.failure_mode("wrong-key")
def test_only_operators_change_the_servers_state(keyed: Keyed, start_for_module: StartServer) -> None:
    """With a user's key, with one of several keys of `--api-key`, and without keys on any address."""
    several = start_for_module("--api-key", "one,two")
    strangers = start_for_module("--host", "0.0.0.0")
    for server, key in ((keyed.server, keyed.user), (several, "one"), (strangers, "")):
        with make_client(base_url=server.url) as client:
            client.headers.update({"authorization": f"Bearer {key}"} if key else {})
            routes = client.get("/openapi.json").json()["paths"]
            changing = {(path, method) for path in routes for method in routes[path] if method != "get"}
            assert ("/admin/reload", "post") in changing and ("/api/delete", "delete") in changing
            hidden = {("/slots/0?action=erase", "post"), ("/slots/0?action=save", "post")}
            for path, method in sorted(changing | hidden):
                if path not in FOR_ALL:
                    answer = client.request(method, path, json={})
                    assert answer.status_code == 403, (path, method, answer.text)


# Host and Origin ------------------------------------------------------------------------------------


@pytest.mark.failure_mode("foreign-host")
@pytest.mark.parametrize(
    "host", ["evil.example:18081", "localhost.evil.example", "10.0.0.1", "[::2]:1", "localhost@evil.example"]
)
def test_a_foreign_host(tiny: Server, host: str) -> None:
    for path in ("/health", "/v1/models", "/debug/kv", "/nothing"):
        refusal(tiny.client.get(path, headers={"host": host}), 403, "forbidden")
    refusal(tiny.client.post("/generate", json=OK, headers={"host": host}), 403)


@pytest.mark.failure_mode("foreign-host")
@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:18081", "localhost.", "127.0.0.1", "127.8.9.1:80", "[::1]:80", "[::1]"]
)
def test_a_loopback_host(tiny: Server, host: str) -> None:
    assert tiny.client.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.failure_mode("foreign-host")
def test_two_host_headers_must_both_be_allowed(tiny: Server) -> None:
    with dial(tiny) as connection:
        connection.sendall(b"GET /debug/kv HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert re.match(rb"HTTP/1.1 40[03] ", connection.recv(1000))


def cors_of(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control")}


ASK = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.mark.failure_mode("foreign-host")
def test_a_foreign_origin_gets_no_cors_headers(tiny: Server) -> None:
    foreign = {"origin": "https://evil.example"}
    for answer in (
        tiny.client.post("/v1/completions", json=OK, headers=foreign),
        tiny.client.get("/v1/models", headers=foreign),
        tiny.client.options("/v1/completions", headers={**foreign, **ASK}),
        tiny.client.get("/nothing", headers=foreign),
    ):
        assert cors_of(answer) == {}
    assert tiny.client.options("/v1/completions", headers={**foreign, **ASK}).status_code == 405


@pytest.mark.failure_mode("foreign-host")
def test_a_foreign_page_cannot_post_without_asking(tiny: Server) -> None:
    """Of these types no browser asks first, so none of them may be read as JSON."""
    body = json.dumps(OK).encode()
    for kind in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        for page in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
            answer = tiny.client.post("/generate", content=body, headers={**page, **kind})
            assert "application/json" in refusal(answer, 415)


@pytest.mark.failure_mode("foreign-host")
@pytest.mark.parametrize("path", ["/admin/cache/clear", "/slots/0?action=erase"])
def test_a_foreign_page_cannot_post_without_a_body(tiny: Server, path: str) -> None:
    own = {"origin": tiny.url, "host": tiny.url.partition("://")[2]}
    for page in (
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": tiny.url.rpartition(":")[0]},  # another port of this machine
        {"origin": tiny.url, "sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site"},
    ):
        refusal(tiny.client.post(path, headers=page), 415)
    for page in ({}, own, {**own, "sec-fetch-site": "same-origin"}):
        assert tiny.client.post(path, headers=page).status_code == 200


@pytest.mark.failure_mode("foreign-host")
def test_a_foreign_page_cannot_delete_without_a_type(tiny: Server) -> None:
    for page, status in (({"sec-fetch-site": "cross-site"}, 415), ({}, 404)):
        refusal(tiny.client.delete("/v1/responses/resp_1", headers=page), status)


@pytest.mark.failure_mode("foreign-host")
def test_a_body_without_a_type_is_read_where_no_page_sends_it(tiny: Server) -> None:
    assert tiny.client.post("/generate", content=json.dumps(OK).encode()).status_code == 200


@pytest.mark.failure_mode("foreign-host")
def test_hosts_and_origins_that_are_allowed(start_for_module: StartServer, tmp_path: Path) -> None:
    allowed = {"--allowed-hosts": "Box.lan, *.example.org", "--cors-origins": "https://ui.example.org"}
    server = start_for_module(
        *[word for pair in allowed.items() for word in pair], CLLM_API_KEY="one-canary-key"
    )
    key = {"authorization": "Bearer one-canary-key"}
    for host, status in (("box.lan:80", 200), ("a.example.org", 200), ("example.org", 403), ("x.lan", 403)):
        assert server.client.get("/health", headers={"host": host}).status_code == status
    ours, foreign = {"origin": "https://ui.example.org"}, {"origin": "https://evil.example"}
    preflight = server.client.options("/v1/completions", headers={**ours, **ASK})
    assert preflight.status_code == 200
    assert cors_of(preflight)["access-control-allow-origin"] == "https://ui.example.org"
    assert "authorization" in cors_of(preflight)["access-control-allow-headers"]
    private = {"access-control-request-private-network": "true"}
    preflight = server.client.options("/v1/completions", headers={**ours, **ASK, **private})
    assert preflight.status_code == 200
    assert cors_of(preflight)["access-control-allow-private-network"] == "true"
    preflight = server.client.options("/v1/completions", headers={**foreign, **ASK, **private})
    assert preflight.status_code == 400 and "access-control-allow-origin" not in cors_of(preflight)
    answer = server.client.post("/v1/completions", json=OK, headers={**ours, **key})
    assert answer.status_code == 200 and "access-control-allow-origin" in cors_of(answer)
    assert "X-Queue-Position" in cors_of(answer)["access-control-expose-headers"]
    assert "access-control-allow-origin" in cors_of(server.client.get("/v1/models", headers=ours))
    for answer in (
        server.client.options("/v1/completions", headers={**foreign, **ASK}),
        server.client.post("/v1/completions", json=OK, headers={**foreign, **key}),
    ):
        assert "access-control-allow-origin" not in cors_of(answer)
    assert "one-canary-key" not in server.log_text
    server.client.headers.update(key)
    unharmed(server)  # the one key is an admin's


@pytest.mark.failure_mode("foreign-host")
def test_ipv6_loopback_is_loopback(start_for_module: StartServer) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    server = start_for_module("--host", "::1")
    unharmed(server)
    assert server.client.get("/health", headers={"host": "evil.example"}).status_code == 403
