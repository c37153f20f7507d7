"""Hubs: Hugging Face and ModelScope, their mirrors, behind one interface: list, fetch, search."""

from __future__ import annotations

import logging
import os
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

import httpx
import msgspec

from cllm import __version__
from cllm.errors import HubError
from cllm.models.files import HubFile, HubReference
from cllm.models.store import hf_home
from cllm.names import is_file_path, is_repo, make_visible

log = logging.getLogger(__name__)
MAX_PAGES = 200
MAX_ANSWER = 2 << 20  # bytes of one: decoded, a hostile one takes up to 27 times as much
MAX_LISTED = 20_000  # files of one repository
MAX_REDIRECTS = 10
MAX_FILE = 1 << 44  # bytes: more is no file but a mistake
LIST_ATTEMPTS = 4
LIST_TIMEOUT_S = 30.0
LIST_BACKOFF_S = 0.2
MAX_RETRY_AFTER_S = 120.0
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)


class TemporaryError(Exception):
    """An answer that may be another one after some seconds."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Listing(NamedTuple):
    """The files of a repository at one commit."""

    commit: str
    files: tuple[HubFile, ...]


class SearchHit(NamedTuple):
    """A repository that a search found."""

    repo: str
    downloads: int
    likes: int


class Hub(AbstractContextManager["Hub"]):
    """Base of the two hubs: requests, and errors that say what to do. `repo` may be empty for a search."""

    kind = title = token_variable = default_endpoint = ""
    pages = ""  # the folder of the repositories' pages

    def __init__(self, repo: str, endpoint: str, token: str) -> None:
        self.repo, self.endpoint, self.host = repo, endpoint.rstrip("/"), _host(endpoint)
        self._token = token
        self._client = httpx.Client(
            verify=_certificates(),
            follow_redirects=False,  # httpx would read, and unzip, the whole body of each
            headers={"User-Agent": f"cllm/{__version__}", "Accept-Encoding": "identity"},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=16),
        )

    def __exit__(self, *_: object) -> None:
        self._client.close()

    @property
    def page(self) -> str:
        """The repository's page, for people."""
        return f"{self.default_endpoint}/{self.pages}{self.repo}"

    def list_files(self, revision: str) -> Listing:
        """List the files with sizes and hashes. Raises HubError."""
        raise NotImplementedError

    def file_url(self, commit: str, path: str) -> str:
        raise NotImplementedError

    def search(self, words: str, count: int) -> list[SearchHit]:
        """Search for repositories with GGUF files, the most downloaded first. Raises HubError."""
        raise NotImplementedError

    @contextmanager
    def stream(self, url: str, headers: Mapping[str, str], timeout_s: float) -> Iterator[httpx.Response]:
        """GET with redirects, whose bodies are not read. httpx drops the token at another address."""
        own = _origin(url) == _origin(self.endpoint)
        token = {"Authorization": f"Bearer {self._token}"} if self._token and own else {}
        timeout = httpx.Timeout(timeout_s, connect=min(10.0, timeout_s))
        try:
            request = self._client.build_request("GET", url, headers={**headers, **token}, timeout=timeout)
            for _ in range(MAX_REDIRECTS + 1):
                with closing(self._client.send(request, stream=True)) as response:
                    if response.next_request is None:
                        yield response
                        return
                    request = response.next_request
            raise HubError(f"{_host(url)} redirects in a circle; try another mirror")
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise HubError(f"{url}: {error}; is the hub's address right?") from None

    def get_json(self, url: str) -> tuple[Any, str]:
        """Get a JSON answer and the address of the next page, if any. Tries again while that can help."""
        for attempt in range(1, LIST_ATTEMPTS + 1):
            try:
                with self.stream(url, {}, LIST_TIMEOUT_S) as response:
                    self.check(response, "")
                    answer = msgspec.json.decode(self._read(response))
                    # A mirror passes on the hub's own address: only the query of the next page counts.
                    following = urlsplit(response.links.get("next", {}).get("url", url))
                    return answer, urlsplit(url)._replace(query=following.query).geturl()
            except TemporaryError as error:
                reason, wait_s, over = str(error), error.retry_after_s, False
            except httpx.HTTPError as error:
                reason, wait_s, over = describe_transport(error, self), 0.0, _find_cause(error) is not None
            except (ValueError, RecursionError, msgspec.DecodeError):
                raise HubError(f"{_host(url)} does not answer as {self.title} does (no JSON)") from None
            if over or attempt == LIST_ATTEMPTS or wait_s > MAX_RETRY_AFTER_S:
                raise HubError(reason)
            log.info("%s; again", reason)
            time.sleep(wait_s or LIST_BACKOFF_S * 2**attempt)
        raise AssertionError

    def _read(self, response: httpx.Response) -> bytes:
        """Read an answer as it was sent. Raises HubError for one that is compressed, or too large."""
        host, data = response.url.host, bytearray()
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise HubError(f"{host} compresses its answer, which was not asked for; try another mirror")
        for piece in response.iter_raw():
            data += piece
            if len(data) > MAX_ANSWER:
                raise HubError(f"{host} answers with more than {MAX_ANSWER >> 20} MiB; try another mirror")
        return bytes(data)

    def check(self, response: httpx.Response, what: str) -> None:
        """Check that an answer is a success. Raises HubError with what to do, or TemporaryError."""
        if (status := response.status_code) < 300:
            return
        host = response.url.host
        name = f"{self.kind}:{self.repo}" + (f" {what}" if what else "")
        code = response.headers.get("X-Error-Code", "")
        if status in _TEMPORARY:
            limited = status == 429
            hint = f"limits how often it is asked; {self.token_variable} raises the limit" if limited else ""
            raise TemporaryError(f"{host} {hint or f'answers {status}'}", _retry_after(response))
        gated = code == "GatedRepo" or (status == 403 and code != "RepoNotFound")
        if gated or (status == 401 and self._token and code != "RepoNotFound"):
            wrong = f"the token of {self.token_variable} may not read it"
            had = wrong if self._token else "no token was sent"
            raise HubError(
                f"{name} needs permission ({had}): accept its conditions at {self.page}, make a token "
                f"on your page of settings there, and set {self.token_variable}"
            )
        if code == "RevisionNotFound":
            raise HubError(f"{self.kind}:{self.repo} has no such revision; see {self.page}")
        if status in (401, 404, 410):
            raise HubError(
                f"{name} is not on {host}, or it is private: check the spelling (`cllm search WORDS` finds "
                f"names); a private one needs a token in {self.token_variable}"
            )
        if status == 416:
            raise HubError(
                f"{name} has changed: it is shorter than was listed; the same command lists it anew"
            )
        raise HubError(f"{host} answers {status} for {name}")

    def _check_path(self, path: str) -> str:
        """Return a path of a listing. Raise HubError for one that no file of a repository can have."""
        if not is_file_path(path):
            raise HubError(f"{self.kind}:{self.repo} lists a file named {path!r:.80}, which is no valid path")
        return path


class HuggingFace(Hub):
    """Hugging Face, or a mirror of it (HF_ENDPOINT)."""

    kind, title, token_variable = "hf", "Hugging Face", "HF_TOKEN"
    default_endpoint = "https://huggingface.co"

    def list_files(self, revision: str) -> Listing:
        base = f"{self.endpoint}/api/models/{self.repo}"
        answer, _ = self.get_json(f"{base}/revision/{quote(revision or 'main', safe='')}")
        commit = str(_as_mapping(answer).get("sha", ""))
        if not _SHA1.fullmatch(commit):
            raise HubError(f"{_host(base)} does not answer as {self.title} does (no commit)")
        url, files = f"{base}/tree/{commit}?recursive=true", []
        for _ in range(MAX_PAGES):
            entries, following = self.get_json(url)
            files += [self._parse(entry) for entry in _entries(entries) if entry.get("type") == "file"]
            if len(files) > MAX_LISTED:
                raise HubError(f"hf:{self.repo} lists more than {MAX_LISTED:,} files: no model has as many")
            if following == url:
                break
            url = following
        return Listing(commit, tuple(files))

    def _parse(self, entry: Mapping[str, Any]) -> HubFile:
        lfs, path = _as_mapping(entry.get("lfs")), self._check_path(str(entry.get("path", "")))
        size = lfs.get("size", entry.get("size", 0))
        return _make_file(path, size, str(lfs.get("oid", "")), str(entry.get("oid", "")))

    def file_url(self, commit: str, path: str) -> str:
        return f"{self.endpoint}/{self.repo}/resolve/{commit}/{quote(path)}"

    def search(self, words: str, count: int) -> list[SearchHit]:
        query = {"search": words, "filter": "gguf", "sort": "downloads", "direction": -1, "limit": count}
        answer, _ = self.get_json(f"{self.endpoint}/api/models?{urlencode(query)}")
        return _make_hits(answer)


class ModelScope(Hub):
    """ModelScope (MODELSCOPE_ENDPOINT for its other addresses)."""

    kind, title, token_variable = "ms", "ModelScope", "MODELSCOPE_API_TOKEN"
    default_endpoint, pages = "https://www.modelscope.cn", "models/"

    def list_files(self, revision: str) -> Listing:
        revision = revision or "master"
        query = urlencode({"Revision": revision, "Recursive": "true"})
        answer, _ = self.get_json(f"{self.endpoint}/api/v1/models/{self.repo}/repo/files?{query}")
        data = _as_mapping(answer).get("Data")
        if not isinstance(data, dict):
            reason = _as_mapping(answer).get("Message") or "no files in the answer"
            raise HubError(f"ms:{self.repo} cannot be listed: {make_visible(str(reason)[:200])}")
        entries = [entry for entry in _entries(data.get("Files")) if entry.get("Type") != "tree"]
        return Listing(revision, tuple(map(self._parse, entries)))

    def _parse(self, entry: Mapping[str, Any]) -> HubFile:
        path = self._check_path(str(entry.get("Path", "")))
        return _make_file(path, entry.get("Size", 0), str(entry.get("Sha256") or ""))

    def file_url(self, commit: str, path: str) -> str:
        query = urlencode({"Revision": commit, "FilePath": path})
        return f"{self.endpoint}/api/v1/models/{self.repo}/repo?{query}"

    def search(self, words: str, count: int) -> list[SearchHit]:
        query = {"search": words, "filter.library": "gguf", "sort": "downloads", "page_size": min(count, 50)}
        answer, _ = self.get_json(f"{self.endpoint}/openapi/v1/models?{urlencode(query)}")
        data = _as_mapping(_as_mapping(answer).get("data"))
        return _make_hits(data.get("models"))


@cache
def _certificates() -> ssl.SSLContext:
    """Read the certificates once: it takes longer than a request."""
    return httpx.create_ssl_context()


def make_hub(reference: HubReference) -> Hub:
    """Make the hub of a reference. A token is not sent to an address that came with a pasted URL."""
    if reference.hub == "ms":
        endpoint = os.environ.get("MODELSCOPE_ENDPOINT") or ModelScope.default_endpoint
        return ModelScope(reference.repo, endpoint, os.environ.get("MODELSCOPE_API_TOKEN", ""))
    endpoint = reference.endpoint or os.environ.get("HF_ENDPOINT") or HuggingFace.default_endpoint
    return HuggingFace(reference.repo, endpoint, "" if reference.endpoint else _hf_token())


def _hf_token() -> str:
    """Read the token from HF_TOKEN, or from the file that `hf auth login` writes."""
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := os.environ.get(variable, "").strip():
            return token
    with suppress(OSError, UnicodeDecodeError):
        path = os.environ.get("HF_TOKEN_PATH")
        return (Path(path).expanduser() if path else hf_home() / "token").read_text().strip()
    return ""


def _make_file(path: str, size: object, sha256: str, git_oid: str = "") -> HubFile:
    sha256 = sha256.lower().removeprefix("sha256:")
    return HubFile(
        path,
        size if isinstance(size, int) and 0 <= size <= MAX_FILE else 0,
        sha256 if _SHA256.fullmatch(sha256) else "",
        git_oid if not sha256 and _SHA1.fullmatch(git_oid) else "",
    )


def _make_hits(answer: object) -> list[SearchHit]:
    """Take the hits of an answer whose names are valid."""
    hits = []
    for entry in _entries(answer):
        repo, numbers = str(entry.get("id") or entry.get("modelId")), map(entry.get, ("downloads", "likes"))
        if is_repo(repo):
            hits.append(SearchHit(repo, *(number if isinstance(number, int) else 0 for number in numbers)))
    return hits


def _as_mapping(value: object) -> Mapping[str, Any]:
    """Return the object that a hub sent; an empty one where it is none."""
    return value if isinstance(value, dict) else {}


def _entries(answer: object) -> list[Mapping[str, Any]]:
    return [entry for entry in answer if isinstance(entry, dict)] if isinstance(answer, list) else []


def _origin(url: str) -> tuple[str, str | None, int | None]:
    address = urlsplit(url)
    return address.scheme, address.hostname, address.port or {"http": 80, "https": 443}.get(address.scheme)


def _host(url: str) -> str:
    return urlsplit(url).hostname or url


def _retry_after(response: httpx.Response) -> float:
    """Read the seconds that the hub asks to wait; a date, which is rare, counts as a few."""
    text = response.headers.get("Retry-After", "")
    return float(text) if re.fullmatch(r"\d{1,6}(\.\d+)?", text) else (5.0 if text else 0.0)


def _find_cause(error: BaseException | None) -> BaseException | None:
    """Find the cause of an error that another attempt at once would meet, too."""
    lasting = socket.gaierror, ssl.SSLError, ConnectionRefusedError
    while error is not None and not isinstance(error, lasting):
        error = error.__cause__ or error.__context__
    return error


def describe_transport(error: httpx.HTTPError, hub: Hub) -> str:
    """Describe a connection that failed in one line, with what to do."""
    host = hub.host
    with suppress(RuntimeError):  # the error has no request
        host = error.request.url.host
    mirror = "HF_ENDPOINT names a mirror" if hub.kind == "hf" else "MODELSCOPE_ENDPOINT names another address"
    cause = _find_cause(error)
    if isinstance(cause, socket.gaierror):
        return f"{host} cannot be found (DNS): is this machine online? {mirror}"
    if isinstance(cause, ssl.SSLError):
        reason = getattr(cause, "verify_message", "") or cause.reason
        hint = "behind a proxy that reads traffic, SSL_CERT_FILE names its certificate"
        return f"{host}: no secure connection ({reason}); {hint}"
    if cause is not None:
        return f"{host} refuses connections: is the address right? {mirror}"
    if isinstance(error, httpx.TimeoutException):
        return f"{host} did not answer in time; {mirror}"
    if isinstance(error, httpx.ProxyError):
        return f"the proxy cannot reach {host}: {error}"
    return f"the connection to {host} broke ({str(error) or type(error).__name__})"
