"""Messages between prefill and decode engines. A message is a length, then msgpack.

With two fresh nonces, each side proves that it knows OCTAVO_KV_SECRET. The decode engine's proof covers its
`ReadyToReceive`, too.
"""

from __future__ import annotations

import hmac
import struct
import time
from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

VERSION = 2
NONCE_BYTES = GENERATION_BYTES = 16
BEAT_S = 0.5
SILENT_S = 4.0  # a peer silent for longer has failed
SEND_S = 2.0
_HEADER = struct.Struct("<8s16s32s32s")  # magic, generation, key, checksum over key and bytes
_MAGIC = b"octavoD" + bytes([VERSION])
_LENGTH = struct.Struct("<I")
_MAX_BYTES = 1 << 20  # per message: about 30,000 keys
_MAX_REASON = 500  # characters
MessageT = TypeVar("MessageT")


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A decode engine's first message."""

    version: int
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Hello`, with a `proof_of` both nonces."""

    nonce: bytes
    proof: bytes


class ReadyToReceive(msgspec.Struct, frozen=True, tag=True):
    """Memory from `address` on, into which the blocks of `keys` are written. A header precedes each block.

    session: Name of this memory. generation: Random bytes in every header.
    """

    transfer_id: str
    keys: list[bytes]
    block_bytes: int
    kv_format: dict[str, str]
    session: str
    address: int
    generation: bytes


class Notice(msgspec.Struct, frozen=True, tag=True):
    """An encoded `ReadyToReceive` with a proof."""

    ready: bytes
    proof: bytes


class Written(msgspec.Struct, frozen=True, tag=True):
    """The first `count` blocks were written."""

    count: int


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The prefill engine is alive, but has written nothing more."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A prefill engine's refusal. The last message."""

    reason: str


class RefusalError(ConnectionError):
    """The prefill engine refuses. Raised in both engines."""


class BrokenOffError(ConnectionError):
    """The peer disconnected."""


class End(msgspec.Struct, frozen=True, tag=True):
    """No further blocks follow. The last message."""


DecodeError = msgspec.DecodeError
Message = Hello | Challenge | Notice | Written | Beat | Refused | End
encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode
decode_ready = msgspec.msgpack.Decoder(ReadyToReceive).decode


class Channel:
    """Messages over a socket. Raises `OSError` if the peer disconnects, is late or sends an invalid message."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @property
    def local_host(self) -> str:
        """This machine's address as the peer knows it."""
        return str(self._connection.getsockname()[0]).removeprefix("::ffff:")

    @property
    def peer_host(self) -> str:
        """Peer's IP address."""
        return str(self._connection.getpeername()[0]).removeprefix("::ffff:")

    def send(self, message: Message) -> None:
        """Send a message. Raises `OSError`."""
        data = encode(message)
        self._connection.settimeout(SEND_S)
        self._connection.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, kind: type[MessageT] | tuple[type[MessageT], ...], timeout_s: float = SILENT_S) -> MessageT:
        """Return the next message, which must be of `kind`. Raises `RefusalError` for `Refused`."""
        deadline = time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if length > _MAX_BYTES:
            raise ConnectionError(f"a message of {length} bytes exceeds the limit of {_MAX_BYTES} bytes")
        try:
            message = _decode(self._read(length, deadline))
        except DecodeError as error:
            raise ConnectionError(f"invalid message: {error}") from error
        if isinstance(message, Refused):
            raise RefusalError(f"it sends no KV: {_printable(message.reason)}")
        if not isinstance(message, kind):
            raise ConnectionError(f"unexpected message {type(message).__name__}")
        return message

    def _read(self, count: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            self._connection.settimeout(max(deadline - time.monotonic(), 0.001))
            part = self._connection.recv(count - len(parts))
            if not part:
                raise BrokenOffError("it closed the connection")
            parts += part
        return bytes(parts)


def differences(of_prefill: Mapping[str, str], of_decode: Mapping[str, str]) -> str:
    """Describe the differences, or return "" if the KV formats are equal."""
    names = sorted(of_prefill.keys() | of_decode.keys())
    return "; ".join(
        f"{name} is {of_prefill.get(name, 'unknown')!r} in the prefill engine and "
        f"{of_decode.get(name, 'unknown')!r} in the decode engine"
        for name in names
        if of_prefill.get(name) != of_decode.get(name)
    )


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text[:_MAX_REASON])


def proof_of(secret: str, role: str, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of role and parts, keyed with `secret`."""
    digest = hmac.new(secret.encode(), role.encode(), "sha256")
    for part in parts:
        digest.update(_LENGTH.pack(len(part)) + part)
    return digest.digest()


def is_proof(given: bytes, secret: str, role: str, *parts: bytes) -> bool:
    """Return True if `given` equals `proof_of(secret, role, *parts)`."""
    return hmac.compare_digest(given, proof_of(secret, role, *parts))


def header(generation: bytes, key: bytes, checksum: bytes) -> bytes:
    """Return the header of a transferred block."""
    return _HEADER.pack(_MAGIC, generation, key, checksum)


def header_in(written: memoryview) -> bytes:
    """Return a block's header."""
    return bytes(written[: _HEADER.size])
