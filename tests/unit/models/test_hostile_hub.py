"""A hostile hub: answers without end, bombs, escapes, links and redirects that lead elsewhere."""

from __future__ import annotations

import gzip
import io
import json
import logging
import tracemalloc
from pathlib import Path

import pytest

from cllm.errors import HubError, ModelFileError
from cllm.models import hub as module
from cllm.models import store
from cllm.models.files import HubReference
from cllm.models.hub import make_hub
from cllm.models.pull import Pull, PullOptions, find_model
from cllm.process import VisibleFormatter
from tests.driver.hub import COMMIT, FakeHub
from tests.unit.models.conftest import REPO

Changed = tuple[int, dict[str, str], bytes]
HF, MS = HubReference("hf", REPO), HubReference("ms", REPO)
REFERENCES = pytest.mark.parametrize("reference", [HF, MS], ids=["hf", "ms"])
BOMB = gzip.compress(b"[" + b"{}," * (1 << 24) + b"{}]")
CONTROL = "\x1b]0;owned\x07\x1b[2J\x9b31m"


def list_files(reference: HubReference) -> int:
    with make_hub(reference) as opened:
        return len(opened.list_files("").files)


@REFERENCES
@pytest.mark.parametrize(
    ("headers", "body", "words"),
    [
        ({"Content-Encoding": "gzip"}, BOMB, "compresses its answer, which was not asked for"),
        ({"Content-Encoding": "deflate, gzip"}, BOMB, "compresses its answer"),
        ({}, b"[" + b"{}," * (1 << 23) + b"{}]", "more than 2 MiB"),
        ({}, b"[" * 100_000, "no JSON"),
        ({"X-Long": "a" * (1 << 20)}, b"[]", "the connection to 127.0.0.1 broke"),
    ],
    ids=["bomb", "two bombs", "long", "deep", "headers"],
)
def test_an_answer_is_bounded_before_it_is_decoded(
    hub: FakeHub,
    reference: HubReference,
    headers: dict[str, str],
    body: bytes,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LIST_BACKOFF_S", 0.0)
    hub.mutate = lambda path, status, sent, _: (
        200,
        {**sent, "Content-Length": str(len(body)), **headers},
        body,
    )
    tracemalloc.start()
    try:
        with pytest.raises(HubError, match=words):
            list_files(reference)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_the_body_of_a_redirect_is_not_read(hub: FakeHub) -> None:
    """httpx would read it whole, and unzip it."""
    redirects = {"Location": "/elsewhere", "Content-Encoding": "gzip", "Content-Length": str(len(BOMB))}
    hub.mutate = lambda path, status, sent, body: (302, redirects.copy(), BOMB)
    tracemalloc.start()
    try:
        with pytest.raises(HubError, match="redirects in a circle"):
            list_files(HF)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://\\[x"])
def test_a_redirect_leads_to_http_alone(hub: FakeHub, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIST_BACKOFF_S", 0.0)
    hub.mutate = lambda path, status, sent, body: (302, {"Location": target, "Content-Length": "0"}, b"")
    with pytest.raises(HubError):
        list_files(HF)


def test_pages_are_of_the_same_address_wherever_they_link_to(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mirror passes the hub's links on, also with answers that have one page. None gets the token."""
    expected, hub.page_size = list_files(HF), 1
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    def lead_away(path: str, status: int, sent: dict[str, str], body: bytes) -> Changed:
        link = sent.get("Link", f'<{hub.url}/x>; rel="next"' if "/tree/" not in path else "")
        return status, {**sent, "Link": link.replace(hub.url, hub.files_url)}, body

    hub.mutate = lead_away
    assert list_files(HF) == expected > 1
    assert {request.host for request in hub.requests} == {"hub"}


def test_a_listing_has_a_limit_of_files(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LISTED", 3)
    with pytest.raises(HubError, match="lists more than 3 files"):
        list_files(HF)


def test_a_file_without_end_is_cut_at_its_size(hub: FakeHub, caches: Path) -> None:
    """More bytes than the range has, as if they belonged to it."""

    def go_on(path: str, status: int, sent: dict[str, str], body: bytes) -> Changed:
        if path.startswith("/signed/"):
            body += bytes(64 << 20)
            sent = {**sent, "Content-Length": str(len(body))}
        return status, sent, body

    hub.mutate = go_on
    with make_hub(HF) as opened:
        model = find_model(opened, HF)
        path = Pull(opened, HF, model, PullOptions(connections=1)).run()
    assert path.read_bytes() == hub.repos[REPO][model.files[0].path]


def test_no_message_of_a_hub_controls_the_terminal(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"Message": CONTROL}).encode()
    hub.mutate = lambda path, status, sent, body: (200, {**sent, "Content-Length": str(len(answer))}, answer)
    with pytest.raises(HubError) as refused:
        list_files(MS)
    assert refused.value.message.isprintable() and "owned" in refused.value.message


def test_no_name_in_a_log_line_controls_the_terminal() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(VisibleFormatter("%(message)s"))
    handler.handle(logging.LogRecord("a", logging.INFO, "b", 1, "%s is here", (CONTROL,), None))
    assert stream.getvalue().removesuffix("\n").isprintable()


@pytest.mark.parametrize("part", ["snapshot", "blobs", "file"])
def test_a_link_out_of_the_cache_is_not_followed_when_deleting(caches: Path, part: str) -> None:
    outside = caches / "outside"
    outside.mkdir()
    (outside / "mine-Q4_0.gguf").write_bytes(b"GGUF of the user's own")
    repository = store.hf_cache() / "models--a--b"
    snapshot = repository / "snapshots" / COMMIT
    if part == "snapshot":
        snapshot.parent.mkdir(parents=True)
        snapshot.symlink_to(outside)
    elif part == "blobs":
        snapshot.mkdir(parents=True)
        (repository / "blobs").symlink_to(outside)
        (snapshot / "mine-Q4_0.gguf").symlink_to("../../blobs/mine-Q4_0.gguf")
    else:
        snapshot.mkdir(parents=True)
        (snapshot / "mine-Q4_0.gguf").symlink_to(outside / "mine-Q4_0.gguf")
    (model,) = [each for each in store.scan() if each.source == "hf"]
    if part == "snapshot":
        with pytest.raises(ModelFileError, match="remove them where they are"):
            store.plan_removal(model)
    else:
        store.remove(model, store.plan_removal(model))
        assert not (snapshot / "mine-Q4_0.gguf").is_symlink(), "the link itself is the cache's"
    assert (outside / "mine-Q4_0.gguf").read_bytes() == b"GGUF of the user's own"
    folder = caches / "ms" / "models" / "a"
    folder.mkdir(parents=True)
    (folder / "b").symlink_to(outside)
    (model,) = [each for each in store.scan() if each.source == "ms"]
    with pytest.raises(ModelFileError, match="remove them where they are"):
        store.plan_removal(model)
