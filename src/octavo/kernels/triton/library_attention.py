"""Attention by a library that is installed beside octavo, the rest by the kernels in Triton: NOT exact.

A library picks tiles, and splits of the sum, by what stands in the batch: so the last bits of a row, and now and then a
token, depend on who else is there. To be asked for by name, where speed is worth that.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from octavo.errors import ConfigError
from octavo.kernels.triton.backend import TritonKernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from octavo.kernels.interface import AttentionBatch


class LibraryAttention(TritonKernels, ABC):
    """The kernels in Triton, but attention is a library's, where it has a kernel; KV is not rounded.

    library: its name for people. Whatever it has no kernel for is left to those in Triton, and a warning says so once.
    """

    library: str
    kv_cache_dtypes: tuple[str, ...] = ()  # theirs have one scale a head or tensor, octavo one a token and head

    def __init__(self, version: str) -> None:
        super().__init__()
        self.identity += f" {self.library} {version}"

    @abstractmethod
    def covers(self, head_dim: int, dtype: Any) -> bool:
        """Whether the library has a kernel for such heads: for any window, soft cap, group and block size."""

    @abstractmethod
    def library_bytes(self, *, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
        """Return the most that the library's attention takes for itself, whoever stands in a batch."""

    @abstractmethod
    def _attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Compute what `covers` says, as `Kernels.paged_attention` does."""

    def scratch_bytes(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, vocab_size: int, max_seq_len: int, max_tokens: int
    ) -> int:
        """Return bytes of partial sums of Triton's kernels, and of what the library takes."""
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        own = super().scratch_bytes(**heads, vocab_size=vocab_size, max_seq_len=max_seq_len, max_tokens=max_tokens)
        return own + self.library_bytes(**heads)

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return causal attention of every row over the KV of its own sequence."""
        head_dim, dtype = q.shape[2], q.dtype
        if k_cache.dtype == dtype and self.covers(head_dim, dtype):
            if q.shape[0] == 1:  # torch gives the stride of one token any value, and libraries look at it
                q = q.as_strided(q.shape, (q.shape[1] * head_dim, q.stride(1), 1))
            return self._attend(q, k_cache, v_cache, batch, scale, window, softcap)
        self._leave_to_triton(f"attention of heads of {head_dim} in {str(dtype).removeprefix('torch.')}")
        return super().paged_attention(q, k_cache, v_cache, batch, scale, window, softcap)

    def _leave_to_triton(self, what: str) -> None:
        """Warn, once, of what the library has no kernel for."""
        if what not in self._warned_of:
            self._warned_of.add(what)
            message = f"octavo's own kernels compute {what}: {self.name} takes no kernel of {self.library} for that"
            warnings.warn(message, RuntimeWarning, stacklevel=3)


def load_library(backend: str, library: str, modules: Sequence[str], command: str) -> tuple[str, Any]:
    """Import the first of some modules that is there; return its name and it.

    Raises `ConfigError`, with the command that installs it, where none can be imported.
    """
    reasons = []
    for name in modules:
        try:
            return name, importlib.import_module(name)
        except (ImportError, OSError) as error:  # an OSError is a shared library's that is missing
            reasons.append(str(error))
    what = f"kernel backend {backend!r} needs {library}, which cannot be imported ({'; '.join(reasons)})"
    raise ConfigError(f"{what}: {command}; or choose triton")


def version_of(*distributions: str) -> str:
    """Return the version of the first of some distributions that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def require_nvidia(backend: str, library: str, device: torch.device, majors: range) -> None:
    """Raise `ConfigError` for a GPU that a library does not serve: another vendor's, or of other compute capabilities.

    What is interpreted on a CPU serves tests.
    """
    if device.type != "cuda":
        return
    what = f"kernel backend {backend!r} cannot serve this GPU: {library} needs one of NVIDIA's"
    if torch.version.hip is not None:
        raise ConfigError(f"{what}; choose triton")
    major, minor = torch.cuda.get_device_capability(device)
    if major not in majors:
        needed = f"{majors.start}.0 to {majors.stop - 1}.x"
        raise ConfigError(f"{what} of compute capability {needed}, it has {major}.{minor}; choose triton")
