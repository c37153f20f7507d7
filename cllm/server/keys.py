"""API keys: a TOML file that holds only their hashes.

    [alice]
    hash = "sha256:…"
    role = "user"            # or "admin"
    weight = 2.0             # the rest is optional: see `TenantLimits`
    concurrent = 4

A key is 256 random bits, so a plain SHA-256 cannot be reversed; a slow hash would only slow the server.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cllm.errors import ConfigError, InvalidRequest
from cllm.fields import describe_unknown, parse_fields
from cllm.types import TenantLimits

log = logging.getLogger(__name__)

PREFIX = "cllm-"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_open_private = partial(os.open, mode=0o600)
HASH = "^sha256:[0-9a-f]{64}$(?#sha256: and 64 hexadecimal digits, as `cllm keys new` writes them)"


class KeyEntry(TenantLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the file; its name is the tenant's."""

    hash: Annotated[str, Meta(pattern=HASH)]


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_keys(path: Path) -> dict[bytes, TenantLimits]:
    """The tenants of a keys file, by the hash of their key. Raises ConfigError."""
    entries: dict[str, KeyEntry] = {}
    for name, table in _read_document(path).items():
        try:
            _check_name(name)
            entries[name] = parse_fields(table if isinstance(table, dict) else {}, KeyEntry)
        except (ConfigError, InvalidRequest) as error:
            raise ConfigError(f"the keys file {path.name} is wrong: [{name}] {error}") from None
    if not entries:
        raise ConfigError(f"the keys file {path.name} holds no key: `cllm keys new` makes one")
    if any(entry.name for entry in entries.values()):
        raise ConfigError(f"the keys file {path.name} is wrong: a table's name is the name of its key")
    tenants: dict[bytes, TenantLimits] = {
        bytes.fromhex(entry.hash.removeprefix("sha256:")): msgspec.structs.replace(entry, name=name)
        for name, entry in entries.items()
    }
    if len(tenants) != len(entries):
        raise ConfigError(f"the keys file {path.name} holds the same key twice")
    return tenants


def _read_document(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        made = "; `cllm keys new NAME --file` makes one" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"the keys file {path} cannot be read: {error.strerror}{made}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the keys file {path} is wrong: {error}") from None


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name of a key: up to 64 letters, digits, '-' and '_'")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Keep other commands from changing the file meanwhile. Raises ConfigError for errors of the system."""
    try:
        folder = os.open(path.resolve().parent, os.O_RDONLY)  # the file itself is replaced
        try:
            with suppress(OSError):  # some file systems have no locks
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigError(f"the keys file {path} cannot be written: {error.strerror}") from None


def add_key(path: Path, name: str, *, admin: bool) -> str:
    """Make a key, append its hash to the file (made if missing, readable by its owner alone), return the key.

    Raises ConfigError for a name that is taken or cannot be one.
    """
    _check_name(name)
    key = PREFIX + secrets.token_urlsafe(32)
    table = f'[{name}]\nhash = "sha256:{digest(key).hex()}"\nrole = "{"admin" if admin else "user"}"\n\n'
    with _writing(path):
        if path.exists() and path.stat().st_size and name in {one.name for one in read_keys(path).values()}:
            raise ConfigError(f"there is a key named {name!r} in {path} already: `cllm keys rm` removes it")
        with open(path, "a", opener=_open_private) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(table)
    return key


def remove_key(path: Path, name: str) -> None:
    """Remove a key from the file; the other tables stay as they are written. Raises ConfigError.

    The file keeps its owner, where this process may set one.
    """
    with _writing(path):
        names = [one.name for one in read_keys(path).values()]
        if name not in names:
            raise ConfigError(f"there is no key {describe_unknown(name, names)} in {path}")
        if len(names) == 1:
            raise ConfigError(f"{name} is the only key in {path}: make another one first, or delete the file")
        # Up to the next table, or the comments above it.
        table = rf"^\[{name}\][^\n]*\n(?:(?!(?:#[^\n]*\n)*\[)[^\n]+\n?|\n)*"
        left, document = re.sub(table, "", path.read_text(), flags=re.MULTILINE), _read_document(path)
        if tomllib.loads(left) != {each: entry for each, entry in document.items() if each != name}:
            raise ConfigError(
                f"{path} is not written as `cllm keys new` does it: remove [{name}] in an editor"
            )
        old, new = path.stat(), path.resolve().with_suffix(".new")
        with open(new, "w", opener=_open_private) as file:
            with suppress(PermissionError):
                os.fchown(file.fileno(), old.st_uid, old.st_gid)
            file.write(left)
        new.replace(path.resolve())


class KeyRing:
    """The API keys and their tenants. Without any key, every request is accepted."""

    def __init__(self, file: str, keys: str) -> None:
        """Raises ConfigError for a file that is wrong."""
        self._file = Path(file) if file else None
        given = [key.strip() for key in keys.split(",") if key.strip()]
        # A lone key is the owner's own, and an admin's. Several are users': a file says which is an admin's.
        lone = len(given) == 1
        self._given = {
            digest(key): TenantLimits(
                name="default" if lone else f"key{number}", role="admin" if lone else "user"
            )
            for number, key in enumerate(given, 1)
        }
        self._tenants: Mapping[bytes, TenantLimits] = self._read()

    def _read(self) -> Mapping[bytes, TenantLimits]:
        return {**self._given, **(read_keys(self._file) if self._file is not None else {})}

    @property
    def closed(self) -> bool:
        """True when a key is needed."""
        return bool(self._tenants)

    @property
    def tenants(self) -> dict[str, TenantLimits]:
        """The limits of each tenant, by its name."""
        return {tenant.name: tenant for tenant in self._tenants.values()}

    def allows(self, tenant: str) -> bool:
        """False for the tenant of a key that was removed."""
        return not self.closed or tenant in self.tenants

    def find(self, key: str) -> TenantLimits | None:
        """The tenant of a key. Takes as long for a wrong key as for any right one."""
        wanted, found = digest(key), None
        for hashed, tenant in self._tenants.items():
            if hmac.compare_digest(hashed, wanted):
                found = tenant
        return found

    def reload(self, set_tenants: Callable[[Mapping[str, TenantLimits]], None]) -> None:
        """Read the file again, and pass its tenants on. A wrong file is logged and changes nothing."""
        if self._file is None:
            log.info("SIGHUP: there is no keys file to read")
            return
        try:
            self._tenants = self._read()
        except ConfigError as error:
            log.error("SIGHUP: the old keys stay: %s", error)
            return
        log.info("SIGHUP: %d keys are in force", len(self._tenants))
        set_tenants(self.tenants)
