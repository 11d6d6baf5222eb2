"""API keys from a file. Each key is a tenant with its own limits and share.

    [keys.alice]
    sha256 = "9f86d081884c7d65..."    # `octavo keys add FILE alice` makes a key and writes its digest
    previous_sha256 = "2c26b46b..."   # `octavo keys rotate FILE alice` keeps the old key valid
    weight = 2.0                      # twice the share of weight 1, under the fair policy
    max_concurrency = 16              # open output streams
    requests_per_minute = 600
    tokens_per_minute = 100000
    share_prefix_cache = true         # if false, other keys cannot infer this key's prompts from fast answers
    read_metrics = true               # false closes /metrics, which covers all keys

Keys are long and random, so a plain SHA-256 protects them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
import tomllib
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from octavo.data.request_options import check_salt
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from octavo.config import AccessConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
KEY_PREFIX = "octavo-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """The owner of a key, with its limits. name: "" for all clients if no key file is used."""

    name: str = ""
    weight: float = 1.0
    max_concurrency: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    share_prefix_cache: bool = False
    read_metrics: bool = False

    def cache_salt(self, requested: str | None) -> str | None:
        """Return the cache salt for a request. Raises `RequestError`.

        The salt of a named tenant contains the name, unless the tenant shares the prefix cache.
        """
        check_salt(requested)
        if not self.name:
            return requested
        hashed = "" if requested is None else hashlib.sha256(requested.encode()).hexdigest()
        if self.share_prefix_cache:
            return f"shared\0{hashed}" if hashed else None
        return f"key\0{self.name}\0{hashed}"


EVERYBODY = Tenant(share_prefix_cache=True, read_metrics=True)
_OPERATOR = Tenant(name="(operator)", read_metrics=True)  # no key in a file can have this name
_DEFAULTS = Tenant()


class Keyring:
    """The valid keys. Lookups use a keyed hash, so their duration reveals nothing about the keys."""

    def __init__(self, digests: Iterable[tuple[bytes, Tenant]]) -> None:
        self._secret = secrets.token_bytes(32)
        self._tenants = {self._index(digest): (digest, tenant) for digest, tenant in digests}
        self._named = {tenant.name: tenant for _, tenant in self._tenants.values()}
        self.tenants = tuple(tenant for tenant in self._named.values() if tenant is not _OPERATOR)

    @classmethod
    def of(cls, config: AccessConfig) -> Keyring | None:
        """Return the configured keys, or None if no key is required. Raises `ConfigError`."""
        if config.api_keys_file is not None:
            return cls.from_file(config.api_keys_file, config.operator_key)
        return None if config.api_key is None else cls([(_digest(config.api_key.encode()), EVERYBODY)])

    @classmethod
    def from_file(cls, path: Path, operator_key: str | None = None) -> Keyring:
        """Read a file of keys. Raises `ConfigError`. operator_key: A further key, which may read metrics."""
        operator = [] if operator_key is None else [(_digest(operator_key.encode()), _OPERATOR)]
        return cls([*_read(path), *operator])

    def find(self, key: bytes) -> Tenant | None:
        """Return a key's tenant, or None for an invalid key."""
        digest = _digest(key)
        stored, tenant = self._tenants.get(self._index(digest), (bytes(32), None))
        return tenant if hmac.compare_digest(stored, digest) else None

    def named(self, name: str) -> Tenant | None:
        """Return a tenant."""
        return self._named.get(name)

    def _index(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=16).digest()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _read(path: Path) -> list[tuple[bytes, Tenant]]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the file of API keys {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    if unknown := content.keys() - {"keys"}:
        raise ConfigError(f"{path}: {min(unknown)!r} is not a known table; keys are tables like [keys.alice]")
    tables = content.get("keys")
    if not isinstance(tables, dict) or not tables:
        raise ConfigError(f"{path} holds no keys: `octavo keys add {path} NAME` adds one")
    entries = [entry for name, table in tables.items() for entry in _entries(name, table, f"{path}: keys.{name}")]
    if len({digest for digest, _ in entries}) < len(entries):
        raise ConfigError(f"{path}: the same key occurs twice")
    return entries


def _entries(name: str, table: Any, place: str) -> list[tuple[bytes, Tenant]]:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{place}: a name is 1 to 64 letters, digits, dots, dashes and underscores")
    if not isinstance(table, dict):
        raise ConfigError(f"{place} must be a table")
    limits = dict(table)
    digests = {field: limits.pop(field) for field in ("sha256", "previous_sha256") if field in limits}
    for field, digest in {"sha256": None, **digests}.items():
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ConfigError(f"{place}.{field} must be the 64 hexadecimal digits of the key's SHA-256")
    for field, value in limits.items():
        _check(field, value, f"{place}.{field}")
    tenant = Tenant(name=name, **limits)
    return [(bytes.fromhex(digest), tenant) for digest in digests.values()]


def _check(field: str, value: Any, place: str) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    match field:
        case "share_prefix_cache" | "read_metrics":
            fits, wanted = isinstance(value, bool), "true or false"
        case "max_concurrency":
            fits, wanted = isinstance(value, int) and is_number and value > 0, "a whole number above 0"
        case "weight" | "requests_per_minute" | "tokens_per_minute":
            fits, wanted = is_number and 0 < value < float("inf"), "a number above 0"
        case _:
            raise ConfigError(f"{place} is unknown")
    if not fits:
        raise ConfigError(f"{place} must be {wanted}, got {value!r:.60}")


def add_key(path: Path, tenant: Tenant) -> str:
    """Make and return a tenant's key. Add its digest and the tenant's limits to a file. Raises `ConfigError`.

    A missing file is created, readable by its owner only.
    """
    given = {each.name: getattr(tenant, each.name) for each in fields(Tenant) if each.name != "name"}
    given = {name: value for name, value in given.items() if value != getattr(_DEFAULTS, name)}
    key, digest = _new_key()
    table = {"sha256": digest, **given}
    _entries(tenant.name, table, f"the key {tenant.name!r}")
    with _changed(path) as tables:
        if tenant.name in tables:
            raise ConfigError(f"{path} already has a key named {tenant.name!r}")
        tables[tenant.name] = table
    return key


def remove_key(path: Path, name: str) -> None:
    """Remove a tenant's keys. Raises `ConfigError` if the tenant is unknown or the only one."""
    if [known.name for known in Keyring.from_file(path).tenants] == [name]:
        raise ConfigError(f"{name!r} is the only key of {path}: add another key first")
    with _changed(path, name) as tables:
        del tables[name]


def rotate_key(path: Path, name: str) -> str:
    """Make and return a tenant's new key. The previous key stays valid. Raises `ConfigError`."""
    key, digest = _new_key()
    with _changed(path, name) as tables:
        tables[name].update(sha256=digest, previous_sha256=tables[name]["sha256"])
    return key


def retire_key(path: Path, name: str) -> None:
    """Remove a tenant's previous key. Raises `ConfigError`."""
    with _changed(path, name) as tables:
        if tables[name].pop("previous_sha256", None) is None:
            raise ConfigError(f"{name!r} has no previous key in {path}")


def _new_key() -> tuple[str, str]:
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, _digest(key.encode()).hex()


@contextmanager
def _changed(path: Path, name: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the tables of a file, then write them, unless the block raises. Raises `ConfigError`.

    Keeps comments and formatting. The file is replaced atomically, and keeps its owner and mode.
    """
    try:
        import tomlkit  # noqa: PLC0415  a server only reads keys
    except ImportError:
        raise ConfigError("changing keys needs tomlkit: pip install 'octavo[server]'") from None

    is_new, path = not path.exists(), path.resolve()
    if not is_new:
        _read(path)  # checks the file
    document = tomlkit.document() if is_new else tomlkit.parse(path.read_text(encoding="utf-8"))
    tables = document.setdefault("keys", tomlkit.table(is_super_table=True))
    if name is not None and name not in tables:
        raise ConfigError(f"{path} has no key named {name!r}")
    yield tables
    text = tomlkit.dumps(document)
    if tomllib.loads(text) != {"keys": tables.unwrap()}:
        raise ConfigError(f"{path}: the keys are not written as tables like [keys.alice]; change them by hand")
    unfinished = path.with_name(f"{path.name}.new")
    try:
        unfinished.touch(mode=0o600)
        unfinished.write_text(text, encoding="utf-8")
        if not is_new:
            before = path.stat()
            unfinished.chmod(stat.S_IMODE(before.st_mode))
            if hasattr(os, "chown"):  # the server must be able to read the file that root writes
                os.chown(unfinished, before.st_uid, before.st_gid)
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
