"""Hashes that identify a KV block by everything that its KV depends on.

Tenants and machines share blocks by hash, so the hash is SHA-256 (CVE-2025-25183 describes an attack on a weaker hash).
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BlockHash = bytes
ROOT_HASH: BlockHash = hashlib.sha256(b"octavo kv block chain v1").digest()


def hash_block_tokens(parent: BlockHash | None, tokens: Sequence[int], extra_keys: tuple[str, ...] = ()) -> BlockHash:
    """Return a block's hash, which is equal on every machine.

    parent: The previous block's hash, or None.
    extra_keys: All else that the KV depends on (salt, model, adapter, KV dtype, weights epoch, kernels).
    """
    digest = hashlib.sha256(parent or ROOT_HASH)
    for key in extra_keys:
        raw = key.encode()
        digest.update(struct.pack("<q", len(raw)))
        digest.update(raw)
    digest.update(struct.pack(f"<q{len(tokens)}q", -len(tokens), *tokens))
    return digest.digest()


def extend_block_hashes(
    hashes: list[BlockHash],
    token_ids: Sequence[int],
    block_size: int,
    keys_of: Callable[[int], tuple[str, ...]],
    hash_function: Callable[[BlockHash | None, Sequence[int], tuple[str, ...]], BlockHash] = hash_block_tokens,
) -> None:
    """Append missing hashes of full blocks. keys_of: Returns the extra keys of the block at an index."""
    for index in range(len(hashes), len(token_ids) // block_size):
        block_tokens = token_ids[index * block_size : (index + 1) * block_size]
        hashes.append(hash_function(hashes[-1] if hashes else None, block_tokens, keys_of(index)))
