"""What removing a model deletes, and what stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cllm.models.reference import HubReference
from cllm.models.removal import find_incomplete, find_parts, find_users, plan_removal, remove
from cllm.models.store import HfRepository, ms_folder
from tests.unit.models.test_store import OTHER, REPO, get, make_file, names, put


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
    part = HfRepository(REPO).place(make_file("n.gguf", b"two")).part
    part.write_bytes(b"tw")
    remove(model, plan_removal(model))
    assert names() == [] and part.exists()


def test_a_process_that_has_a_model_loaded_is_found(caches: Path) -> None:
    pointer = put("m-Q8_0.gguf", b"data" * 5000)
    code = "import mmap,sys; f=open(sys.argv[1],'rb'); m=mmap.mmap(f.fileno(),0,access=mmap.ACCESS_READ)"
    wait = "; f.close(); print('up', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code + wait, str(pointer)]
    assert find_users([pointer]) == {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        assert list(find_users([pointer])) == [process.pid]
        process.stdin.close()


def test_what_interrupted_pulls_have_left(caches: Path) -> None:
    for folder, name in (
        (HfRepository(REPO).folder / "blobs", "abc"),
        (ms_folder("User/Repo.v2"), ".m.gguf"),
    ):
        folder.mkdir(parents=True)
        (folder / f"{name}.cllm.incomplete").write_bytes(bytes(8192))
    assert find_incomplete() == {f"hf:{REPO}": (8192, 8192), "ms:User/Repo.v2": (8192, 8192)}
    assert find_parts(HubReference("ms", "User/Repo.v2")).freed == 8192
