"""Media fetcher: named hosts only, at an address that was checked, within limits of size, time, redirects."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cllm.errors import InvalidRequest
from cllm.limits import MAX_PICTURE_BYTES
from cllm.workers import media_fetcher
from cllm.workers.media_fetcher import MediaFetcher, is_public

LOCAL = "127.0.0.1"


class _Handler(BaseHTTPRequestHandler):
    """Says what host was asked for; `/to/…` redirects, with ~ for /."""

    def do_GET(self) -> None:
        kind, _, where = self.path.strip("/").partition("/")
        self.send_response(302 if kind == "to" else 404 if kind == "none" else 200)
        if kind == "to":
            self.send_header("Location", where.replace("~", "/"))
        self.end_headers()
        try:
            if kind == "large":
                self.wfile.write(bytes(MAX_PICTURE_BYTES + 1))
            for _ in range(20 * (kind == "slow")):
                self.wfile.write(b"x")
                time.sleep(0.05)
            self.wfile.write(str(self.headers["Host"]).encode())
        except ConnectionError:
            pass  # the fetcher has left

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer((LOCAL, 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def fetch(port: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], bytes]:
    """All names lead to the local server, whose address counts as public; `inside` and `both` do not."""
    places = {"inside.test": ["10.0.0.1"], "both.test": [LOCAL, "::1"]}
    monkeypatch.setattr(media_fetcher, "resolve", lambda host, _: places.get(host, [LOCAL]))
    monkeypatch.setattr(media_fetcher, "is_public", lambda address: address == LOCAL)
    hosts = [f"{name}.test:{port}" for name in ("cats", "*.cats", "inside", "both")]
    patience = {True: 0.3, False: 5.0}
    fetcher = MediaFetcher(hosts)
    return lambda url: fetcher(url.format(port=port), 2, time.monotonic() + patience["slow" in url])


def test_a_named_host_is_asked_at_the_checked_address(port: int, fetch: Callable[[str], bytes]) -> None:
    """These names are in no DNS: only the address that was checked can have answered."""
    for host in ("cats.test", "small.cats.test", "CATS.test"):
        assert fetch(f"http://{host}:{port}/x") == f"{host.lower()}:{port}".encode()
    assert fetch(f"http://cats.test:{port}/to/http:~~a.cats.test:{port}~y") == f"a.cats.test:{port}".encode()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://dogs.test:{port}/x", "dogs.test:.* is not among --media-hosts"),
        ("http://evilcats.test:{port}/x", "is not among"),
        ("http://cats.test/x", "is not among"),
        ("http://inside.test:{port}/x", "inside.test:.* has no public address"),
        ("http://both.test:{port}/x", "both.test:.* has no public address"),
        ("http://me:secret@cats.test:{port}/x", "must be http://HOST"),
        ("file://cats.test/etc/passwd", "must be http://HOST"),
        ("http://cats.test:{port}/none", "cats.test answers 404"),
        ("http://cats.test:{port}/large", "over 20971520 bytes"),
        ("http://cats.test:{port}/slow", "takes longer than|ReadTimeout"),
        ("http://cats.test:{port}/to/http:~~inside.test:{port}~x", "inside.test:.* has no public address"),
        ("http://cats.test:{port}/to/http:~~127.0.0.1:{port}~x", "127.0.0.1:.* is not among"),
        ("http://cats.test:{port}/to/?", "more than 3 redirects"),
    ],
)
def test_what_is_not_fetched_says_why(fetch: Callable[[str], bytes], url: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"picture 2 cannot be fetched: .*({reason})"):
        fetch(url)


def test_addresses_inside_are_not_public() -> None:
    inside = "127.0.0.1 10.1.2.3 192.168.0.1 172.16.0.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1"
    carried = "::1 fe80::1%eth0 fd00::1 ::ffff:127.0.0.1 64:ff9b::7f00:1 2002:7f00:1:: :: ff02::1"
    assert not any(map(is_public, f"{inside} {carried}".split()))
    assert is_public("93.184.216.34") and is_public("2606:4700::1111")
