"""Names from outside: git's and the hubs' rules, and no path out of its folder."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.errors import ConfigError
from cllm.names import is_file_path, is_name, is_repo, is_revision, path_below

LETTERS = st.text(st.sampled_from("ab./\\-_@{~^:?*[ \x01\x7f#") | st.characters(), max_size=12)


VALID: dict[Callable[[str], bool], tuple[str, ...]] = {
    is_revision: ("main", "v1.2", "refs/pr/1", "feature/x_y", "a" * 40, "@a", "a@b", "ü"),
    is_repo: ("U/R", "Qwen/Qwen3-0.6B-GGUF", "a_b/c.d", "1/2", "_a/b_"),
    is_file_path: ("a.gguf", "sub/a b.gguf", ".hidden", "a/ü.gguf", "a" * 255),
    is_name: ("a", "slot-1.bin", "A_b", "9" * 64),
}
INVALID: dict[Callable[[str], bool], tuple[str, ...]] = {
    is_revision: (
        *("", "/a", "a/", "../a", "a/../b", "/dev/zero", ".a", "a/.b", "a.lock", "a.lock/b", "@", "a@{0}"),
        *("-a", "a b", "a~", "a^", "a:b", "a?", "a*", "a[", "a\\b", "a\n", "a//b", "a.", "\ud800", "a" * 251),
    ),
    is_repo: (
        *("", "R", "a/b/c", "../x", "a/..", "a/.b", "a--b/c", "a/b.git", "a/-b", "a/b.", "a/b c", "а/b"),
    ),
    is_file_path: (
        *("", "/a", "../a", "a/../b", "a//b", "a/", "./a", "a\\b", "a\x00b"),
        *("a\x1b[2J", "\u202egpj.fug", "a" * 256),
    ),
    is_name: ("", ".", "..", "a/b", "a..b", "a.", "-a", "a b", "9" * 65, "a\n", "ü"),
}


@pytest.mark.parametrize("check", VALID)
def test_names_follow_the_rules_of_git_and_the_hubs(check: Callable[[str], bool]) -> None:
    assert [text for text in VALID[check] if not check(text)] == []
    assert [text for text in INVALID[check] if check(text)] == []


@given(LETTERS)
def test_a_revision_is_one_for_git(text: str) -> None:
    """Whatever is taken for a revision, `git check-ref-format` takes as a branch."""
    if is_revision(text):
        done = subprocess.run(["git", "check-ref-format", f"refs/heads/{text}"], check=False)
        assert done.returncode == 0


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../a", "/etc/passwd", "a/../../b", "link/x", "link/../x", "a\x00b"]
)
def test_no_name_becomes_a_path_out_of_its_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError):
        path_below(folder, name)


def test_a_link_out_of_the_folder_is_followed_only_where_it_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "blob").write_text("x")
    (folder / "model").symlink_to(tmp_path / "blob")
    assert path_below(folder, "model") == folder / "model"
    with pytest.raises(ConfigError):
        path_below(folder, "model", follow_links=True)
    (folder / "real").write_text("x")
    assert path_below(folder, "real", follow_links=True) == (folder / "real").resolve()


@given(LETTERS)
def test_every_path_of_a_name_lies_below(text: str) -> None:
    folder = Path("/folder/that/is/not/there")
    try:
        path = path_below(folder, text)
    except ConfigError:
        return
    assert folder in path.resolve().parents
