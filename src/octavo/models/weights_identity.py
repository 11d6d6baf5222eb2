"""Identifies weights for sharing KV."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from octavo.config import cache_directory
from octavo.errors import ConfigError, ModelError
from octavo.models.packed_cache import HASHES_FILE, Identity
from octavo.models.weight_hashes import FileHashes

if TYPE_CHECKING:
    from octavo.models.architecture import Architecture
    from octavo.models.weight_source import WeightSource


class WeightsIdentity:
    """A hash of weights and architecture, computed by a thread while the model is loaded.

    seed: for random weights. Raises `ConfigError` without a directory for hashes.
    """

    def __init__(self, weights: WeightSource, architecture: Architecture, seed: int | None = None) -> None:
        self._path = weights.path
        self._described = f"{architecture!r} seed:{seed}"
        self._identity: Identity | None = None
        if seed is not None:
            return
        try:
            hashes = FileHashes(cache_directory() / "packed" / HASHES_FILE)
        except RuntimeError as error:
            raise ConfigError(f"KV stores need hashes of the weights' files: {error}; set XDG_CACHE_HOME") from None
        self._identity = Identity(weights.weight_files(), (self._described,), hashes, lambda: None)
        pool = ThreadPoolExecutor(1, thread_name_prefix="octavo-weights")
        self._digest = pool.submit(self._identity.digest)
        pool.shutdown(wait=False)

    def result(self) -> str:
        """Return the hash. Raises `ModelError` if files were changed during loading."""
        identity = self._identity
        if identity is None:
            return self._described
        try:
            digest = self._digest.result()
            is_current = identity.is_current()
        except OSError as error:
            raise ModelError(f"{self._path}: the weights cannot be read ({error})") from None
        if not is_current:
            raise ModelError(f"{self._path} was changed while it was loaded; restart")
        identity.keep()
        return digest
