"""A hub on loopback: the APIs of Hugging Face and ModelScope, a second host for the files, and faults.

Files are at another name and port than the API, as on the real hubs. What was asked and sent is recorded.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
PIECE = 16 << 10  # bytes that are sent at a time
STALL_S = 20.0
TOKEN = "hf_right"


Mutate = Callable[[str, int, dict[str, str], bytes], tuple[int, dict[str, str], bytes]]


class Asked(NamedTuple):
    """A request: to which of the two hosts, and with which token."""

    host: str  # hub or files
    path: str
    token: str
    range: str


class FakeHub:
    """Repositories by name, each with its files. Faults are used up: `faults["429"] = 2` answers so twice.

    Faults of files: refuse (no answer), cut, stall, whole (200 for 206), 416, 500, 429, wrong (other bytes),
    expired (403), resized, early (an answer that ends too early, as if it were complete). Of the API:
    list-429, list-500, list-html, loop.
    """

    def __init__(self, repos: Mapping[str, Mapping[str, bytes]]) -> None:
        self.lock = threading.Lock()
        self._digests: dict[int, tuple[bytes, str]] = {}
        self._servers = [_Server(self, "hub"), _Server(self, "files")]
        self.url = f"http://127.0.0.1:{self._servers[0].server_port}"
        self.files_url = f"http://localhost:{self._servers[1].server_port}"
        self.reset(repos)

    def reset(self, repos: Mapping[str, Mapping[str, bytes]]) -> None:
        """As it is at first, with these repositories."""
        self.repos = {name: dict(files) for name, files in repos.items()}
        self.gated: set[str] = set()
        self.extra: list[dict[str, Any]] = []  # more entries of Hugging Face's listings
        self.in_git: set[str] = set()  # files that are not in LFS
        self.faults: Counter[str] = Counter()
        self.mutate: Mutate | None = None  # changes answers: their path, status, headers and body
        self.bytes_per_s = 0.0
        self.piece = PIECE
        self.retry_after = "0.05"  # of a 429, seconds
        self.page_size = 1000
        self.requests: list[Asked] = []
        self.sent = 0  # bytes of files
        self._next = 0.0

    def __enter__(self) -> FakeHub:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """What leads a process here."""
        return {
            "HF_ENDPOINT": self.url,
            "MODELSCOPE_ENDPOINT": self.url,
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }

    def has_fault(self, name: str) -> bool:
        with self.lock:
            if self.faults[name] <= 0:
                return False
            self.faults[name] -= 1
            return True

    def digest(self, data: bytes) -> str:
        """SHA-256, computed once for each file."""
        if id(data) not in self._digests:
            self._digests[id(data)] = data, hashlib.sha256(data).hexdigest()
        return self._digests[id(data)][1]

    def throttle(self, count: int) -> None:
        if self.bytes_per_s:
            with self.lock:
                begin = max(self._next, time.monotonic())
                self._next = begin + count / self.bytes_per_s
            time.sleep(max(0.0, begin - time.monotonic()))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, hub: FakeHub, host: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        # What counts as sent is then close to what has arrived.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        self.hub, self.host = hub, host

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    @property
    def hub(self) -> FakeHub:
        return self.server.hub

    def do_GET(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        asked = Asked(self.server.host, self.path, token, self.headers.get("Range", ""))
        with self.hub.lock:
            self.hub.requests.append(asked)
        address = urlsplit(self.path)
        path, query = unquote(address.path), {key: value[0] for key, value in parse_qs(address.query).items()}
        if self.server.host == "files":
            self._send_file(*path.lstrip("/").split("/", 1)[1].split("//", 1))
        elif self.hub.has_fault("loop"):
            self._redirect(self.path)
        elif self._is_allowed(path, token):
            self._answer(path, query)

    def _is_allowed(self, path: str, token: str) -> bool:
        for repo in self.hub.gated:
            if f"/{repo}/" in path + "/" and token != TOKEN:
                self._json({"error": "gated"}, 401 if not token else 403, {"X-Error-Code": "GatedRepo"})
                return False
        return True

    def _answer(self, path: str, query: Mapping[str, str]) -> None:
        hub = self.hub
        for name, status in (("list-429", 429), ("list-500", 500)):
            if "/api/" in path and hub.has_fault(name):
                self._json({}, status, {"Retry-After": hub.retry_after} if status == 429 else {})
                return
        if hub.has_fault("list-html"):
            self._send(b"<html>", 200, "text/html")
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path):
            self._hugging_face(match[1], match[2], match[3], query)
        elif path in ("/api/models", "/openapi/v1/models"):
            self._search(path, query)
        elif match := re.fullmatch(r"/api/v1/models/([^/]+/[^/]+)/repo/files", path):
            self._modelscope(match[1])
        elif match := re.fullmatch(r"/api/v1/models/([^/]+/[^/]+)/repo", path):
            self._redirect_to_file(match[1], query["FilePath"])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._redirect_to_file(match[1], match[3])
        else:
            self._json({}, 404)

    def _hugging_face(self, repo: str, kind: str, revision: str, query: Mapping[str, str]) -> None:
        files = self.hub.repos.get(repo)
        if files is None:
            return self._json({"error": "Repository not found"}, 401, {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", "v1", COMMIT):
            return self._json({}, 404, {"X-Error-Code": "RevisionNotFound"})
        if kind == "revision":
            return self._json({"id": repo, "sha": COMMIT})
        entries = [self._entry(path, data) for path, data in files.items()] + self.hub.extra
        first = int(query.get("cursor", 0))
        last = first + self.hub.page_size
        link = f'<{self.hub.url}/api/models/{repo}/tree/{COMMIT}?recursive=true&cursor={last}>; rel="next"'
        self._json(entries[first:last], 200, {"Link": link} if last < len(entries) else {})
        return None

    def _entry(self, path: str, data: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": "0" * 40}
        if path in self.hub.in_git:
            entry["oid"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        else:
            entry["lfs"] = {"oid": self.hub.digest(data), "size": len(data), "pointerSize": 134}
        return entry

    def _modelscope(self, repo: str) -> None:
        files = self.hub.repos.get(repo)
        if files is None:
            return self._json({"Code": 10010205001, "Message": "not found", "Success": False}, 404)
        entries = [
            {"Path": path, "Type": "blob", "Size": len(data), "Sha256": self.hub.digest(data)}
            for path, data in files.items()
        ]
        return self._json({"Code": 200, "Data": {"Files": [{"Path": "sub", "Type": "tree"}, *entries]}})

    def _search(self, path: str, query: Mapping[str, str]) -> None:
        words = query["search"].lower().split()
        names = [name for name in self.hub.repos if all(word in name.lower() for word in words)]
        found = [{"id": name, "downloads": 1000 * len(name), "likes": 1} for name in names]
        self._json(found if path == "/api/models" else {"success": True, "data": {"models": found}})

    def _redirect_to_file(self, repo: str, path: str) -> None:
        if path not in self.hub.repos.get(repo, {}):
            return self._json({}, 404, {"X-Error-Code": "EntryNotFound"})
        return self._redirect(f"{self.hub.files_url}/signed/{quote(repo)}//{quote(path)}")

    def _redirect(self, url: str) -> None:
        self._send(b"", 302, "text/plain", {"Location": url})

    def _send_file(self, repo: str, path: str) -> None:
        hub, data = self.hub, self.hub.repos[repo][path]
        if hub.has_fault("refuse"):
            return self._hang_up()
        for name, status in (("416", 416), ("500", 500), ("429", 429), ("expired", 403)):
            if hub.has_fault(name):
                return self._json({}, status, {"Retry-After": hub.retry_after} if status == 429 else {})
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(match[1]), int(match[2])) if match else (0, len(data) - 1)
        part = match is not None and not hub.has_fault("whole")
        if not part:
            first, last = 0, len(data) - 1
        body = memoryview(data)[first : last + 1]
        if hub.has_fault("wrong"):
            body = memoryview(bytes(len(body)))
        if hub.has_fault("early"):
            body = body[: len(body) // 2]
        total = len(data) + hub.has_fault("resized")
        if hub.mutate is not None:
            headers = {"Content-Range": f"bytes {first}-{last}/{total}"} if part else {}
            return self._send(bytes(body), 206 if part else 200, "application/octet-stream", headers)
        self.send_response(206 if part else 200)
        self.send_header("Content-Length", str(len(body)))
        if part:
            self.send_header("Content-Range", f"bytes {first}-{last}/{total}")
        self.end_headers()
        return self._send_body(body)

    def _send_body(self, body: memoryview) -> None:
        hub = self.hub
        cut, stall = hub.has_fault("cut"), hub.has_fault("stall")
        for start in range(0, len(body), hub.piece):
            piece = body[start : start + hub.piece]
            if (cut or stall) and start >= len(body) // 2:
                if stall:
                    time.sleep(STALL_S)
                self._hang_up()
                return
            hub.throttle(len(piece))
            self.wfile.write(piece)
            with hub.lock:
                hub.sent += len(piece)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self._send(json.dumps(value).encode(), status, "application/json", headers)

    def _send(self, body: bytes, status: int, kind: str, headers: Mapping[str, str] | None = None) -> None:
        sent = {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}
        if self.hub.mutate is not None:
            status, sent, body = self.hub.mutate(self.path, status, sent, body)
            sent["Connection"], self.close_connection = "close", True
        self.send_response(status)
        for name, value in sent.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(ConnectionError):  # a client may have had enough
            self.wfile.write(body)
