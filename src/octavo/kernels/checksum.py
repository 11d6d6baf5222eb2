"""Checksums against accidental damage."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

_PIECE_BYTES = 4 << 20


def xxh64(data: Tensor, seed: int = 0) -> int:
    """Return XXH64 of contiguous data on the CPU, without holding the GIL.

    Raises `ImportError` if no kernels are compiled.
    """
    from octavo import _kernels  # noqa: PLC0415

    assert data.is_contiguous()
    return int(_kernels.xxh64(data.data_ptr(), data.nbytes, seed))


def digest(tensors: Iterable[Tensor], num_threads: int = 1) -> str:
    """Return 16 hexadecimal digits for contiguous CPU tensors' bytes, independent of num_threads."""
    pieces = [piece for tensor in tensors for piece in _cut(tensor)]
    whole = hashlib.blake2b(digest_size=8)
    if num_threads == 1 or len(pieces) == 1:
        sums: Iterable[int] = map(xxh64, pieces)
    else:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="octavo-checksum") as pool:
            sums = list(pool.map(xxh64, pieces))
    for piece, each in zip(pieces, sums, strict=True):
        whole.update(piece.nbytes.to_bytes(8, "little") + each.to_bytes(8, "little"))
    return whole.hexdigest()


def _cut(tensor: Tensor) -> Iterator[Tensor]:
    count, flat = _PIECE_BYTES // tensor.element_size(), tensor.view(-1)
    for first in range(0, len(flat), count):
        yield flat[first : first + count]
