"""Keys and their file: what is read, what is refused and where, and what a new key is."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.server.tenants import EVERYBODY, Keyring, Tenant, add_key


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def ring(tmp_path: Path, text: str) -> Keyring:
    path = tmp_path / "keys.toml"
    path.write_text(text, encoding="utf-8")
    return Keyring.from_file(path)


def test_a_key_opens_as_its_tenant(tmp_path: Path) -> None:
    text = (
        f'[keys.alice]\nsha256 = "{digest("a")}"\nweight = 2\nmax_concurrency = 3\n[keys.bob]\nsha256="{digest("b")}"\n'
    )
    keyring = ring(tmp_path, text)
    assert keyring.find(b"a") == Tenant(name="alice", weight=2, max_concurrency=3)
    assert keyring.find(b"b") == Tenant(name="bob")
    for wrong in (b"", b"A", b"a ", b"ab", digest("a").encode(), bytes(32), b"alice"):
        assert keyring.find(wrong) is None


def test_one_key_for_everybody() -> None:
    keyring = Keyring.of_one("secret")
    assert keyring.find(b"secret") is EVERYBODY
    assert keyring.find(b"Secret") is None


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "holds no keys"),
        ("keys = 5", "holds no keys"),
        ("[keys.alice", "not valid TOML"),
        ("[users.alice]", "'users' is unknown"),
        ("[keys]\nalice = 5", "keys.alice must be a table"),
        ("[keys.alice]\nweight = 1", "keys.alice.sha256"),
        ('[keys.alice]\nsha256 = "abc"', "keys.alice.sha256"),
        (f'[keys."a b"]\nsha256 = "{digest("a")}"', "keys.a b"),
        (f'[keys."a\\u0000"]\nsha256 = "{digest("a")}"', "a name is"),
        *(
            (f'[keys.alice]\nsha256 = "{digest("a")}"\n{line}', f"keys.alice.{line.split()[0]}")
            for line in (
                "weight = 0",
                "weight = inf",
                "weight = nan",
                'weight = "2"',
                "weight = true",
                "max_concurrency = 1.5",
                "max_concurrency = true",
                "max_concurrency = 0",
                "requests_per_minute = -1",
                "tokens_per_minute = 0",
                "share_prefix_cache = 1",
                "read_metrics = 1",
                "wieght = 2",
                'name = "root"',
            )
        ),
        (f'[keys.a]\nsha256 = "{digest("a")}"\n[keys.b]\nsha256 = "{digest("a")}"', "the same key"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_place(tmp_path: Path, text: str, place: str) -> None:
    with pytest.raises(ConfigError) as error:
        ring(tmp_path, text)
    assert place in str(error.value)
    assert "keys.toml" in str(error.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Keyring.from_file(tmp_path / "none.toml")


def test_added_keys_open_and_stand_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    tenants = [
        Tenant(name="alice", weight=2.5, max_concurrency=4),
        Tenant(name="b.o-b_1", requests_per_minute=10, tokens_per_minute=0.5, share_prefix_cache=True),
        Tenant(name="carol"),
    ]
    keys = [add_key(path, tenant) for tenant in tenants]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(set(keys)) == 3
    assert all(len(key) > 40 for key in keys)
    assert not any(key in path.read_text() for key in keys)
    keyring = Keyring.from_file(path)
    assert [keyring.find(key.encode()) for key in keys] == tenants


@pytest.mark.parametrize("tenant", [Tenant(name="alice"), Tenant(name="x y"), Tenant(name="bob", weight=-1)])
def test_a_key_that_cannot_be_added_changes_nothing(tmp_path: Path, tenant: Tenant) -> None:
    path = tmp_path / "keys.toml"
    add_key(path, Tenant(name="alice"))
    before = path.read_text()
    with pytest.raises(ConfigError):
        add_key(path, tenant)
    assert path.read_text() == before


def test_salts_of_tenants_never_meet() -> None:
    """S18: what a client asks for cannot spell what another tenant's blocks are named by."""
    salts = [
        Tenant(name=name).cache_salt(asked)
        for name in ("a", "ab", "b")
        for asked in (None, "b", "b\0", "\0b", "ab", "x" * 1024)
    ]
    assert len(set(salts)) == len(salts)
    assert EVERYBODY.cache_salt(None) is None
    assert EVERYBODY.cache_salt("x") == "x"
    sharing, other = (Tenant(name=name, share_prefix_cache=True) for name in "st")
    assert sharing.cache_salt(None) is None
    assert sharing.cache_salt("x") == other.cache_salt("x")
    for asked in (*salts, "a\0", "key\0a\0", "x"):
        assert sharing.cache_salt(asked) not in salts
