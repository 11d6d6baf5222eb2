"""The decode engine's side of direct transfers.

Received bytes are not trusted: Header and checksum are compared after the copy out of shared memory.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.kv_transfer import direct_messages as messages
from octavo.kv_transfer.direct_client import TransferClient
from octavo.kv_transfer.direct_messages import Channel
from octavo.kv_transfer.direct_segment import HEADER_BYTES, RECEIVER_AREAS, checksum
from octavo.kv_transfer.interface import StoreError, StoreStats
from octavo.kv_transfer.mooncake_client import OPEN_S, BusyError, local_address

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo.data.request import Request
    from octavo.data.scheduler_output import KVTransfer
    from octavo.kv_transfer.mooncake_client import Area

logger = logging.getLogger(__name__)
_CONNECT_S = 2.0
_PROBE_S = 1.0  # a healthy source answers a connection in this time
_BUSY_PAUSE_S = 0.05
_ENDING_S = 0.1
_MAX_SOURCES = 256


class _ConnectTimeoutError(TimeoutError):
    """No timely connection."""


# Faults of a single connection to a healthy source.
_OF_ONE_CONNECTION = (
    ConnectionResetError,
    ConnectionAbortedError,
    BrokenPipeError,
    messages.BrokenOffError,
    _ConnectTimeoutError,
)


@dataclass(frozen=True, slots=True, eq=False)
class _Expected:
    """Blocks that a request gets from `source` (HOST:PORT). since: Time when the request was added."""

    transfer_id: str
    source: str
    keys: frozenset[bytes]
    since: float


class DirectReceiver:
    """A `KVStore` of the blocks that prefill engines compute for this engine's requests. See `MooncakeConnector`.

    A faulty or malicious prefill engine only costs time. After a failure, earlier requests do not ask this prefill
    engine again. But corrupt blocks, or a broken connection to an engine that accepts new connections, affect only one
    request.
    """

    name = "direct"
    port: int | None = None

    def __init__(
        self, block_bytes: int, *, block_size: int, protocol: str, secret: str, kv_format: Mapping[str, str]
    ) -> None:
        self.block_bytes = block_bytes
        self._kv_format = dict(kv_format)
        self._block_size = block_size
        self._secret = secret
        self._object_bytes = HEADER_BYTES + block_bytes
        self._client = TransferClient(protocol=protocol, object_bytes=self._object_bytes, num_areas=RECEIVER_AREAS)
        self._lock = threading.Lock()  # guards all fields below
        self._expected: dict[str, _Expected] = {}  # by request
        self._added_at: dict[str, float] = {}  # by request
        self._failing: set[str] = set()  # sources whose last transfer failed
        self._failed_at: dict[str, float] = {}  # by source
        self._num_corrupt = 0
        self._num_errors = 0
        self._is_closed = False

    def request_added(self, request: Request) -> None:
        """See `MooncakeConnector`."""
        if request.expects_kv:
            with self._lock:
                self._added_at[request.request_id] = time.monotonic()

    def request_finished(self, request: Request) -> None:
        """See `MooncakeConnector`."""
        self.forget_expected(request.request_id)
        with self._lock:
            self._added_at.pop(request.request_id, None)

    def transfer_ordered(self, transfer: KVTransfer) -> None:
        """Do nothing."""

    def transfer_ended(self, transfer: KVTransfer) -> None:
        """Expect no more blocks for the load's request. A cancelled load ends when the next message arrives."""
        if transfer.request_id is not None:
            self.forget_expected(transfer.request_id)

    def expect(self, request: Request) -> bool:
        """See `MooncakeConnector`."""
        params = request.kv_transfer_params
        if params is None or params.is_prefill or params.source is None:
            return False
        keys = request.block_hashes[: request.num_prompt_tokens // self._block_size]
        with self._lock:
            since = self._added_at.get(request.request_id, time.monotonic())
            self._expected[request.request_id] = _Expected(params.transfer_id, params.source, frozenset(keys), since)
        return True

    def forget_expected(self, request_id: str) -> None:
        """See `MooncakeConnector`."""
        with self._lock:
            self._expected.pop(request_id, None)

    def num_matched(self, keys: Sequence[bytes]) -> int:
        """Count leading keys expected from one prefill engine."""
        return len(self._split(keys)[1])

    def lacks(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return no keys: nothing is saved here."""
        del keys
        return set()

    def load(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Fill blocks as a prefill engine computes them. Raises `StoreError` only if this engine cannot receive."""
        count = 0
        while count < len(keys):
            expected, run = self._split(keys[count:])
            if expected is None:
                break
            num_received = self._receive(expected, run, blocks[count : count + len(run)])
            count += num_received
            if num_received < len(run):
                break
        return count

    def save(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Return 0."""
        del keys, blocks
        return 0

    def forget(self, keys: Sequence[bytes]) -> None:
        """Do nothing."""

    def stats(self) -> StoreStats:
        """See `KVStore`."""
        with self._lock:
            return StoreStats(0, 0, 0, num_corrupt=self._num_corrupt, num_errors=self._num_errors)

    def close(self) -> None:
        """Stop receiving."""
        with self._lock:
            self._is_closed = True
            self._expected.clear()
        self._client.close()

    def _split(self, keys: Sequence[bytes]) -> tuple[_Expected | None, Sequence[bytes]]:
        with self._lock:
            candidates = [each for each in self._expected.values() if not self._has_failed(each)]
        best, most = None, 0
        for expected in candidates:
            length = next((index for index, key in enumerate(keys) if key not in expected.keys), len(keys))
            if length > most:
                best, most = expected, length
        return best, keys[:most]

    def _has_failed(self, expected: _Expected) -> bool:
        """Needs the lock."""
        return self._failed_at.get(expected.source, 0.0) >= expected.since

    def _is_wanted(self, expected: _Expected) -> bool:
        with self._lock:
            return not self._is_closed and any(each is expected for each in self._expected.values())

    def _may_wait(self, expected: _Expected) -> bool:
        with self._lock:
            has_failed = self._has_failed(expected)
        return not has_failed and self._is_wanted(expected)

    def _receive(self, expected: _Expected, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """See `load`."""
        try:
            host = local_address(expected.source)
        except StoreError as error:
            self._note_fault(expected.source, str(error))
            return 0
        client = self._client.get(host, OPEN_S)
        if client is None:
            raise StoreError(f"the process for direct transfers of KV has not started within {OPEN_S:g} s")
        count = 0
        while count < len(keys):
            try:
                with client.area(messages.BEAT_S) as area:
                    if not self._may_wait(expected):
                        break
                    size = len(area.objects)
                    part = keys[count : count + size]
                    num_received = self._receive_part(
                        expected, area, client.session, part, blocks[count : count + size]
                    )
            except BusyError:
                if not client.is_alive or not self._may_wait(expected):
                    break
                time.sleep(_BUSY_PAUSE_S)
                continue
            count += num_received
            if num_received < len(part):
                break
        return count

    def _receive_part(
        self, expected: _Expected, area: Area, session: str, keys: Sequence[bytes], blocks: Sequence[memoryview]
    ) -> int:
        count, is_over = 0, False
        generation = secrets.token_bytes(messages.GENERATION_BYTES)
        try:
            with closing(_connect(expected.source)) as connection:
                channel = Channel(connection)
                ready = messages.ReadyToReceive(
                    expected.transfer_id,
                    list(keys),
                    self.block_bytes,
                    self._kv_format,
                    session,
                    area.address,
                    generation,
                )
                self.notify_ready_to_receive(channel, ready)
                while not is_over and self._is_wanted(expected):
                    message = channel.receive((messages.Written, messages.Beat, messages.End))
                    is_over = isinstance(message, messages.End)
                    end = min(message.count, len(keys)) if isinstance(message, messages.Written) else count
                    while count < end:
                        if not self._take(area.objects[count], generation, keys[count], blocks[count]):
                            self._note_fault(
                                expected.source, "the received bytes differ from the announced ones", is_corrupt=True
                            )
                            return count
                        count += 1
            if is_over:
                with self._lock:
                    self._failing.discard(expected.source)
        except OSError as error:
            is_down = not isinstance(error, _OF_ONE_CONNECTION) or not _answers(expected.source)
            self._note_fault(expected.source, str(error) or type(error).__name__, is_down=is_down)
            if not area.ping():
                logger.warning(
                    "the process for direct transfers of KV does not answer; it is replaced if it does not recover"
                )
        finally:
            if not is_over:
                area.rest()
        return count

    def notify_ready_to_receive(self, channel: Channel, ready: messages.ReadyToReceive) -> None:
        """Authenticate both sides, then send the address for the blocks."""
        nonce = secrets.token_bytes(messages.NONCE_BYTES)
        channel.send(messages.Hello(messages.VERSION, nonce))
        challenge = channel.receive(messages.Challenge)
        if not messages.is_proof(challenge.proof, self._secret, "donor", nonce, challenge.nonce):
            raise ConnectionError("it has another OCTAVO_KV_SECRET")
        encoded = messages.encode(ready)
        proof = messages.proof_of(self._secret, "receiver", nonce, challenge.nonce, encoded)
        channel.send(messages.Notice(encoded, proof))

    def _take(self, written: memoryview, generation: bytes, key: bytes, block: memoryview) -> bool:
        head = messages.header_in(written)
        block[:] = written[HEADER_BYTES:]
        return head == messages.header(generation, key, checksum(key, block))

    def _note_fault(self, source: str, what: str, *, is_corrupt: bool = False, is_down: bool = True) -> None:
        with self._lock:
            self._num_errors += 1
            self._num_corrupt += is_corrupt
            is_new = source not in self._failing
            if len(self._failing) > RECEIVER_AREAS:
                self._failing.clear()
            self._failing.add(source)
            if is_down and not is_corrupt:
                if len(self._failed_at) > _MAX_SOURCES:
                    self._failed_at.clear()
                self._failed_at[source] = time.monotonic()
        if is_new:
            logger.warning("prefill engine %s: %s; KV that did not arrive is computed here", source, what)


def _connect(source: str, timeout_s: float = _CONNECT_S) -> socket.socket:
    host, port = source.rsplit(":", 1)
    try:
        return socket.create_connection((host.strip("[]"), int(port)), timeout_s)
    except TimeoutError as error:
        raise _ConnectTimeoutError("the connection timed out") from error


def _answers(source: str) -> bool:
    """Return True if a source accepts two new connections, and answers or closes each.

    An ending process may close one connection, but refuses the next.
    """
    return _probe(source) and _probe(source, after_s=_ENDING_S)


def _probe(source: str, after_s: float = 0.0) -> bool:
    time.sleep(after_s)
    deadline = time.monotonic() + _PROBE_S
    try:
        with closing(_connect(source, _PROBE_S)) as connection:
            channel = Channel(connection)
            try:
                channel.send(messages.Hello(messages.VERSION, secrets.token_bytes(messages.NONCE_BYTES)))
                channel.receive(messages.Challenge, deadline - time.monotonic())
            except TimeoutError:
                return False
            except OSError:
                return True
    except OSError:
        return False
    return True
