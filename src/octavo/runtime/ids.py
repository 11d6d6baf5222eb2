"""Unique ids."""

from __future__ import annotations

import hashlib
import itertools
import secrets

_secret = secrets.token_bytes(32)
_count = itertools.count()  # next() is atomic


def new_id() -> str:
    """Return a unique, unguessable id of 32 hexadecimal digits. Thread-safe, without a system call."""
    return hashlib.blake2b(next(_count).to_bytes(8), key=_secret, digest_size=16).hexdigest()
