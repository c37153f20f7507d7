"""Names from outside (repositories, revisions, files of a listing, states), and the paths they become.

What is printed or logged passes `make_visible`. A name is checked where it is parsed, by the rules of git and
of the hubs. `path_below` is the only way from a name to a path: it asserts that the path lies below its
folder.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from cllm.errors import ConfigError

MAX_FILE_PATH = 1024  # characters of a path in a repository
MAX_SCHEME = 16  # characters of an address before its host
MAX_PART = 255  # bytes of one name in a folder: the limit of nearly every file system
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?")
_REPO_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_NOT_PRINTED = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# Control characters become visible signs; a line feed and a tab stay.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421} | dict.fromkeys((*range(0x80, 0xA0), *range(0xD800, 0xE000)), 0xFFFD)
_NOT_IN_REVISION = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//")
_MAX_REVISION = 250


def make_visible(text: str) -> str:
    """The text with every control character replaced: none of it is a command to a terminal or a log."""
    return text if text.isprintable() else text.translate(_VISIBLE)


def is_name(text: str) -> bool:
    """Return True for up to 64 letters, digits, '.', '-' and '_', which name a slot or a unit; no path."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def is_address(text: str) -> bool:
    """Return True for the address of a file elsewhere, as `https://…`."""
    return "://" in text[:MAX_SCHEME]


def is_repo(text: str) -> bool:
    """Return True for USER/REPO by the hubs' rules."""
    parts = text.split("/")
    return len(parts) == 2 and all(
        _REPO_PART.fullmatch(part) and "--" not in part and ".." not in part and not part.endswith(".git")
        for part in parts
    )


def is_revision(text: str) -> bool:
    """Return True for a branch, a tag or a commit by the rules of `git check-ref-format`."""
    if not 0 < len(text) <= _MAX_REVISION or text == "@" or text.startswith("-") or text.endswith("."):
        return False
    if _NOT_IN_REVISION.search(text) or _NOT_PRINTED.search(text):
        return False
    return all(part and not part.startswith(".") and not part.endswith(".lock") for part in text.split("/"))


def is_file_path(text: str) -> bool:
    """Return True for the path of a file in a repository, relative, below it, and printable."""
    if not 0 < len(text) <= MAX_FILE_PATH or "\\" in text or _NOT_PRINTED.search(text):
        return False
    return not any(part in ("", ".", "..") or len(part.encode()) > MAX_PART for part in text.split("/"))


def path_below(folder: Path, name: str, *, follow_links: bool = False) -> Path:
    """Return the path of `name` in `folder`. Raise ConfigError if it does not lie below it.

    Links on the way are resolved. The last part may be a link to a file elsewhere (a blob of a hub's cache)
    unless `follow_links` is set: then the result is what it leads to.
    """
    root, path = folder.resolve(), folder / name
    if PurePosixPath(name).name in ("", "..") or "\0" in name:
        raise ConfigError(f"{name!r:.80} names no file")
    found = path.resolve() if follow_links else path.parent.resolve() / path.name
    if root not in found.parents:
        raise ConfigError(f"{name!r:.80} leads out of its folder")
    return found if follow_links else path
