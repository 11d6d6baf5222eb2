"""Limit the number of values in JSON, because parsing blocks all other threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_SMALL_BYTES = 1 << 18  # parsed within milliseconds
_BLOCK_BYTES = 1 << 18
# A body at these limits is parsed in about 0.1 s.
MAX_LISTS_AND_OBJECTS, MAX_NAMES, MAX_VALUES = 1 << 17, 1 << 18, (1 << 20) + (1 << 18)
_QUOTE, _MARKS = ord('"'), (b"[{", b":", b",")


def check_structure(body: bytes) -> None:
    """Raise `RequestError` if a body has too many values."""
    if len(body) <= _SMALL_BYTES:
        return
    counts = _count_outside_strings(body)
    limits = {"lists and objects": MAX_LISTS_AND_OBJECTS, "names": MAX_NAMES, "values": MAX_VALUES}
    for count, (what, limit) in zip(counts, limits.items(), strict=True):
        if count > limit:
            raise RequestError(f"the body holds {count} {what}; the limit is {limit}")


def _count_outside_strings(body: bytes) -> list[int]:
    tables = [np.isin(np.arange(256), list(marks)) for marks in _MARKS]
    counts, is_inside = [0] * len(tables), 0
    for block in _blocks(body):
        inside = (np.cumsum(block == _QUOTE, dtype=np.uint8) + np.uint8(is_inside)) & 1  # an overflow keeps the parity
        is_inside = int(inside[-1])
        outside = block[inside == 0]
        for index, table in enumerate(tables):
            counts[index] += int(np.count_nonzero(table[outside]))
    return counts


def _blocks(body: bytes) -> Iterator[NDArray[np.uint8]]:
    """Yield a body as arrays of uint8 [num_bytes], without escaped backslashes and quotes."""
    start = 0
    while start < len(body):
        end = start + _BLOCK_BYTES
        before = body[start:end].rstrip(b"\\")
        end += (end - start - len(before)) % 2  # a backslash stays with the byte that it escapes
        piece = body[start:end]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        if piece:
            yield np.frombuffer(piece, np.uint8)
        start = end
