"""A checksum of memory, for what was damaged by accident: whoever can change the memory can make the checksum fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def xxh64(data: Tensor, seed: int = 0) -> int:
    """Return XXH64 of contiguous data on the CPU, at some 10 GB/s; Python's lock is free meanwhile.

    Raises `ImportError` where octavo was installed without compiled kernels.
    """
    from octavo import _kernels  # noqa: PLC0415  it may not have been compiled

    assert data.is_contiguous()
    return int(_kernels.xxh64(data.data_ptr(), data.nbytes, seed))
