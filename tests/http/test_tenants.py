"""The key file: its fields, errors with their places, and new keys."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.config.access import AccessConfig
from octavo.errors import ConfigError
from octavo.http.tenants import EVERYBODY, Keyring, Tenant, add_key, remove_key, retire_key, rotate_key


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def ring(tmp_path: Path, text: str) -> Keyring:
    path = tmp_path / "keys.toml"
    path.write_text(text, encoding="utf-8")
    return Keyring.from_file(path)


def test_key_maps_to_its_tenant(tmp_path: Path) -> None:
    text = (
        f'[keys.alice]\nsha256 = "{digest("a")}"\nweight = 2\nmax_concurrency = 3\n[keys.bob]\nsha256="{digest("b")}"\n'
    )
    keyring = ring(tmp_path, text)
    assert keyring.find(b"a") == Tenant(name="alice", weight=2, max_concurrency=3)
    assert keyring.find(b"b") == Tenant(name="bob")
    for wrong in (b"", b"A", b"a ", b"ab", digest("a").encode(), bytes(32), b"alice"):
        assert keyring.find(wrong) is None


def test_single_key_maps_to_default_tenant() -> None:
    keyring = Keyring.of(AccessConfig(api_key="secret"))
    assert keyring.find(b"secret") is EVERYBODY
    assert keyring.find(b"Secret") is None


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "holds no keys"),
        ("keys = 5", "holds no keys"),
        ("[keys.alice", "not valid TOML"),
        ("[users.alice]", "'users' is not a known table"),
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
def test_invalid_key_file_error_names_its_entry(tmp_path: Path, text: str, place: str) -> None:
    with pytest.raises(ConfigError) as error:
        ring(tmp_path, text)
    assert place in str(error.value)
    assert "keys.toml" in str(error.value)


def test_missing_key_file_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Keyring.from_file(tmp_path / "none.toml")


def test_added_keys_are_valid_and_not_stored_in_plain_text(tmp_path: Path) -> None:
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
def test_failed_add_key_keeps_file_unchanged(tmp_path: Path, tenant: Tenant) -> None:
    path = tmp_path / "keys.toml"
    add_key(path, Tenant(name="alice"))
    before = path.read_text()
    with pytest.raises(ConfigError):
        add_key(path, tenant)
    assert path.read_text() == before


FILE = """# whose keys these are
[keys.alice] # of sales
sha256 = "{0}"
weight = 2.0

[keys."bob"]
sha256 = "{1}"
# twice a minute
requests_per_minute = 2
"""


def test_remove_key_revokes_key_and_keeps_rest_of_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(FILE.format(digest("a"), digest("b")))
    path.chmod(0o640)
    remove_key(path, "alice")
    assert path.read_text() == "# whose keys these are\n" + FILE[FILE.index('[keys."bob"]') :].format("", digest("b"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    keyring = Keyring.from_file(path)
    assert keyring.find(b"a") is None
    assert keyring.find(b"b") == Tenant(name="bob", requests_per_minute=2)
    with pytest.raises(ConfigError, match="the only key"):
        remove_key(path, "bob")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may give files away")
def test_changed_key_file_keeps_its_owner_and_symlink(tmp_path: Path) -> None:
    path, link = tmp_path / "keys.toml", tmp_path / "link.toml"
    path.write_text(FILE.format(digest("a"), digest("b")))
    os.chown(path, 12345, 12346)
    link.symlink_to(path)
    remove_key(link, "alice")
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12346)
    assert link.is_symlink()
    assert [tenant.name for tenant in Keyring.from_file(path).tenants] == ["bob"]


def test_rotated_key_stays_valid_until_retired(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(FILE.format(digest("a"), digest("b")))
    alice = Tenant(name="alice", weight=2.0)
    second = rotate_key(path, "alice")
    keyring = Keyring.from_file(path)
    assert [keyring.find(key) for key in (b"a", second.encode())] == [alice, alice]
    assert [tenant.name for tenant in keyring.tenants] == ["alice", "bob"]
    third = rotate_key(path, "alice")
    keyring = Keyring.from_file(path)
    assert [keyring.find(key) for key in (b"a", second.encode(), third.encode())] == [None, alice, alice]
    retire_key(path, "alice")
    keyring = Keyring.from_file(path)
    assert [keyring.find(key) for key in (second.encode(), third.encode())] == [None, alice]
    assert path.read_text() == FILE.format(digest(third), digest("b"))
    with pytest.raises(ConfigError, match="no previous key"):
        retire_key(path, "alice")


@pytest.mark.parametrize("change", [remove_key, rotate_key, retire_key])
def test_unknown_key_name_keeps_file_unchanged(tmp_path: Path, change: Callable[[Path, str], object]) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys.bob]\nsha256 = "{digest("a")}"\n[keys.carol]\nsha256 = "{digest("b")}"\n')
    before = path.read_text()
    with pytest.raises(ConfigError, match="no key named 'alice'"):
        change(path, "alice")
    assert path.read_text() == before


SPELLINGS = [
    'keys.alice = {{ sha256 = "{0}", previous_sha256 = "{1}" }}\nkeys.bob = {{ sha256 = "{2}" }} # here\n',
    '[keys]\nalice = {{ sha256 = "{0}", previous_sha256 = "{1}" }}\nbob.sha256 = "{2}" # here\n',
    "[keys.'alice']\nprevious_sha256 = '{1}'\nsha256 = '{0}'\n\n[keys.bob] # here\nsha256 = '{2}'",
]


@pytest.mark.parametrize("text", SPELLINGS)
def test_keys_in_every_toml_table_syntax_can_be_changed(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text.format(digest("new"), digest("old"), digest("bob")))
    alice, bob = Tenant(name="alice"), Tenant(name="bob")

    def owners(*keys: str) -> list[Tenant | None]:
        assert "# here" in path.read_text()
        keyring = Keyring.from_file(path)
        return [keyring.find(key.encode()) for key in (*keys, "bob")]

    assert owners("new", "old") == [alice, alice, bob]
    retire_key(path, "alice")
    assert owners("new", "old") == [alice, None, bob]
    newer = rotate_key(path, "alice")
    assert owners("new", "old", newer) == [alice, None, alice, bob]
    if text.startswith("keys."):
        before = path.read_text()
        with pytest.raises(ConfigError, match=r"not written as tables like \[keys.alice\]; change them by hand"):
            add_key(path, Tenant(name="carol"))
        assert path.read_text() == before
        return
    carol = add_key(path, Tenant(name="carol", weight=2))
    assert owners("new", newer, carol) == [alice, alice, Tenant(name="carol", weight=2), bob]
    remove_key(path, "alice")
    assert owners("new", newer, carol) == [None, None, Tenant(name="carol", weight=2), bob]


def test_key_changes_need_tomlkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tomlkit", None)
    with pytest.raises(ConfigError, match=r"needs tomlkit: pip install 'octavo\[server\]'"):
        add_key(tmp_path / "keys.toml", Tenant(name="alice"))
    assert list(tmp_path.iterdir()) == []


def test_cache_salts_of_tenants_never_collide() -> None:
    """S18: a salt requested by one client cannot equal a salt of another tenant's blocks."""
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


def test_add_key_writes_readable_toml_and_keeps_file_mode(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    first = add_key(path, Tenant(name="alice", weight=2.5, share_prefix_cache=True))
    second = add_key(path, Tenant(name="bob"))
    assert path.read_text() == (
        f'[keys.alice]\nsha256 = "{digest(first)}"\nweight = 2.5\nshare_prefix_cache = true\n'
        f'\n[keys.bob]\nsha256 = "{digest(second)}"\n'
    )
    assert first.startswith("octavo-")
    path.chmod(0o644)
    add_key(path, Tenant(name="carol"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o644  # only a new file is made private


def test_key_file_is_private_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, modes = tmp_path / "keys.toml", []
    path.write_text(FILE.format(digest("a"), digest("b")))
    path.chmod(0o644)
    write = Path.write_text

    def look(written: Path, *arguments: object, **options: object) -> int:
        modes.append(stat.S_IMODE(written.stat().st_mode))
        return write(written, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "write_text", look)
    rotate_key(path, "alice")
    assert modes == [0o600]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize("change", [rotate_key, lambda path, _: add_key(path, Tenant(name="new"))])
def test_unwritable_key_file_raises_config_error_and_stays_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, str], object]
) -> None:
    path = tmp_path / "keys.toml"
    text = FILE.format(digest("a"), digest("b"))
    path.write_text(text)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        patched.setattr(Path, "open", fail)
        patched.setattr(Path, "read_text", lambda *_, **__: text)
        with pytest.raises(ConfigError, match=f"{path} cannot be written: No space left on device"):
            change(path, "alice")
    assert (path.read_text(), list(tmp_path.iterdir())) == (text, [path])


@pytest.mark.parametrize("kept", ["share_prefix_cache", "read_metrics"])
def test_only_default_tenant_shares_prefix_cache_and_reads_metrics(kept: str) -> None:
    assert getattr(EVERYBODY, kept) is True
    assert getattr(Tenant(name="a"), kept) is False


def test_remove_key_removes_only_table_of_exact_name(tmp_path: Path) -> None:
    text = f'[keys.ab]\nsha256 = "{digest("a")}"\n[keys.a]\nsha256 = "{digest("b")}"\n'
    path = tmp_path / "keys.toml"
    path.write_text(text)
    remove_key(path, "a")
    assert path.read_text() == text[: text.index("[keys.a]")]


def test_keyring_finds_tenant_by_name(tmp_path: Path) -> None:
    keyring = ring(tmp_path, FILE.format(digest("a"), digest("b")))
    assert keyring.named("alice") == Tenant(name="alice", weight=2.0)
    assert keyring.named("nobody") is None
    assert keyring.find(b"") is None


@pytest.mark.parametrize("name", ["a", "A9", "9._-", "a" * 64])
def test_valid_key_names_are_accepted(tmp_path: Path, name: str) -> None:
    assert ring(tmp_path, f'[keys."{name}"]\nsha256 = "{digest("a")}"').find(b"a") == Tenant(name=name)


@pytest.mark.parametrize("name", ["", ".a", "-a", "_", "a" * 65, "a/b", "\u00e9"])
def test_invalid_key_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="a name is 1 to 64 letters"):
        ring(tmp_path, f'[keys."{name}"]\nsha256 = "{digest("a")}"')
