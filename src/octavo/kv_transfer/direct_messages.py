"""What prefill and decode engines say to each other, and how each of them knows that the other one may.

Messages are msgpack behind their length. Either side proves over two fresh nonces that it knows OCTAVO_KV_SECRET, as
far as one is set; the proof of who asks is over the question as well. Bytes of blocks do not go this way.
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
BEAT_S = 0.5  # between signs of life of who waits for a prompt to be computed
SILENT_S = 4.0  # of who sends none
SEND_S = 2.0
_HEADER = struct.Struct("<8s16s32s32s")  # magic, generation, key, checksum over key and bytes
_MAGIC = b"octavoD" + bytes([VERSION])
_LENGTH = struct.Struct("<I")
_MAX_BYTES = 1 << 20  # of a message: of 30,000 keys
_MAX_REASON = 500  # characters of a reason that are logged
MessageT = TypeVar("MessageT")


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first word of a decode engine."""

    version: int
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """The answer of a prefill engine."""

    nonce: bytes
    proof: bytes


class ReadyToReceive(msgspec.Struct, frozen=True, tag=True):
    """Where the blocks of these keys are to be written: one behind the other from `address` on, each behind its header.

    session: the name of that memory. generation: goes into the headers; it is never used again. kv_format: what the KV
    of the decode engine depends on besides tokens, by name.
    """

    transfer_id: str
    keys: list[bytes]
    block_bytes: int
    kv_format: dict[str, str]
    session: str
    address: int
    generation: bytes


class Notice(msgspec.Struct, frozen=True, tag=True):
    """A `ReadyToReceive`, encoded, and a proof over it."""

    ready: bytes
    proof: bytes


class Written(msgspec.Struct, frozen=True, tag=True):
    """So many blocks, from the first one on, stand there now."""

    count: int


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The next block is still being computed, or other blocks are written before it."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The prefill engine writes nothing more. reason: for the log of the decode engine."""

    reason: str


class RefusalError(ConnectionError):
    """A prefill engine refuses to send KV. Both logs have the reason."""


class BrokenOffError(ConnectionError):
    """The peer closed the connection before a whole message had come."""


class End(msgspec.Struct, frozen=True, tag=True):
    """Nothing more is written."""


DecodeError = msgspec.DecodeError
Message = Hello | Challenge | Notice | Written | Beat | Refused | End
encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode
decode_ready = msgspec.msgpack.Decoder(ReadyToReceive).decode


class Channel:
    """Messages over a socket. It raises `OSError`: for a peer that breaks off, is late, or says what is no message."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @property
    def own_host(self) -> str:
        """The address by which the other one reaches this machine."""
        return str(self._connection.getsockname()[0]).removeprefix("::ffff:")

    @property
    def peer_host(self) -> str:
        """The address of the other side."""
        return str(self._connection.getpeername()[0]).removeprefix("::ffff:")

    def send(self, message: Message) -> None:
        """Send one."""
        data = encode(message)
        self._connection.settimeout(SEND_S)
        self._connection.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, kind: type[MessageT] | tuple[type[MessageT], ...], timeout_s: float = SILENT_S) -> MessageT:
        """Return the next one, which has to be of that kind and whole in time. Raises `RefusalError` for `Refused`."""
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
            raise ConnectionError(f"{type(message).__name__} was not expected")
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
    """Return in words what differs between the KV of two engines; "" if nothing does."""
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
    """Return what only who knows the secret can say about these bytes."""
    digest = hmac.new(secret.encode(), role.encode(), "sha256")
    for part in parts:
        digest.update(_LENGTH.pack(len(part)) + part)
    return digest.digest()


def is_proof(given: bytes, secret: str, role: str, *parts: bytes) -> bool:
    """Whether that is what `proof_of` returns."""
    return hmac.compare_digest(given, proof_of(secret, role, *parts))


def header(generation: bytes, key: bytes, checksum: bytes) -> bytes:
    """Return what stands before a block."""
    return _HEADER.pack(_MAGIC, generation, key, checksum)


def header_in(written: memoryview) -> bytes:
    """Return the header of what was written."""
    return bytes(written[: _HEADER.size])
