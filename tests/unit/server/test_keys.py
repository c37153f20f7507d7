"""Keys: only hashes are kept, every key is compared, a wrong file is told and changes nothing."""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cllm.errors import ConfigError
from cllm.server.keys import KeyRing, add_key, digest, read_keys, remove_key
from cllm.server.middleware import is_loopback
from cllm.types import TenantLimits


def test_a_new_key_is_found_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    old_mask = os.umask(0)
    try:
        user, boss = add_key(file, "alice", admin=False), add_key(file, "boss", admin=True)
    finally:
        os.umask(old_mask)
    assert file.stat().st_mode & 0o777 == 0o600
    assert user not in file.read_text() and user != boss
    ring = KeyRing(str(file), "")
    assert limits(ring.find(user)) == TenantLimits(name="alice")
    assert limits(ring.find(boss)) == TenantLimits(name="boss", role="admin")
    for wrong in ("", "x", user[:-1], user + " ", user.lower(), "sha256:" + digest(user).hex(), "\ud800"):
        assert ring.find(wrong) is None


def limits(found: TenantLimits | None) -> TenantLimits:
    """What was found, without its hash."""
    assert found is not None
    return TenantLimits(**{name: getattr(found, name) for name in TenantLimits.__struct_fields__})


def test_limits_are_read(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    key = add_key(file, "alice", admin=False)
    lines = "weight = 2.5\nrequests_per_s = 3\ntokens_per_s = 1e3\nconcurrent = 4\nmax_priority = 0\n"
    file.write_text(file.read_text().rstrip() + "\n" + lines)
    assert limits(KeyRing(str(file), "").find(key)) == TenantLimits(
        name="alice", weight=2.5, requests_per_s=3, tokens_per_s=1000, concurrent=4, max_priority=0
    )


def test_every_key_is_compared_whichever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No early end, and only by the comparison that takes the same time for all."""
    file = tmp_path / "keys.toml"
    keys = [add_key(file, f"user{number}", admin=False) for number in range(5)]
    ring, compared = KeyRing(str(file), ""), 0

    def counting(one: Any, other: Any) -> bool:
        nonlocal compared
        compared += 1
        return bool(real(one, other))

    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", counting)
    for key in (keys[0], keys[4], "wrong"):
        compared = 0
        ring.find(key)
        assert compared == 5


HASH = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[alice",
        "[alice]\n",
        '[alice]\nhash = "plain"\n',
        f'[alice]\nhash = "{HASH}"\nrole = "wizard"\n',
        f'[alice]\nhash = "{HASH}"\nweight = 0\n',
        f'[alice]\nhash = "{HASH}"\nrequests_per_s = inf\n',
        f'[alice]\nhash = "{HASH}"\nweight = nan\n',
        f'[alice]\nhash = "{HASH}"\nwibble = 1\n',
        f'[alice]\nhash = "{HASH}"\nname = "bob"\n',
        f'[alice]\nhash = "{HASH}"\n[bob]\nhash = "{HASH}"\n',
        f'["a b"]\nhash = "{HASH}"\n',
    ],
)
def test_a_wrong_file_is_told(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match="keys file"):
        read_keys(file)


def test_reloading_a_wrong_file_keeps_the_old_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.toml"
    key = add_key(file, "alice", admin=False)
    ring = KeyRing(str(file), "")
    passed: list[Mapping[str, TenantLimits]] = []
    file.write_text("[broken")
    ring.reload(passed.append)
    assert ring.find(key) is not None and "old keys stay" in caplog.text
    file.unlink()
    ring.reload(passed.append)
    assert ring.find(key) is not None and ring.closed
    other = add_key(file, "bob", admin=False)
    ring.reload(passed.append)
    assert ring.find(key) is None and ring.find(other) is not None
    assert passed == [ring.tenants] and list(ring.tenants) == ["bob"]


@pytest.mark.parametrize("name", ["alice", "", "a b", "x" * 65, "a]\n[b", "../x"])
def test_a_name_that_is_taken_or_none(tmp_path: Path, name: str) -> None:
    file = tmp_path / "keys.toml"
    add_key(file, "alice", admin=False)
    before = file.read_text()
    with pytest.raises(ConfigError):
        add_key(file, name, admin=False)
    assert file.read_text() == before


def test_a_removed_key_leaves_the_others_as_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    for name in ("alice", "bob"):
        add_key(file, name, admin=False)
    kept = f'# carol has a laptop\n[carol]\nhash = "{HASH}"  # [bob] is not here\nweight = 2.0\n'
    before = file.read_text()
    file.write_text(before + kept)
    remove_key(file, "bob")
    assert file.read_text() == before[: before.index("[bob]")] + kept
    assert file.stat().st_mode & 0o777 == 0o600 and list(tmp_path.iterdir()) == [file]
    with pytest.raises(ConfigError, match=r"no key 'carl' \(did you mean 'carol'\?\)"):
        remove_key(file, "carl")
    remove_key(file, "carol")
    with pytest.raises(ConfigError, match="alice is the only key"):
        remove_key(file, "alice")


def test_a_file_keeps_its_owner_when_a_key_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, owners = tmp_path / "keys.toml", list[tuple[int, int]]()
    for name in ("alice", "bob", "carol"):
        add_key(file, name, admin=False)
    monkeypatch.setattr(os, "fchown", lambda _, user, group: owners.append((user, group)))
    remove_key(file, "alice")
    assert owners == [(file.stat().st_uid, file.stat().st_gid)] and file.stat().st_mode & 0o777 == 0o600

    def refuse(*_: int) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    remove_key(file, "bob")
    assert [one.name for one in read_keys(file).values()] == ["carol"]


def test_two_commands_change_a_keys_file_in_turn(tmp_path: Path) -> None:
    """Without a lock, a key that is made while another is removed is lost."""
    file = tmp_path / "keys.toml"
    add_key(file, "kept", admin=False)
    names = [f"new{number}" for number in range(8)]
    for name in names:
        add_key(file, f"old-{name}", admin=False)
    with ThreadPoolExecutor(16) as pool:
        tasks: list[Future[Any]] = [pool.submit(add_key, file, name, admin=False) for name in names]
        tasks += [pool.submit(remove_key, file, f"old-{name}") for name in names]
    assert not any(task.exception() for task in tasks)
    assert {one.name for one in read_keys(file).values()} == {"kept", *names}


def test_a_key_that_is_written_otherwise_is_not_removed(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    add_key(file, "alice", admin=False)
    file.write_text(file.read_text() + f'["bob"]\nhash = "{HASH}"\n')
    before = file.read_text()
    with pytest.raises(ConfigError, match=r"remove \[bob\] in an editor"):
        remove_key(file, "bob")
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('hash = "plain"', r"\[alice\] hash is 'plain': expected sha256: and 64 hexadecimal digits"),
        (f'hash = "{HASH}"\nweight = 0', r"\[alice\] weight is 0: expected a number above 0"),
        (f'hash = "{HASH}"\nwibble = 1', r"\[alice\] 'wibble' is unknown"),
        ("weight = 1", r"\[alice\] 'hash' is missing"),
    ],
)
def test_a_wrong_line_is_named_with_its_key(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f"[alice]\n{line}\n")
    with pytest.raises(ConfigError, match=reason):
        read_keys(file)


def test_a_lone_key_is_an_admins_and_several_are_users() -> None:
    assert KeyRing("", " one ").find("one") == TenantLimits(name="default", role="admin")
    ring = KeyRing("", "one,two")
    assert [ring.find(key) for key in ("one", "two")] == [TenantLimits(name=f"key{n}") for n in (1, 2)]
    assert not KeyRing("", "").closed and not KeyRing("", " , ").closed


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.1", False),
        ("localhost.example", False),
        ("", False),
    ],
)
def test_what_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
