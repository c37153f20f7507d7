"""Listings, tokens and errors of the two hubs, over real HTTP."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from cllm.errors import HubError
from cllm.models import hub as module
from cllm.models.files import HubReference
from cllm.models.hub import make_hub
from tests.driver.hub import COMMIT, TOKEN, FakeHub
from tests.unit.models.conftest import REPO

GATED = HubReference("hf", REPO)


def list_paths(reference: HubReference) -> list[str]:
    with make_hub(reference) as opened:
        return [file.path for file in opened.list_files(reference.revision).files]


def read(reference: HubReference, path: str) -> bytes:
    with make_hub(reference) as opened:
        url = opened.file_url(COMMIT, path)
        with opened.stream(url, {}, 5.0) as response:
            opened.check(response, path)
            return response.read()


@pytest.mark.parametrize("kind", ["hf", "ms"])
def test_a_listing_has_sizes_and_hashes(hub: FakeHub, kind: str) -> None:
    with make_hub(HubReference(kind, REPO)) as opened:
        files = {file.path: file for file in opened.list_files("").files}
    data = hub.repos[REPO]["tiny-llama-Q8_0.gguf"]
    found = files["tiny-llama-Q8_0.gguf"]
    assert set(files) == set(hub.repos[REPO])
    assert (found.size, found.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert read(HubReference(kind, REPO), found.path) == data


def test_a_listing_of_several_pages(hub: FakeHub) -> None:
    hub.page_size = 1
    assert list_paths(HubReference("hf", REPO)) == list(hub.repos[REPO])


def test_a_file_of_git_has_its_oid(hub: FakeHub) -> None:
    hub.in_git = {"README.md"}
    with make_hub(HubReference("hf", REPO)) as opened:
        found = next(file for file in opened.list_files("").files if file.path == "README.md")
    assert found.sha256 == "" and found.etag == hashlib.sha1(b"blob 6\0# Tiny").hexdigest()


def test_the_token_of_the_hugging_face_home(hub: FakeHub, caches: Path) -> None:
    (caches / "hf").mkdir()
    (caches / "hf" / "token").write_text(TOKEN + "\n")
    hub.gated = {REPO}
    assert "README.md" in list_paths(GATED)


@pytest.mark.parametrize("token", ["", "hf_wrong"])
def test_a_gated_repository_says_how_to_get_in(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    hub.gated = {REPO}
    with pytest.raises(HubError) as caught:
        list_paths(GATED)
    text = str(caught.value)
    assert f"https://huggingface.co/{REPO}" in text and "HF_TOKEN" in text
    assert ("no token was sent" in text) == (not token) and "hf_wrong" not in text


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        (
            HubReference("hf", "No/Body"),
            "hf:No/Body is not on 127.0.0.1, or it is private: check the spelling",
        ),
        (HubReference("ms", "No/Body"), "ms:No/Body is not on 127.0.0.1"),
        (HubReference("hf", REPO, "", "v9"), "has no such revision"),
    ],
)
def test_what_is_not_there(hub: FakeHub, reference: HubReference, words: str) -> None:
    with pytest.raises(HubError, match=words):
        list_paths(reference)


@pytest.mark.parametrize("fault", ["list-429", "list-500"])
def test_a_busy_hub_is_asked_again(hub: FakeHub, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIST_BACKOFF_S", 0.01)
    hub.faults[fault] = 2
    assert "README.md" in list_paths(GATED)
    hub.faults[fault] = 100
    words = "limits how often" if fault == "list-429" else "answers 500"
    with pytest.raises(HubError, match=words):
        list_paths(GATED)


@pytest.mark.parametrize(
    ("fault", "words"), [("loop", "redirects in a circle"), ("list-html", "does not answer as Hugging Face")]
)
def test_a_hub_that_is_none(hub: FakeHub, fault: str, words: str) -> None:
    hub.faults[fault] = 100
    with pytest.raises(HubError, match=words):
        list_paths(GATED)


@pytest.mark.parametrize(
    "path",
    [
        *("../x.gguf", "/etc/x.gguf", "a/../../x.gguf", "a\\..\\x.gguf"),
        *("", "\ud800.gguf", "a\x1b[2J.gguf", "./a.gguf"),
    ],
)
def test_a_listing_with_an_invalid_path_is_refused(hub: FakeHub, path: str) -> None:
    hub.extra = [{"type": "file", "path": path, "size": 1, "oid": "0" * 40}]
    with pytest.raises(HubError, match=r"no valid path|no JSON"):
        list_paths(GATED)


@pytest.mark.parametrize("kind", ["hf", "ms"])
@pytest.mark.parametrize(
    "answer",
    [
        b"[" * 2000,
        b'{"data": []}',
        b'[{"type": "file", "path": "x", "lfs": [1]}]',
        b'"x"',
        b'{"Data": {"Files": 5}}',
    ],
)
def test_a_listing_of_another_shape_is_a_hub_error(kind: str, answer: bytes) -> None:
    """Or an empty one: no other exception comes of what a hub says."""
    answers = iter([b'{"sha": "%b"}' % COMMIT.encode()] * (kind == "hf") + [answer] * 9)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=httpx.ByteStream(next(answers))))
    for lists in (True, False):
        with make_hub(HubReference(kind, REPO)) as opened, suppress(HubError):
            opened._client = httpx.Client(transport=transport)
            assert opened.list_files("") if lists else not opened.search("words", 3)


@pytest.mark.parametrize("oid", ["../../evil", "Z" * 64, "0" * 63])
def test_a_hash_that_is_none_names_no_blob(hub: FakeHub, oid: str) -> None:
    hub.extra = [{"type": "file", "path": "x.gguf", "size": 1, "lfs": {"oid": oid, "size": 1}}]
    with make_hub(GATED) as opened:
        assert opened.list_files("").files[-1].etag == ""


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("http://127.0.0.1:9", "refuses connections: is the address right"),
        ("http://no-such-host.invalid", "cannot be found \\(DNS\\): is this machine online"),
        ("ftp://127.0.0.1", "is the hub's address right"),
        ("https://HUB", "no secure connection"),
    ],
)
def test_a_hub_out_of_reach_is_one_line_at_once(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, endpoint: str, words: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint.replace("HUB", hub.url.removeprefix("http://")))
    with pytest.raises(HubError, match=words):
        list_paths(GATED)
