"""Rendezvous hashing (Thaler and Ravishankar 1998)."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.router.engines import EngineHandle


def engine_of(key: bytes, engines: Sequence[EngineHandle]) -> EngineHandle:
    """Return the engine for a key of at most 64 bytes.

    The choice depends only on the key and the engines' addresses. So all routers choose the same engine for a key, and
    an engine's removal moves only the keys of this engine.
    """
    return max(engines, key=lambda engine: hashlib.blake2b(engine.url.encode(), key=key).digest())
