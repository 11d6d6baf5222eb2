"""The prefill engine's side of direct transfers."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections import Counter, OrderedDict
from functools import partial
from typing import TYPE_CHECKING

from octavo.data.scheduler_output import TransferDirection
from octavo.kv_transfer import direct_messages as messages
from octavo.kv_transfer.direct_client import TransferClient
from octavo.kv_transfer.direct_messages import Channel, RefusalError
from octavo.kv_transfer.direct_segment import DONOR_AREAS, HEADER_BYTES, Segment
from octavo.kv_transfer.interface import StoreError, StoreStats
from octavo.kv_transfer.mooncake_client import BusyError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo.data.request import Request
    from octavo.data.scheduler_output import KVTransfer
    from octavo.kv_transfer.direct_messages import ReadyToReceive
    from octavo.kv_transfer.mooncake_client import Area

logger = logging.getLogger(__name__)
_GRACE_S = 2.0  # the request may reach the decode engine first
_STALLED_S = 3.0  # longest wait of computed blocks for a write; less than `SILENT_S`
_FIRST_WRITE_BYTES = 1 << 20
_MAX_CONNECTIONS = 512
_MAX_LOGGED = 64
_MAX_KNOWN = 4096


class _Pace:
    """Adapts the blocks per write, so that a write takes at most `BEAT_S`.

    A decode engine gets no message during a write, so a longer write would look like a failure.
    """

    def __init__(self, object_bytes: int) -> None:
        self.num_blocks = max(_FIRST_WRITE_BYTES // object_bytes, 1)

    def wrote(self, num_blocks: int, seconds: float) -> None:
        """Adapt `num_blocks`."""
        if seconds > messages.BEAT_S:
            self.num_blocks = max(num_blocks // 2, 1)
        elif seconds < messages.BEAT_S / 2 and num_blocks == self.num_blocks:
            self.num_blocks *= 2


class DirectDonor:
    """A `KVStore` that writes blocks into decode engines' memory. See `MooncakeConnector`.

    Waits for a requested block while its transfer is open or the block is being saved.
    """

    name = "direct"

    def __init__(
        self, block_bytes: int, max_bytes: int, *, protocol: str, secret: str, kv_format: Mapping[str, str]
    ) -> None:
        self.block_bytes = block_bytes
        self._kv_format = kv_format
        self._object_bytes = HEADER_BYTES + block_bytes
        self._secret = secret
        self._segment = Segment(block_bytes, max_bytes)
        self._client = TransferClient(protocol=protocol, object_bytes=self._object_bytes, num_areas=DONOR_AREAS)
        self._changed = threading.Condition()  # guards all fields below
        self._open: Counter[str] = Counter()  # by transfer
        self._ended: OrderedDict[str, None] = OrderedDict()  # transfers that get no further blocks
        self._saving: Counter[bytes] = Counter()
        self._connections: set[socket.socket] = set()
        self._num_errors = 0
        self._written_at = 0.0
        self._logged: set[tuple[str, str]] = set()  # (refused decode engine, reason)
        self._is_closed = False
        has_both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_both else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=has_both)
        self.port: int | None = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, name="octavo-kv-direct", daemon=True).start()

    def request_added(self, request: Request) -> None:
        """Open a prefill-only request's transfer."""
        if request.hands_kv_over and request.kv_transfer_params is not None:
            with self._changed:
                name = request.kv_transfer_params.transfer_id
                self._open[name] += 1
                self._ended.pop(name, None)

    def request_finished(self, request: Request) -> None:
        """End a transfer with its last request."""
        if not request.hands_kv_over or request.kv_transfer_params is None:
            return
        name = request.kv_transfer_params.transfer_id
        with self._changed:
            self._open[name] -= 1
            if self._open[name] <= 0:
                del self._open[name]
                self._ended[name] = None
                if len(self._ended) > _MAX_KNOWN:
                    self._ended.popitem(last=False)
            self._changed.notify_all()

    def transfer_ordered(self, transfer: KVTransfer) -> None:
        """Record a save's blocks."""
        if transfer.direction is TransferDirection.SAVE:
            with self._changed:
                self._saving.update(transfer.keys)

    def transfer_ended(self, transfer: KVTransfer) -> None:
        """See `MooncakeConnector`."""
        if transfer.direction is TransferDirection.SAVE:
            with self._changed:
                self._saving -= Counter(transfer.keys)
                self._changed.notify_all()

    def expect(self, request: Request) -> bool:
        """Return False."""
        del request
        return False

    def forget_expected(self, request_id: str) -> None:
        """Do nothing."""

    def num_matched(self, keys: Sequence[bytes]) -> int:
        """See `KVStore`."""
        return self._segment.num_matched(keys)

    def lacks(self, keys: Sequence[bytes]) -> set[bytes]:
        """See `KVStore`."""
        return self._segment.lacks(keys)

    def load(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """See `KVStore`."""

        def copy(block: memoryview, content: memoryview, _: bytes) -> None:
            block[:] = content

        for index, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            if not self._segment.read(key, partial(copy, block)):
                return index
        return len(keys)

    def save(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """See `KVStore`."""
        for index, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            if not self._segment.put(key, block):
                return index
            with self._changed:
                self._changed.notify_all()
        return len(keys)

    def forget(self, keys: Sequence[bytes]) -> None:
        """See `KVStore`."""
        self._segment.forget(keys)

    def stats(self) -> StoreStats:
        """See `KVStore`."""
        count = len(self._segment)
        return StoreStats(
            count,
            count * self.block_bytes,
            self._segment.num_slots * self.block_bytes,
            self._segment.num_evicted,
            num_errors=self._num_errors,
        )

    def close(self) -> None:
        """Close all connections, and end the process."""
        with self._changed:
            was_closed, self._is_closed = self._is_closed, True
            connections = list(self._connections)
            self._changed.notify_all()
        if was_closed:
            return
        for each in (self._listener, *connections):
            _end(each)
        self._client.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.1)  # no free descriptor
                continue
            with self._changed:
                is_welcome = not self._is_closed and len(self._connections) < _MAX_CONNECTIONS
                if is_welcome:
                    self._connections.add(connection)
            if not is_welcome:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="octavo-kv-direct", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with contextlib.closing(connection):
                channel = Channel(connection)
                try:
                    self._hand_over(channel, self._receive(channel))
                except (RefusalError, StoreError) as error:
                    self._refuse(channel, str(error))
        except OSError as error:
            with self._changed:
                self._num_errors += 1
            logger.debug("KV was not sent: %s", error)
        except Exception:
            logger.exception("KV could not be sent")
        finally:
            with self._changed:
                self._connections.discard(connection)

    def _refuse(self, channel: Channel, reason: str) -> None:
        refusal = channel.peer_host, reason
        with self._changed:
            self._num_errors += 1
            is_new = refusal not in self._logged
            if len(self._logged) >= _MAX_LOGGED:
                self._logged.clear()
            self._logged.add(refusal)
        if is_new:
            logger.warning("decode engine at %s: no KV is sent to it: %s", *refusal)
        channel.send(messages.Refused(reason))

    def _receive(self, channel: Channel) -> ReadyToReceive:
        hello = channel.receive(messages.Hello)
        if hello.version != messages.VERSION:
            raise RefusalError(messages.differences(_versions(messages.VERSION), _versions(hello.version)))
        nonce = secrets.token_bytes(messages.NONCE_BYTES)
        channel.send(messages.Challenge(nonce, messages.proof_of(self._secret, "donor", hello.nonce, nonce)))
        notice = channel.receive(messages.Notice)
        if not messages.is_proof(notice.proof, self._secret, "receiver", hello.nonce, nonce, notice.ready):
            raise ConnectionError("a decode engine with another OCTAVO_KV_SECRET")  # an unknown peer gets no reason
        try:
            ready = messages.decode_ready(notice.ready)
        except messages.DecodeError as error:
            raise ConnectionError(f"invalid request: {error}") from error
        differences = messages.differences(
            {**self._kv_format, "size of a block": f"{self.block_bytes} bytes"},
            {**ready.kv_format, "size of a block": f"{ready.block_bytes} bytes"},
        )
        if differences:
            raise RefusalError(f"their KV differs: {differences}")
        return ready

    def _hand_over(self, channel: Channel, ready: ReadyToReceive) -> None:
        """Write and report blocks as they are computed, and send a `Beat` every `BEAT_S`."""
        num_written, requested_at, pace = 0, time.monotonic(), _Pace(self._object_bytes)
        ready_at: float | None = None
        while num_written < len(ready.keys):
            count = self._wait(ready, num_written, requested_at)
            if count is None:
                break
            num_new = self._write_in_turn(channel.local_host, ready, num_written, count, pace) if count else 0
            num_written += num_new
            channel.send(messages.Written(num_written) if num_new else messages.Beat())
            now = time.monotonic()
            ready_at = None if num_new or not count else ready_at or now
            if ready_at is not None and now - max(ready_at, self._written_at) > _STALLED_S:
                raise StoreError(f"the process for direct transfers of KV has written nothing for {_STALLED_S:g} s")
        channel.send(messages.End())

    def _write_in_turn(self, host: str, ready: ReadyToReceive, first: int, count: int, pace: _Pace) -> int:
        began = time.monotonic()
        client = self._client.get(host, messages.BEAT_S)
        if client is None:
            return 0
        try:
            with client.area(messages.BEAT_S) as area:
                write_began = time.monotonic()
                num_written = self._write(area, ready, first, min(count, pace.num_blocks))
        except BusyError:
            time.sleep(max(began + messages.BEAT_S - time.monotonic(), 0.0))
            return 0
        self._written_at = time.monotonic()
        pace.wrote(num_written, self._written_at - write_began)
        return num_written

    def _wait(self, ready: ReadyToReceive, first: int, requested_at: float) -> int | None:
        """Return how many blocks are ready within `BEAT_S`, or None if no more will be ready."""
        keys = ready.keys[first:]
        beat_at = time.monotonic() + messages.BEAT_S
        with self._changed:
            while True:
                count = self._segment.num_matched(keys)
                now = time.monotonic()
                if count or now >= beat_at:
                    return count
                if self._is_closed or not self._is_coming(ready.transfer_id, keys[0], now - requested_at):
                    return None
                self._changed.wait(beat_at - now)

    def _is_coming(self, transfer_id: str, key: bytes, waited_s: float) -> bool:
        """Needs the lock."""
        may_be_on_its_way = transfer_id not in self._ended and waited_s < _GRACE_S
        return key in self._saving or transfer_id in self._open or may_be_on_its_way

    def _write(self, area: Area, ready: ReadyToReceive, first: int, count: int) -> int:

        def copy(target: memoryview, key: bytes, block: memoryview, checksum_of_it: bytes) -> None:
            head = messages.header(ready.generation, key, checksum_of_it)
            target[: len(head)] = head
            target[HEADER_BYTES:] = block

        copied = 0
        for target, key in zip(area.objects, ready.keys[first : first + count], strict=False):
            if not self._segment.read(key, partial(copy, target, key)):
                break
            copied += 1
        if copied:
            codes = area.call("write", [ready.session, ready.address + first * self._object_bytes, copied])
            if any(codes):
                raise StoreError(f"Mooncake could not write into {ready.session} (code {codes[0]})")
        return copied


def _versions(version: int) -> dict[str, str]:
    return {"version of the protocol": str(version)}


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
