"""The files of the page: those that were vendored are what they say, all of them are small and found."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import re
from typing import Any

import httpx

from cllm.config import EngineConfig, ServerConfig
from cllm.frontend.engine_client import EngineClient
from cllm.limits import MAX_PICTURE_BYTES, MAX_PICTURES, MAX_PIXELS
from cllm.server.app import FOLDER, POLICY, create_app, list_files, read_file
from tests.driver.fake_runner import FakeRunner
from tests.driver.thread_engine import ThreadExecutor

MANIFEST: dict[str, Any] = json.loads((FOLDER / "vendor" / "manifest.json").read_text())
PACKAGES = {"marked", "dompurify", "uplot", "@highlightjs/cdn-assets", "katex"}
SCRIPTS = sorted(FOLDER.glob("*.js"))
LATER = re.compile(r"vendor/(highlight|katex|fonts)")  # loaded when an answer has code or formulas
MAX_FIRST_LOAD = 120 << 10
HTML = {"Accept": "text/html,*/*;q=0.8"}  # as browsers say


def get(path: str, api_key: str = "", **headers: str) -> httpx.Response:
    engine = EngineClient(ThreadExecutor(lambda _: FakeRunner(), EngineConfig()))
    app = create_app(engine, ServerConfig(api_key=api_key))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


def test_vendored_files_match_their_recorded_hashes() -> None:
    listed = {file: entry for entry in MANIFEST["packages"] for file in entry["files"]}
    folder = FOLDER / "vendor"
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")} - {"manifest.json"}
    assert listed.keys() == there
    for file, entry in listed.items():
        content = (FOLDER / "vendor" / file).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["files"][file], file
    assert {entry["name"] for entry in MANIFEST["packages"]} == PACKAGES
    assert all(entry["version"] and entry["license"] for entry in MANIFEST["packages"])


def test_the_first_load_is_small() -> None:
    """All files but those that the page loads when an answer needs them."""
    first = [read_file(path) for name, path in list_files().items() if not LATER.match(name)]
    assert len(first) > 20 and sum(len(file.compressed) for file in first) <= MAX_FIRST_LOAD
    assert "highlight" not in (index := (FOLDER / "index.html").read_text()) and "katex" not in index


def test_libraries_that_are_loaded_later_are_there_with_their_fonts() -> None:
    named = re.findall(r'"([\w.]+\.(?:js|css))"', (FOLDER / "markdown.js").read_text())
    styles = (FOLDER / "vendor" / "katex.min.css").read_text()
    named += set(re.findall(r"url\((fonts/\w[\w-]+\.woff2)\)", styles))
    assert len(named) > 20 and {f"vendor/{name}" for name in named} <= list_files().keys()


def test_every_file_that_is_named_is_there() -> None:
    index = (FOLDER / "index.html").read_text()
    named = re.findall(r'(?:src|href)="page/([^"]+)"', index)
    for script in SCRIPTS:
        named += re.findall(r'"\./([\w/]+\.js)"', script.read_text())
    assert len(named) > 20 and set(named) <= list_files().keys()


def test_the_page_asks_nothing_of_others_and_has_no_inline_code() -> None:
    index = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", index)
    for script in SCRIPTS:
        text = script.read_text()
        assert not re.search(r"\beval\(|new Function|innerHTML|insertAdjacentHTML|document\.write", text)
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)[\w.]", text), script.name
    assert "unsafe" not in POLICY and "http" not in POLICY and "default-src 'none'" in POLICY


def test_markdown_is_never_used_without_the_sanitizer() -> None:
    users = [script.name for script in SCRIPTS if "marked" in script.read_text()]
    assert users == ["markdown.js"]
    calls = re.findall(r"\w*\(?marked\.(?:parse|parser)\(", (FOLDER / "markdown.js").read_text())
    assert calls == ["sanitize(marked.parser("]


def test_both_languages_have_the_same_texts() -> None:
    tables = {}
    for name in ("en", "zh"):
        text = (FOLDER / "strings" / f"{name}.js").read_text()
        pairs = re.findall(r'\b(\w+): "((?:[^"\\]|\\.)*)"', text)
        assert len(pairs) == len(dict(pairs)), "a text is there twice"
        tables[name] = dict(pairs)
    assert tables["en"].keys() == tables["zh"].keys()
    for key, english in tables["en"].items():
        values = {name: sorted(re.findall(r"\{\w+\}", tables[name][key])) for name in tables}
        assert values["en"] == values["zh"], key
        assert english and tables["zh"][key]


def test_every_text_that_is_named_exists() -> None:
    table = (FOLDER / "strings" / "en.js").read_text()
    known = set(re.findall(r'\b(\w+): "', table))
    sources = [*(script.read_text() for script in SCRIPTS)]
    named = set(re.findall(r'\bt\("(\w+)"[,)]', "\n".join(sources)))
    named |= set(re.findall(r'data-(?:text|label|placeholder)="(\w+)"', (FOLDER / "index.html").read_text()))
    assert len(named) > 60 and named <= known, named - known


def test_the_page_has_the_server_s_limits_of_pictures() -> None:
    text = (FOLDER / "pictures.js").read_text()
    found = re.findall(r"MAX_\w+ = (\d+)(?: << (\d+))?", text)
    assert [int(value) << int(shift or 0) for value, shift in found] == [
        MAX_PICTURES,
        MAX_PICTURE_BYTES,
        MAX_PIXELS,
    ]


def test_a_file_is_compressed_and_asked_for_again_only_when_it_has_changed() -> None:
    whole = get("/", **HTML, **{"Accept-Encoding": "identity"})
    assert whole.status_code == 200 and whole.headers["content-type"] == "text/html; charset=utf-8"
    assert whole.headers["content-security-policy"] == POLICY
    assert (
        whole.headers["cache-control"] == "no-cache" and whole.headers["x-content-type-options"] == "nosniff"
    )
    packed = get("/page/style.css", **{"Accept-Encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip" and "Accept-Encoding" in packed.headers["vary"]
    assert packed.content == (FOLDER / "style.css").read_bytes()
    assert int(packed.headers["content-length"]) == len(gzip.compress(packed.content, 9, mtime=0))
    again = get("/", **HTML, **{"If-None-Match": whole.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    assert get("/", **HTML, **{"If-None-Match": '"other"'}).status_code == 200
