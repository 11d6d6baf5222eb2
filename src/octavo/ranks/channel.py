"""Messages over a pair of connected sockets, each after its length."""

from __future__ import annotations

import selectors
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Collection, Iterator, Mapping

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


def receive_each(
    ends: Mapping[int, socket.socket], poll_s: float, look: Callable[[Collection[int]], None]
) -> Iterator[tuple[int, bytes | None]]:
    """Yield a message of each end with the end's key, in order of arrival; None if the end was closed.

    look(keys): called at least every poll_s seconds with the keys of the ends that have sent nothing yet.
    """
    awaited = dict(ends)
    with selectors.DefaultSelector() as selector:
        for key, end in ends.items():
            selector.register(end, selectors.EVENT_READ, key)
        while awaited:
            for found, _ in selector.select(poll_s):
                end = awaited.pop(found.data)
                selector.unregister(end)
                try:
                    message = receive(end)
                except ClosedError:
                    message = None
                yield found.data, message
            look(awaited)


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
