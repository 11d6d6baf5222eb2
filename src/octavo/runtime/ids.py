"""Names of requests and of what answers hold."""

from __future__ import annotations

import hashlib
import itertools
import secrets

_secret = secrets.token_bytes(32)
_count = itertools.count()  # counts in one step, whatever thread asks


def new_id() -> str:
    """Return 32 hexadecimal digits that nobody has seen and nobody can guess.

    Without a call of the system: that lets another thread have the interpreter, and waits until it is given back.
    """
    return hashlib.blake2b(next(_count).to_bytes(8), key=_secret, digest_size=16).hexdigest()
