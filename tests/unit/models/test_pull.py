"""Pulls as a whole: what is fetched, where it goes, and what is refused before the first byte."""

from __future__ import annotations

import shutil
import threading
from collections import namedtuple
from pathlib import Path
from urllib.parse import quote

import pytest

from cllm.backend.llama.gguf import GgufHeader
from cllm.build.toolchain import locked
from cllm.errors import ConfigError, HubError, ModelFileError, NotEnoughMemory
from cllm.models import pull as module
from cllm.models.download import Download
from cllm.models.files import HubReference, parse_hub
from cllm.models.hub import make_hub
from cllm.models.pull import Pull, PullOptions, ensure, find_model
from cllm.models.store import HfRepository, find_parts, find_stored, hf_cache
from tests.driver.hub import COMMIT, TOKEN, FakeHub
from tests.unit.models.conftest import BIG_BYTES, REPO, SPLIT_REPO

TINY = HubReference("hf", REPO)
SPLIT = HubReference("hf", SPLIT_REPO)
BIG = HubReference("hf", "Example/Big")
Usage = namedtuple("Usage", "total used free")


def pull(reference: HubReference, folder: Path | None = None, **options: object) -> Path:
    with make_hub(reference) as hub:
        model = find_model(hub, reference)
        return Pull(hub, reference, model, PullOptions(folder)).run(**options)  # type: ignore[arg-type]


def test_the_usual_quantisation_is_pulled_and_named(hub: FakeHub, caches: Path) -> None:
    path = pull(TINY)
    assert path == hf_cache() / "models--Example--Tiny-Llama-GGUF" / "snapshots" / COMMIT / path.name
    assert path.name == "tiny-llama-Q4_K_M.gguf"
    assert path.read_bytes() == hub.repos[REPO][path.name]
    assert (hf_cache() / "models--Example--Tiny-Llama-GGUF" / "refs" / "main").read_text() == COMMIT


def test_what_is_here_is_not_fetched_again(hub: FakeHub) -> None:
    path, sent = ensure(TINY), hub.sent
    assert ensure(TINY) == path and pull(TINY) == path and hub.sent == sent
    asked = len(hub.requests)
    ensure(TINY)
    assert len(hub.requests) == asked  # not even listed


def test_a_split_model_is_one(hub: FakeHub) -> None:
    path = pull(SPLIT)
    assert path.name == "split-F32-00001-of-00003.gguf" and len(GgufHeader(path).parts) == 3
    assert {file.name for file in path.parent.iterdir()} == {name[4:] for name in hub.repos[SPLIT_REPO]}


def test_the_mmproj_beside_a_model_comes_along(hub: FakeHub) -> None:
    content = hub.repos[REPO]["tiny-llama-Q4_K_M.gguf"]
    hub.repos[REPO] |= {f"mmproj-{kind}.gguf": content + kind.encode() for kind in ("BF16", "F16", "F32")}
    hub.repos[REPO]["other/mmproj-F16.gguf"] = content
    path = pull(TINY)
    assert {file.name for file in path.parent.iterdir()} == {path.name, "mmproj-F16.gguf"}


def test_offline_pulls_nothing(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ModelFileError, match="hf:Example/Tiny-Llama-GGUF is not on this machine, and --offline"
    ):
        ensure(TINY, offline=True)
    assert hub.requests == []
    path = ensure(TINY)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert ensure(TINY._replace(quant="Q4_K_M")) == path
    with pytest.raises(ModelFileError, match="is not on this machine"):
        ensure(TINY._replace(quant="Q8_0"))


def test_modelscope_and_a_folder(hub: FakeHub, caches: Path) -> None:
    path = pull(HubReference("ms", REPO, "Q8_0"))
    assert path == caches / "ms" / "models" / "Example" / "Tiny-Llama-GGUF" / "tiny-llama-Q8_0.gguf"
    folder = caches / "größe 模型"
    copy = pull(SPLIT, folder)
    assert copy == folder / "split-F32-00001-of-00003.gguf"
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        name[4:] for name in hub.repos[SPLIT_REPO]
    )


def test_names_with_spaces_and_other_letters(hub: FakeHub) -> None:
    path = pull(HubReference("hf", "李雷/模型-GGUF"))
    assert path.name == "größe 模型 Q4_0.gguf" and path.stat().st_size > 0
    assert pull(HubReference("ms", "李雷/模型-GGUF", "Q4_0")).name == path.name


def test_a_changed_file_in_a_folder_is_noticed(hub: FakeHub, caches: Path) -> None:
    path = pull(TINY, caches / "to")
    path.write_bytes(bytes(path.stat().st_size))
    assert pull(TINY, caches / "to").read_bytes() == hub.repos[REPO][path.name]


def test_the_header_is_checked_before_the_rest_is_fetched(hub: FakeHub) -> None:
    def refuse(head: Path) -> None:
        seen.append(GgufHeader(head))
        raise NotEnoughMemory("too large")

    seen: list[GgufHeader] = []
    with pytest.raises(NotEnoughMemory):
        pull(SPLIT, check=refuse)
    assert seen[0].architecture == "llama"
    assert seen[0].file_bytes == sum(map(len, hub.repos[SPLIT_REPO].values()))
    assert find_parts(SPLIT).paths == ()


def test_the_header_that_was_read_is_not_fetched_again(hub: FakeHub) -> None:
    pull(SPLIT, check=GgufHeader)
    assert hub.sent == sum(map(len, hub.repos[SPLIT_REPO].values()))


def test_a_file_that_changes_on_the_hub_meanwhile(hub: FakeHub) -> None:
    hub.faults["416"] = 1
    with pytest.raises(HubError, match="has changed"):
        pull(BIG)
    data = hub.repos[BIG.repo]["big-Q8_0.gguf"] = bytes(BIG_BYTES)
    assert pull(BIG).read_bytes() == data


def test_a_file_that_is_no_gguf_is_refused_by_its_beginning(hub: FakeHub) -> None:
    with pytest.raises(ModelFileError, match="is not a GGUF file"):
        pull(BIG, check=lambda head: None)


def test_a_header_that_is_longer_than_the_first_read(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_HEAD", 64)
    heads: list[str] = []
    pull(TINY, check=lambda head: heads.append(GgufHeader(head).architecture))
    assert heads == ["llama"]


def test_a_server_without_ranges_cannot_be_checked(hub: FakeHub) -> None:
    hub.faults["whole"] = 1000
    heads: list[Path] = []
    hub.repos[REPO]["tiny-llama-Q4_K_M.gguf"] += bytes(BIG_BYTES)
    path = pull(TINY, check=heads.append)
    assert path.stat().st_size > BIG_BYTES and heads == []


def test_a_full_disk_is_noticed_before_the_first_byte(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 0, 1_000_000))
    with pytest.raises(HubError, match=r"too full: 3.0 MB are to be fetched, 1.0 MB are free; --to DIR"):
        pull(BIG)
    assert hub.sent == 0


def test_a_disk_that_fills_up_keeps_what_is_here(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Download._write
    calls = iter(range(1000))

    def write(*arguments: object) -> None:
        if next(calls) == 20:
            raise OSError(28, "No space left on device")
        real(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Download, "_write", write)
        with pytest.raises(HubError, match=r"is full: .* are missing"):
            pull(BIG)
    assert len(find_parts(BIG).paths) == 2
    before = hub.sent
    pull(BIG)
    assert hub.sent - before < BIG_BYTES and find_parts(BIG).paths == ()


def test_a_folder_that_cannot_be_written(hub: FakeHub, caches: Path) -> None:
    (caches / "to").write_text("a file")
    with pytest.raises(HubError, match="to"):
        pull(TINY, caches / "to")


def test_two_pulls_at_once_fetch_once(hub: FakeHub) -> None:
    hub.bytes_per_s = 20e6
    threads = [threading.Thread(target=pull, args=(BIG,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert hub.sent == BIG_BYTES


def test_the_token_does_not_leave_the_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges after the first go to the other host without asking the hub."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.gated = {BIG.repo}
    pull(BIG)
    assert {(asked.host, asked.token) for asked in hub.requests} == {("hub", TOKEN), ("files", "")}


def test_a_mirror_of_its_own_address_gets_no_token(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{hub.url}/{REPO}/blob/main/tiny-llama-Q8_0.gguf"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    reference = parse_hub(url)
    assert reference is not None and pull(reference).name == "tiny-llama-Q8_0.gguf"
    assert {asked.token for asked in hub.requests} == {""}


def test_a_lock_file_that_was_removed_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with locked(path, list):
        path.unlink()
        with locked(path, list):
            assert path.exists()


def test_a_split_model_with_a_missing_part(hub: FakeHub) -> None:
    del hub.repos[SPLIT_REPO]["F32/split-F32-00002-of-00003.gguf"]
    with pytest.raises(ModelFileError, match="has 2 of 3 parts of split-F32"):
        pull(SPLIT)


def test_a_listing_without_hashes_is_not_trusted(hub: FakeHub) -> None:
    hub.extra = [{"type": "file", "path": "z-Q6_K.gguf", "size": 1}]
    with pytest.raises(HubError, match="has no hash in the listing"):
        pull(TINY._replace(quant="Q6_K"))


@pytest.mark.parametrize("revision", ["../../../../victim", "{victim}", "a/../../../../../victim"])
def test_a_revision_becomes_no_path_out_of_the_cache(hub: FakeHub, caches: Path, revision: str) -> None:
    """It once became the path of a file that was overwritten with the commit."""
    victim = caches / "victim"
    victim.write_text("mine")
    revision = revision.format(victim=victim)
    pasted = f"{REPO}/resolve/{quote(revision, safe='')}/tiny-llama-Q8_0.gguf"
    address = f"{hub.environment['HF_ENDPOINT']}/{pasted}"
    for text in (f"hf:{REPO}@{revision}", address):
        with pytest.raises(ConfigError, match="branch, tag or commit"):
            parse_hub(text)
    with pytest.raises(ConfigError):  # nor where a reference came by another way
        HfRepository(REPO, COMMIT, revision).finish()
    assert victim.read_text() == "mine" and not find_stored(HubReference("hf", REPO, "", revision))
