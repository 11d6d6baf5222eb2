"""Blocks with content that follows from their key, so that a reader can check them.

As a program it writes until it is killed:

    python disk_blocks.py DIRECTORY MAX_BYTES SEED
"""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path

BLOCK_BYTES = 2048
NUM_KEYS = 400  # number of keys that writers choose from


def key_of(number):
    return hashlib.sha256(b"key %d" % number).digest()


def content_of(key, block_bytes=BLOCK_BYTES):
    return hashlib.shake_128(key).digest(block_bytes)


def keys_from(first, count):
    return [key_of(number) for number in range(first, first + count)]


def save(store, keys):
    return store.save(keys, [memoryview(content_of(key, store.block_bytes)) for key in keys])


def load(store, keys):
    """Return the number of blocks that the store loads. Raises `ValueError` if one is wrong."""
    buffers = [bytearray(store.block_bytes) for _ in keys]
    count = store.load(keys, [memoryview(buffer) for buffer in buffers])
    for key, buffer in list(zip(keys, buffers, strict=True))[:count]:
        if bytes(buffer) != content_of(key, store.block_bytes):
            raise ValueError("a block is not what was saved under its key")
    return count


def write_and_read(store, rng):
    """Save some blocks, and load some."""
    save(store, keys_from(rng.randrange(NUM_KEYS), rng.randint(1, 8)))
    wanted = keys_from(rng.randrange(NUM_KEYS), 8)
    load(store, wanted[: store.num_matched(wanted)])


def main():
    from octavo.kv_transfer.disk import DiskStore

    directory, max_bytes, seed = sys.argv[1:]
    store, rng = DiskStore(Path(directory), BLOCK_BYTES, int(max_bytes)), random.Random(seed)
    print("ready", flush=True)  # noqa: T201
    while not store.stats().num_corrupt:
        write_and_read(store, rng)
    sys.exit("a block that nobody has touched is corrupt")


if __name__ == "__main__":
    main()
