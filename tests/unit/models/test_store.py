"""The caches of the hubs: what is written is found by their programs, and the reverse."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from cllm.errors import ModelFileError
from cllm.models import store
from cllm.models.files import HubFile, HubReference
from cllm.models.store import HfRepository, StoredModel, find_stored, hf_cache, ms_cache, plan_removal, remove
from tests.driver.hub import COMMIT

REPO = "User/Repo-GGUF"
OTHER = "d" * 40


def make_file(path: str, data: bytes) -> HubFile:
    return HubFile(path, len(data), hashlib.sha256(data).hexdigest())


def put(path: str, data: bytes, *, repo: str = REPO, commit: str = COMMIT, revision: str = "") -> Path:
    """Store a file in Hugging Face's cache as a pull does."""
    repository, file = HfRepository(repo, commit, revision), make_file(path, data)
    blob = repository.paths(file).final
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    pointer = repository.publish(file)
    repository.finish()
    return pointer


def get(text: str) -> StoredModel:
    hub, _, rest = text.partition(":")
    repo, _, quant = rest.partition(":")
    found = find_stored(HubReference(hub, repo, *quant.partition("@")[::2]))
    assert found is not None
    return found


def names() -> list[str]:
    return [model.name for model in store.scan() if model.source != "embedded"]


def test_folders_follow_the_variables_of_the_hubs(monkeypatch: pytest.MonkeyPatch, caches: Path) -> None:
    assert hf_cache() == caches / "hf" / "hub" and ms_cache() == caches / "ms"
    monkeypatch.setenv("HF_HUB_CACHE", "~/models")
    assert hf_cache() == Path.home() / "models"
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert store.hf_home() == Path("/xdg/huggingface")


def test_huggingface_hub_finds_what_was_stored(caches: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    pointer = put("sub/m-Q8_0.gguf", b"data")
    found = hub.try_to_load_from_cache(REPO, "sub/m-Q8_0.gguf", cache_dir=hf_cache())
    assert found == str(pointer) and pointer.is_symlink() and pointer.read_bytes() == b"data"
    local = hub.hf_hub_download(REPO, "sub/m-Q8_0.gguf", cache_dir=hf_cache(), local_files_only=True)
    assert local == str(pointer)
    (repo,) = hub.scan_cache_dir(hf_cache()).repos
    assert repo.repo_id == REPO and repo.size_on_disk == 4
    assert {ref for revision in repo.revisions for ref in revision.refs} == {"main"}


def test_what_huggingface_hub_stores_is_found(caches: Path) -> None:
    folder = hf_cache() / "models--User--Repo-GGUF"
    for name in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (folder / name).mkdir(parents=True)
    (folder / "blobs" / "abc").write_bytes(b"data")
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / COMMIT / "m-Q4_0.gguf").symlink_to("../../blobs/abc")
    (folder / "snapshots" / COMMIT / "gone-Q4_1.gguf").symlink_to("../../blobs/not-there")
    assert names() == [f"hf:{REPO}:Q4_0"]
    assert get(f"hf:{REPO}:Q4_0").path.read_bytes() == b"data"


@pytest.mark.parametrize("how", ["variable", "file system"])
def test_without_links_there_are_plain_files(caches: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    if how == "variable":
        monkeypatch.setenv("HF_HUB_DISABLE_SYMLINKS", "1")
    else:
        monkeypatch.setattr(Path, "symlink_to", refuse)
    pointer = put("m-Q8_0.gguf", b"data")
    assert pointer.is_file() and not pointer.is_symlink() and pointer.read_bytes() == b"data"
    assert HfRepository(REPO, COMMIT).find(make_file("m-Q8_0.gguf", b"data")) == pointer
    removal = plan_removal(get(f"hf:{REPO}"))
    assert removal.freed == 4
    remove(get(f"hf:{REPO}"), removal)
    assert names() == []


def test_revisions(caches: Path) -> None:
    put("m-Q8_0.gguf", b"old", commit=OTHER, revision="v1")
    put("m-Q8_0.gguf", b"newer", commit=COMMIT)
    assert get(f"hf:{REPO}").path.read_bytes() == b"newer"
    assert get(f"hf:{REPO}:Q8_0@v1").path.read_bytes() == b"old"
    assert get(f"hf:{REPO}:Q8_0@{OTHER[:9]}").path.read_bytes() == b"old"
    assert find_stored(HubReference("hf", REPO, "", "v2")) is None
    assert names() == [f"hf:{REPO}:Q8_0", f"hf:{REPO}:Q8_0@{OTHER[:7]}"]


def test_models_of_one_quantisation_are_named_by_their_files(caches: Path) -> None:
    put("a-Q8_0.gguf", b"one")
    put("b-Q8_0.gguf", b"two")
    assert names() == [f"hf:{REPO}:a-Q8_0", f"hf:{REPO}:b-Q8_0"]
    assert get(f"hf:{REPO}:b-Q8_0").path.read_bytes() == b"two"


def test_a_split_model_needs_all_parts(caches: Path) -> None:
    put("m-Q8_0-00001-of-00002.gguf", b"one")
    assert names() == [] and find_stored(HubReference("hf", REPO)) is None
    put("m-Q8_0-00002-of-00002.gguf", b"three")
    model = get(f"hf:{REPO}")
    assert model.size == 8 and [path.name[11] for path in model.files] == ["1", "2"]
    assert model.path.name == "m-Q8_0-00001-of-00002.gguf"


@pytest.mark.parametrize("layout", ["models/User/Repo___v2", "User/Repo___v2"])
def test_modelscopes_cache(caches: Path, layout: str) -> None:
    folder = ms_cache() / layout
    folder.mkdir(parents=True)
    (folder / "m-Q4_0.gguf").write_bytes(b"data")
    assert names() == ["ms:User/Repo.v2:Q4_0"]
    assert get("ms:User/Repo.v2").path == folder / "m-Q4_0.gguf"


def test_folders_and_the_embedded_model(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = caches / "größe 模型 x"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a b-Q4_0.gguf").write_bytes(b"data")
    (folder / "mmproj-a.gguf").write_bytes(b"no model")
    monkeypatch.setenv("CLLM_MODEL_DIR", f"{folder}{os.pathsep}{caches / 'none'}")
    assert names() == ["a b-Q4_0"]
    assert store.scan_folder(folder, deep=False) == []
    (embedded,) = (model for model in store.scan() if model.source == "embedded")
    with pytest.raises(ModelFileError, match="pip uninstall"):
        plan_removal(embedded)


def test_a_model_in_two_snapshots_is_listed_once_and_removed_from_both(caches: Path) -> None:
    put("m-Q8_0.gguf", b"same", commit=OTHER, revision="v1")
    put("m-Q8_0.gguf", b"same")
    assert names() == [f"hf:{REPO}:Q8_0"]
    model = get(f"hf:{REPO}")
    removal = plan_removal(model)
    assert removal.freed == 4 and len(removal.paths) == 3
    remove(model, removal)
    assert names() == [] and not model.root.exists()


def test_what_another_model_uses_stays(caches: Path) -> None:
    put("m-Q8_0.gguf", b"one")
    put("copy-Q4_0.gguf", b"one")
    put("n-Q6_K.gguf", b"three")
    model = get(f"hf:{REPO}:n-Q6_K.gguf")
    remove(model, plan_removal(model))
    assert sorted(names()) == [f"hf:{REPO}:Q4_0", f"hf:{REPO}:Q8_0"]
    assert get(f"hf:{REPO}:Q4_0").path.read_bytes() == b"one"


def test_a_download_that_is_under_way_stays(caches: Path) -> None:
    put("m-Q8_0.gguf", b"one")
    model = get(f"hf:{REPO}")
    part = HfRepository(REPO).paths(make_file("n.gguf", b"two")).part
    part.write_bytes(b"tw")
    remove(model, plan_removal(model))
    assert names() == [] and part.exists()


def test_what_interrupted_pulls_have_left(caches: Path) -> None:
    for folder, name in (
        (HfRepository(REPO).folder / "blobs", "abc"),
        (store.ms_folder("User/Repo.v2"), ".m.gguf"),
    ):
        folder.mkdir(parents=True)
        (folder / f"{name}.cllm.incomplete").write_bytes(bytes(8192))
    assert store.find_incomplete() == {f"hf:{REPO}": (8192, 8192), "ms:User/Repo.v2": (8192, 8192)}
    assert store.find_parts(HubReference("ms", "User/Repo.v2")).freed == 8192


@pytest.fixture
def listed(caches: Path, tiny: dict[str, bytes]) -> Path:
    folder = caches / "models"
    folder.mkdir()
    (folder / "a-Q4_0.gguf").write_bytes(tiny["tiny-llama-Q4_K_M.gguf"])
    (folder / "broken-Q4_0.gguf").write_bytes(b"GGUF")
    return folder


def test_the_list_has_what_the_headers_say(listed: Path) -> None:
    found = {model.stem: header for model, header in store.list_models(str(listed))}
    header = found["a-Q4_0"]
    assert header is not None and header.architecture == "llama" and header.chat_template
    assert header.context == 4096
    assert found["broken-Q4_0"] is None


def test_headers_are_read_again_only_when_a_file_changes(
    listed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = store.list_models(str(listed))
    (listed / "broken-Q4_0.gguf").unlink()
    read: list[Path] = []
    real = store._read_header

    def read_header(path: Path, size: int, changed: int) -> store.HeaderInfo:
        read.append(path)
        return real(path, size, changed)

    monkeypatch.setattr(store, "_read_header", read_header)
    assert store.list_models(str(listed))[0] == before[0] and read == []
    os.utime(listed / "a-Q4_0.gguf", ns=(1, 1))
    store.list_models(str(listed))
    assert read == [listed / "a-Q4_0.gguf"]


def test_a_damaged_memory_is_made_again(listed: Path, caches: Path) -> None:
    store.list_models(str(listed))
    (caches / "cllm" / "models.json").write_text("{]")
    assert store.list_models(str(listed))[0][1] is not None
