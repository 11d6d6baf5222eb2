"""Hash chains: the hash of a block depends on its tokens and on the hash of the block before it."""

from __future__ import annotations

import itertools

from octavo.core.kv.block_hash import extend_block_hashes, hash_block_tokens


def test_each_block_hash_extends_hash_of_previous_block():
    tokens, keys = list(range(100, 112)), ("salt:a",)
    hashes: list[bytes] = []
    extend_block_hashes(hashes, tokens[:9], 4, lambda _index: keys)
    extend_block_hashes(hashes, tokens, 4, lambda _index: keys)
    expected = [hash_block_tokens(None, tokens[:4], keys)]
    for start in (4, 8):
        expected.append(hash_block_tokens(expected[-1], tokens[start : start + 4], keys))
    assert hashes == expected


def test_extend_block_hashes_accepts_custom_hash_function():
    hashes: list[bytes] = []
    extend_block_hashes(
        hashes, [1, 2, 3], 1, lambda _index: (), lambda parent, tokens, _keys: bytes([*(parent or b""), *tokens])
    )
    assert hashes == [b"\1", b"\1\2", b"\1\2\3"]


def test_hash_includes_numbers_of_keys_and_tokens():
    contents = [((), []), ((), [-1]), (("",), []), (("", ""), []), (("a",), []), (("a", ""), []), (("", "a"), [])]
    names = {hash_block_tokens(None, tokens, keys) for keys, tokens in contents}
    assert len(names) == len(contents)


def test_different_key_boundaries_give_different_hashes():
    keys = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", "")]
    for first, second in itertools.combinations(keys, 2):
        assert hash_block_tokens(None, [1], first) != hash_block_tokens(None, [1], second)


def test_only_full_blocks_are_hashed():
    hashes: list[bytes] = []
    extend_block_hashes(hashes, list(range(11)), 4, lambda _index: ())
    assert len(hashes) == 2
    extend_block_hashes(hashes, list(range(12)), 4, lambda _index: ())
    assert len(hashes) == 3


def test_hash_depends_on_parent_and_keys():
    first = hash_block_tokens(None, [1, 2])
    assert hash_block_tokens(first, [3, 4]) != hash_block_tokens(None, [3, 4])
    assert hash_block_tokens(None, [1, 2], ("salt:x",)) != first
    assert hash_block_tokens(None, [1, 2], ("a", "b")) != hash_block_tokens(None, [1, 2], ("ab",))


def test_hash_equals_stored_value():
    value = hash_block_tokens(hash_block_tokens(None, [1, 2, 3]), [4, 5, 6], ("model:m",))
    assert value.hex() == "25b87b0a0503f71af8ac653ab3e1f910e844b0eca6b78b41915918c2f7a8f982"
