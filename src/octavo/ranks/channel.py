"""Messages over a pair of connected sockets, each after its length."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

_LENGTH = struct.Struct("<Q")
_MOST_BYTES = 1 << 30


class ClosedError(Exception):
    """The other end was closed."""


def send(end: socket.socket, message: bytes) -> None:
    """Send a message. Raises `ClosedError`, and `TimeoutError` after the socket's timeout."""
    try:
        end.sendall(_LENGTH.pack(len(message)) + message)
    except (BrokenPipeError, ConnectionResetError):
        raise ClosedError from None


def receive(end: socket.socket) -> bytes:
    """Wait for a message. Raises `ClosedError`, and `TimeoutError` after the socket's timeout."""
    (length,) = _LENGTH.unpack(_read(end, _LENGTH.size))
    if length > _MOST_BYTES:
        raise ClosedError
    return bytes(_read(end, length))


def _read(end: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        try:
            received = end.recv_into(view[done:])
        except ConnectionResetError:
            received = 0
        if received == 0:
            raise ClosedError
        done += received
    return data
