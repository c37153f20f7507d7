"""Static files of the page at `/`: read and compressed once, served with the strict content policy."""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from cllm import __version__
from cllm.errors import NotFound
from cllm.server.dialect import respond
from cllm.server.middleware import PAGE_FILES

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
# The page runs the scripts of its own folder and asks this server only.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}


class StaticFile:
    """A file as it is sent: plain and compressed, with its ETag."""

    def __init__(self, path: Path) -> None:
        self._plain = path.read_bytes()
        self._compressed = gzip.compress(self._plain, 9, mtime=0)
        self._headers = {
            "Content-Type": _TYPES[path.suffix],
            "ETag": f'"{hashlib.sha256(self._plain).hexdigest()[:24]}"',
            "Cache-Control": "no-cache",  # kept, and asked for again: 304 unless it has changed
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Vary": "Accept, Accept-Encoding",
        }

    @property
    def compressed_size(self) -> int:
        return len(self._compressed)

    def respond(self, http: Request) -> Response:
        known = [each.strip().removeprefix("W/") for each in http.headers.get("if-none-match", "").split(",")]
        if self._headers["ETag"] in known:
            return Response(status_code=304, headers=self._headers)
        if "gzip" in http.headers.get("accept-encoding", ""):
            return Response(self._compressed, headers={**self._headers, "Content-Encoding": "gzip"})
        return Response(self._plain, headers=self._headers)


@cache
def read_files() -> dict[str, StaticFile]:
    """Every file of the page, by its path in the folder."""
    return {
        str(path.relative_to(FOLDER)): StaticFile(path)
        for path in sorted(FOLDER.rglob("*"))
        if path.suffix in _TYPES
    }


async def root(http: Request) -> Response:
    """A browser gets the page, any other client a line: some look for Ollama this way."""
    if "text/html" in http.headers.get("accept", ""):
        return read_files()[INDEX].respond(http)
    return PlainTextResponse(f"cllm {__version__} is running", headers={"Vary": "Accept"})


async def docs(http: Request) -> Response:
    """The page, which shows its API tab."""
    return read_files()[INDEX].respond(http)


async def page_file(http: Request) -> Response:
    """A file of the page."""
    if (found := read_files().get(http.path_params["name"])) is None:
        return respond(http.scope, NotFound("the page has no such file"))
    return found.respond(http)


ROUTES = (
    Route("/", root, methods=["GET"]),
    Route("/docs", docs, methods=["GET"]),
    Route(PAGE_FILES + "{name:path}", page_file, methods=["GET"]),
)
