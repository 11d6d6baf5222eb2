"""A prefill engine's side of direct transfers, without sockets and Mooncake: its waits, writes and refusals."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from octavo.data.kv_transfer_params import KVTransferParams
from octavo.data.request import Request
from octavo.data.scheduler_output import KVTransfer, TransferDirection
from octavo.kv_transfer import direct_donor, direct_messages
from octavo.kv_transfer.direct_donor import DirectDonor, _Pace
from octavo.kv_transfer.direct_messages import (
    BEAT_S,
    SILENT_S,
    Beat,
    Challenge,
    End,
    Hello,
    Notice,
    ReadyToReceive,
    RefusalError,
    Refused,
    Written,
    encode,
    header,
    proof_of,
)
from octavo.kv_transfer.direct_segment import DONOR_AREAS, HEADER_BYTES, checksum
from octavo.kv_transfer.interface import StoreError, StoreStats
from octavo.kv_transfer.mooncake_client import BusyError
from octavo.sampling_params import SamplingParams

BLOCK_BYTES = 8
OBJECT_BYTES = HEADER_BYTES + BLOCK_BYTES
KEYS = [bytes([number]) * 32 for number in range(8)]
KV_FORMAT = {"kv": "bfloat16"}


class Clock:
    """A clock that advances only by sleeping."""

    now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Transfers:
    """A TransferClient without a process: `get` returns `client`."""

    def __init__(self, **options):
        self.options = options
        self.client = None
        self.asked = []
        self.num_closed = 0

    def get(self, host, timeout_s):
        self.asked.append((host, timeout_s))
        return self.client

    def close(self):
        self.num_closed += 1


class Area:
    """An area for `size` blocks. Each write takes `seconds` of the clock."""

    def __init__(self, clock, size=4, seconds=0.1):
        self.objects = [memoryview(bytearray(OBJECT_BYTES)) for _ in range(size)]
        self.clock, self.seconds = clock, seconds
        self.calls, self.codes, self.waits = [], [0], []
        self.is_busy = False

    @contextmanager
    def area(self, timeout_s):
        self.waits.append(timeout_s)
        if self.is_busy:
            raise BusyError("no area is free")
        yield self

    def call(self, name, arguments):
        self.calls.append((name, arguments))
        self.clock.now += self.seconds
        return self.codes


class Channel:
    """A decode engine that sends these messages. told: the messages that it received."""

    local_host, peer_host = "10.0.0.1", "10.0.0.2"

    def __init__(self, *messages):
        self.messages, self.told = list(messages), []

    def receive(self, kind):
        message = self.messages.pop(0)
        message = message(self.told) if callable(message) else message
        assert isinstance(message, kind)
        return message

    def send(self, message):
        self.told.append(message)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(direct_donor, "time", clock)
    return clock


@pytest.fixture
def donor(monkeypatch, clock):
    monkeypatch.setattr(direct_donor, "TransferClient", Transfers)
    donor = DirectDonor(BLOCK_BYTES, 4 * BLOCK_BYTES, protocol="rdma", secret="s", kv_format=KV_FORMAT)
    yield donor
    donor.close()


def block(key):
    return memoryview(key[:BLOCK_BYTES])


def save(donor, *numbers):
    return donor.save([KEYS[number] for number in numbers], [block(KEYS[number]) for number in numbers])


def ready_for(keys, **changes):
    fields = {"block_bytes": BLOCK_BYTES, "kv_format": KV_FORMAT, "session": "there:1", "address": 1000}
    return ReadyToReceive(transfer_id="t", keys=list(keys), generation=b"g" * 16, **(fields | changes))


def request(name="t", *, is_prefill=True):
    return Request("r", [1], SamplingParams(), kv_transfer_params=KVTransferParams(name, is_prefill=is_prefill))


def order(*numbers, direction=TransferDirection.SAVE):
    return KVTransfer(0, direction, [KEYS[number] for number in numbers], [list(numbers)])


# --- pace -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("object_bytes", "count"), [(1 << 19, 2), (1 << 20, 1), (1 << 21, 1), (3, 349_525)])
def test_first_write_is_about_one_mebibyte(object_bytes, count):
    assert _Pace(object_bytes).num_blocks == count


@pytest.mark.parametrize(
    ("num_blocks", "seconds", "next_num_blocks"),
    [
        (8, BEAT_S + 0.01, 4),
        (5, BEAT_S + 0.01, 2),
        (1, BEAT_S + 0.01, 1),
        (8, BEAT_S, 8),
        (8, BEAT_S / 2, 8),
        (8, BEAT_S / 2 - 0.01, 16),
        (7, BEAT_S / 2 - 0.01, 8),
    ],
)
def test_slow_write_halves_and_fast_write_doubles_write_size(num_blocks, seconds, next_num_blocks):
    pace = _Pace(1 << 17)
    assert pace.num_blocks == 8
    pace.wrote(num_blocks, seconds)
    assert pace.num_blocks == next_num_blocks


# --- calls of the scheduler -------------------------------------------------------------------------------------------


def test_transfer_stays_open_until_its_last_request_ends(donor):
    donor.request_added(request())
    donor.request_added(request())
    donor.request_finished(request())
    assert (donor._open, list(donor._ended)) == ({"t": 1}, [])
    donor.request_finished(request())
    assert (donor._open, list(donor._ended)) == ({}, ["t"])
    donor.request_added(request())
    assert (donor._open, list(donor._ended)) == ({"t": 1}, [])
    donor.request_finished(request())
    donor.request_finished(request("unknown"))
    assert (donor._open, list(donor._ended)) == ({}, ["t", "unknown"])


def test_decode_and_plain_requests_open_no_transfer(donor):
    for other in (request(is_prefill=False), Request("r", [1], SamplingParams())):
        donor.request_added(other)
        donor.request_finished(other)
        assert not donor.expect(other)
        donor.forget_expected("r")
    assert (donor._open, list(donor._ended)) == ({}, [])


def test_remembered_ended_transfers_are_limited(donor, monkeypatch):
    monkeypatch.setattr(direct_donor, "_MAX_KNOWN", 2)
    for name in "abc":
        donor.request_added(request(name))
        donor.request_finished(request(name))
    assert list(donor._ended) == ["b", "c"]


def test_blocks_are_expected_until_their_save_ends(donor):
    donor.transfer_ordered(order(0, 1))
    donor.transfer_ordered(order(1))
    donor.transfer_ordered(order(2, direction=TransferDirection.LOAD))
    assert donor._saving == {KEYS[0]: 1, KEYS[1]: 2}
    donor.transfer_ended(order(1, direction=TransferDirection.LOAD))
    donor.transfer_ended(order(0, 1))
    assert donor._saving == {KEYS[1]: 1}
    assert [donor._is_coming("t", key, 1000.0) for key in KEYS[:3]] == [False, True, False]


def test_event_wakes_waiting_connections(donor, monkeypatch):
    notified = []
    monkeypatch.setattr(donor._changed, "notify_all", lambda: notified.append(donor._changed._is_owned()))
    donor.request_added(request())
    donor.request_finished(request())
    donor.transfer_ended(order(0))
    assert save(donor, 0, 1) == 2
    donor.close()
    assert notified == [True] * 5


def test_unknown_transfer_is_awaited_during_grace_period(donor):
    grace_s = direct_donor._GRACE_S
    assert donor._is_coming("t", KEYS[0], grace_s - 0.01)
    assert not donor._is_coming("t", KEYS[0], grace_s)
    donor.request_added(request())
    assert donor._is_coming("t", KEYS[0], 1000.0)
    donor.request_finished(request())
    assert not donor._is_coming("t", KEYS[0], 0.0)


# --- as a store -------------------------------------------------------------------------------------------------------


def test_donor_passes_options_to_client_and_counts_blocks(donor):
    assert donor._client.options == {"protocol": "rdma", "object_bytes": OBJECT_BYTES, "num_areas": DONOR_AREAS}
    assert donor.stats() == StoreStats(0, 0, 4 * BLOCK_BYTES)
    assert save(donor, 0, 1, 2, 3, 4) == 5
    assert donor.stats() == StoreStats(4, 4 * BLOCK_BYTES, 4 * BLOCK_BYTES, num_evicted=1)


def test_save_and_load_stop_at_first_failed_block(donor, monkeypatch):
    save(donor, 0, 1, 3)
    found = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(4)]
    assert donor.load(KEYS[:4], found) == 2
    assert found[:2] == [block(key) for key in KEYS[:2]]
    assert donor.load(KEYS[:2], found[:2]) == 2
    put, donor._segment.put = donor._segment.put, lambda key, content: key != KEYS[5] and put(key, content)
    assert save(donor, 4, 5, 6) == 1
    assert donor.lacks(KEYS[4:7]) == set(KEYS[5:7])


def test_close_closes_listener_and_connections_once(donor):
    ours, theirs = socket.socketpair()
    donor._connections.add(ours)
    listener = donor._listener
    for _ in range(2):
        donor.close()
        assert (listener.fileno(), donor._client.num_closed, theirs.recv(1)) == (-1, 1, b"")
    theirs.close()


def test_close_unblocks_connection_read_by_another_thread(donor):
    ours, theirs = socket.socketpair()
    donor._connections.add(ours)
    got = []

    def read():
        with suppress(OSError):
            got.append(ours.recv(1))

    reading = threading.Thread(target=read)
    reading.start()
    donor.close()
    reading.join(10)
    assert not reading.is_alive()
    theirs.close()


# --- connections ------------------------------------------------------------------------------------------------------


class Listener:
    """Accepts the given connections, raises the given errors, and finally closes the donor."""

    def __init__(self, donor, *accepted):
        self.donor, self.accepted = donor, list(accepted)

    def accept(self):
        if not self.accepted:
            self.donor._is_closed = True
            raise OSError("closed")
        item = self.accepted.pop(0)
        if isinstance(item, OSError):
            raise item
        return item, ("10.0.0.2", 5)


class Accepted:
    is_closed = False

    def close(self):
        self.is_closed = True


def listen(donor, monkeypatch, *accepted):
    """Return the connections that are served after the donor accepted these."""
    served, ended = [], threading.Semaphore(0)
    monkeypatch.setattr(donor, "_serve", lambda connection: (served.append(connection), ended.release()))
    listener = donor._listener
    donor._listener = Listener(donor, *accepted)
    donor._listen()
    donor._listener = listener
    donor._is_closed = False
    for _ in range(len(donor._connections)):
        assert ended.acquire(timeout=10)
    return served


def test_donor_keeps_listening_after_failed_accept(donor, monkeypatch, clock):
    connection = Accepted()
    assert listen(donor, monkeypatch, OSError("too many open files"), connection) == [connection]
    assert clock.now == pytest.approx(100.1)
    assert donor._connections == {connection}
    donor._connections.clear()


def test_number_of_connections_is_limited(donor, monkeypatch):
    monkeypatch.setattr(direct_donor, "_MAX_CONNECTIONS", 2)
    connections = [Accepted() for _ in range(4)]
    served = listen(donor, monkeypatch, *connections)
    assert sorted(map(id, served)) == sorted(map(id, connections[:2]))
    assert [each.is_closed for each in connections] == [False, False, True, True]
    donor._connections.clear()


def test_connection_accepted_after_close_is_closed(donor, monkeypatch):
    connection = Accepted()
    donor._is_closed = True
    assert listen(donor, monkeypatch, connection) == []
    assert connection.is_closed


def serve(donor, monkeypatch, error):
    """Serve a connection, with a final error after its messages. Return the messages that were sent."""
    ours, theirs = socket.socketpair()
    channel = Channel()

    def hear(_):
        raise error

    monkeypatch.setattr(direct_donor, "Channel", lambda _: channel)
    monkeypatch.setattr(donor, "_receive", hear)
    donor._connections.add(ours)
    donor._serve(ours)
    assert donor._connections == set()
    assert (ours.fileno(), theirs.recv(1)) == (-1, b"")
    theirs.close()
    return channel.told


@pytest.mark.parametrize("error", [RefusalError("other KV"), StoreError("no area")])
def test_refusal_reason_is_sent_and_counted_as_error(donor, monkeypatch, error):
    assert serve(donor, monkeypatch, error) == [Refused(str(error))]
    assert donor.stats().num_errors == 1


def test_broken_connection_is_counted_without_reply(donor, monkeypatch, caplog):
    with caplog.at_level(logging.DEBUG, direct_donor.__name__):
        assert serve(donor, monkeypatch, ConnectionError("it closed the connection")) == []
    assert donor.stats().num_errors == 1
    assert [record.getMessage() for record in caplog.records] == ["KV was not sent: it closed the connection"]


def test_unexpected_failure_is_logged(donor, monkeypatch, caplog):
    assert serve(donor, monkeypatch, ZeroDivisionError()) == []
    assert [record.getMessage() for record in caplog.records] == ["KV could not be sent"]


def test_repeated_refusal_reason_is_logged_once(donor, monkeypatch, caplog):
    monkeypatch.setattr(direct_donor, "_MAX_LOGGED", 2)
    for reason in "aabcba":
        donor._refuse(Channel(), reason)
    assert [record.getMessage()[-1] for record in caplog.records] == ["a", "b", "c", "b", "a"]
    assert "decode engine at 10.0.0.2: no KV is sent to it: a" in caplog.text
    assert donor.stats().num_errors == 6


def hello(version=direct_messages.VERSION):
    return Hello(version, b"n" * 16)


def notice_of(ready, secret="s"):
    def answer(told):
        [challenge] = told
        assert challenge == Challenge(challenge.nonce, proof_of("s", "donor", b"n" * 16, challenge.nonce))
        assert len(challenge.nonce) == 16
        encoded = ready if isinstance(ready, bytes) else encode(ready)
        return Notice(encoded, proof_of(secret, "receiver", b"n" * 16, challenge.nonce, encoded))

    return answer


def test_transfer_request_is_accepted_only_with_valid_proof(donor):
    ready = ready_for(KEYS[:2])
    assert donor._receive(Channel(hello(), notice_of(ready))) == ready
    with pytest.raises(ConnectionError, match=r"^a decode engine with another OCTAVO_KV_SECRET$"):
        donor._receive(Channel(hello(), notice_of(ready, "another")))
    with pytest.raises(ConnectionError, match=r"^invalid request: "):
        donor._receive(Channel(hello(), notice_of(b"\xc1")))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ((hello(3),), "version of the protocol is '2' in the prefill engine and '3' in the decode engine"),
        (
            (hello(), notice_of(ready_for(KEYS, block_bytes=9))),
            "their KV differs: size of a block is '8 bytes' in the prefill engine and '9 bytes' in the decode engine",
        ),
        (
            (hello(), notice_of(ready_for(KEYS, kv_format={"kv": "int8"}))),
            "their KV differs: kv is 'bfloat16' in the prefill engine and 'int8' in the decode engine",
        ),
    ],
)
def test_mismatched_protocol_version_or_kv_format_is_refused(donor, messages, reason):
    with pytest.raises(RefusalError, match=f"^{reason}$"):
        donor._receive(Channel(*messages))


# --- to decode engines ------------------------------------------------------------------------------------------------


def test_each_block_is_written_after_its_header(donor, clock):
    save(donor, 0, 1, 2, 3)
    area, ready = Area(clock, size=3), ready_for(KEYS[:4])
    assert donor._write(area, ready, 1, 2) == 2
    assert area.calls == [("write", ["there:1", 1000 + OBJECT_BYTES, 2])]
    for stored, key in zip(area.objects, KEYS[1:3], strict=False):
        expected = header(b"g" * 16, key, checksum(key, block(key))).ljust(HEADER_BYTES, b"\0") + bytes(block(key))
        assert bytes(stored) == expected
    assert bytes(area.objects[2]) == bytes(OBJECT_BYTES)
    assert donor._write(area, ready, 0, 4) == 3, "as many as the area has room for"
    assert area.calls[-1] == ("write", ["there:1", 1000, 3])


def test_evicted_block_ends_write(donor, clock):
    save(donor, 0, 1, 3)
    area = Area(clock)
    assert donor._write(area, ready_for(KEYS[:4]), 0, 4) == 2
    assert donor._write(area, ready_for(KEYS[:4]), 2, 2) == 0
    assert area.calls == [("write", ["there:1", 1000, 2])]


def test_failed_write_raises_store_error(donor, clock):
    save(donor, 0)
    area = Area(clock)
    area.codes = [-1]
    with pytest.raises(StoreError, match=r"^Mooncake could not write into there:1 \(code -1\)$"):
        donor._write(area, ready_for(KEYS[:1]), 0, 1)


def test_write_size_follows_pace(donor, clock):
    save(donor, 0, 1, 2, 3)
    area, pace = Area(clock, seconds=0.1), _Pace(1 << 19)
    donor._client.client = area
    assert donor._write_in_turn("10.0.0.1", ready_for(KEYS[:4]), 0, 4, pace) == 2
    assert (donor._client.asked, area.waits) == ([("10.0.0.1", BEAT_S)], [BEAT_S])
    assert (donor._written_at, pace.num_blocks) == (pytest.approx(100.1), 4)
    area.seconds = 1.0
    assert donor._write_in_turn("10.0.0.1", ready_for(KEYS[:4]), 2, 1, pace) == 1
    assert (donor._written_at, pace.num_blocks) == (pytest.approx(101.1), 1)


def test_wait_for_area_does_not_count_as_write_time(donor, clock):
    save(donor, 0)
    area, pace = Area(clock, seconds=0.3), _Pace(1 << 19)
    donor._client.client = area
    get = donor._client.get
    donor._client.get = lambda *args: (clock.sleep(10.0), get(*args))[1]
    assert donor._write_in_turn("10.0.0.1", ready_for(KEYS[:1]), 0, 1, pace) == 1
    assert pace.num_blocks == 2


def test_write_is_skipped_without_free_area_within_one_beat(donor, clock):
    save(donor, 0)
    pace = _Pace(1 << 19)
    assert donor._write_in_turn("10.0.0.1", ready_for(KEYS[:1]), 0, 1, pace) == 0
    assert clock.now == 100.0
    donor._client.client = area = Area(clock)
    area.is_busy = True
    assert donor._write_in_turn("10.0.0.1", ready_for(KEYS[:1]), 0, 1, pace) == 0
    assert (clock.now, donor._written_at, area.calls) == (100.0 + BEAT_S, 0.0, [])
    donor._client.get = lambda *_: (clock.sleep(2.0), area)[1]
    assert donor._write_in_turn("10.0.0.1", ready_for(KEYS[:1]), 0, 1, pace) == 0
    assert clock.now == 102.0 + BEAT_S, "it has waited for longer than a beat"


def waiting(donor, clock, monkeypatch, *events):
    """Run an event in each wait of the donor. Return the list of its waits in seconds."""
    waits, left = [], list(events)

    def wait(seconds):
        waits.append(seconds)
        clock.now += 0.1 if left else seconds
        if left:
            left.pop(0)()

    monkeypatch.setattr(donor._changed, "wait", wait)
    return waits


def test_wait_returns_number_of_available_blocks(donor, clock, monkeypatch):
    waits = waiting(donor, clock, monkeypatch, lambda: None, lambda: save(donor, 1, 2))
    save(donor, 0)
    ready = ready_for(KEYS[:4])
    assert donor._wait(ready, 0, 100.0) == 1
    assert waits == []
    assert donor._wait(ready, 1, 100.0) == 2
    assert waits == [pytest.approx(BEAT_S), pytest.approx(BEAT_S - 0.1)]


def test_wait_returns_zero_after_one_beat(donor, clock, monkeypatch):
    donor.request_added(request())
    waits = waiting(donor, clock, monkeypatch)
    assert donor._wait(ready_for(KEYS[:1]), 0, 0.0) == 0
    assert (waits, clock.now) == ([BEAT_S], 100.0 + BEAT_S)


def test_wait_ends_if_prefill_request_ends_without_block(donor, clock, monkeypatch):
    donor.request_added(request())
    waiting(donor, clock, monkeypatch, lambda: donor.request_finished(request()))
    assert donor._wait(ready_for(KEYS[:1]), 0, 100.0) is None
    assert clock.now == 100.1


def test_wait_ends_when_donor_closes(donor, clock, monkeypatch):
    donor.request_added(request())
    waiting(donor, clock, monkeypatch, donor.close)
    assert donor._wait(ready_for(KEYS[:1]), 0, 100.0) is None


def test_grace_period_of_unknown_transfer_starts_at_request(donor, clock, monkeypatch):
    waiting(donor, clock, monkeypatch)
    assert donor._wait(ready_for(KEYS[:1]), 0, clock.now - direct_donor._GRACE_S + 0.1) == 0
    assert donor._wait(ready_for(KEYS[:1]), 0, clock.now - direct_donor._GRACE_S) is None


def hand_over(donor, count):
    channel = Channel()
    donor._hand_over(channel, ready_for(KEYS[:count]))
    return channel.told


def test_handover_reports_each_write_and_its_end(donor, clock, monkeypatch):
    donor._client.client = Area(clock, size=2)
    donor.request_added(request())
    waiting(donor, clock, monkeypatch, lambda: save(donor, 3))
    save(donor, 0, 1, 2)
    assert hand_over(donor, 4) == [Written(2), Written(3), Written(4), End()]
    assert [arguments for _, arguments in donor._client.client.calls] == [
        ["there:1", 1000, 2],
        ["there:1", 1000 + 2 * OBJECT_BYTES, 1],
        ["there:1", 1000 + 3 * OBJECT_BYTES, 1],
    ]


def test_handover_ends_when_prefill_request_ends(donor, clock, monkeypatch):
    donor._client.client = Area(clock)
    donor.request_added(request())
    waiting(donor, clock, monkeypatch, lambda: None, lambda: donor.request_finished(request()))
    save(donor, 0)
    assert hand_over(donor, 2) == [Written(1), End()]


def test_heartbeats_are_sent_while_prompt_is_computed(donor, clock, monkeypatch):
    donor._client.client = Area(clock)
    donor.request_added(request())
    beats = int(SILENT_S / BEAT_S) * 3
    waits = []

    def passing(seconds):
        waits.append(seconds)
        clock.now += seconds
        if len(waits) == beats:
            save(donor, 0)

    monkeypatch.setattr(donor._changed, "wait", passing)
    assert hand_over(donor, 1) == [*[Beat()] * (beats - 1), Written(1), End()]


def test_stalled_write_of_ready_blocks_raises_store_error(donor, clock):
    donor._client.client = area = Area(clock)
    area.is_busy = True
    save(donor, 0)
    channel = Channel()
    with pytest.raises(StoreError, match=r"^the process for direct transfers of KV has written nothing for 3 s$"):
        donor._hand_over(channel, ready_for(KEYS[:1]))
    num_beats = direct_donor._STALLED_S / BEAT_S + 2  # the first one, and one more after the limit
    assert channel.told == [Beat()] * int(num_beats)


def test_write_to_another_engine_restarts_stall_timer(donor, clock, monkeypatch):
    donor._client.client = area = Area(clock)
    area.is_busy = True
    save(donor, 0)
    channel = Channel()

    def send(message):
        channel.told.append(message)
        if len(channel.told) == 5:
            donor._written_at = clock.now

    channel.send = send
    with pytest.raises(StoreError, match="has written nothing"):
        donor._hand_over(channel, ready_for(KEYS[:1]))
    assert len(channel.told) == 5 + int(direct_donor._STALLED_S / BEAT_S) + 1


def test_stall_timer_restarts_after_each_write(donor, clock, monkeypatch):
    donor._client.client = area = Area(clock, size=1)
    save(donor, 0, 1)
    channel = Channel()

    def send(message):
        channel.told.append(message)
        area.is_busy = len(channel.told) not in {5, 10}
        donor._written_at = 0.0

    channel.send = send
    area.is_busy = True
    donor._hand_over(channel, ready_for(KEYS[:2]))
    assert channel.told == [*[Beat()] * 5, Written(1), *[Beat()] * 4, Written(2), End()]


def test_stall_and_grace_limits_are_below_silence_limit():
    assert 2 * BEAT_S < direct_donor._STALLED_S < SILENT_S
    assert direct_donor._GRACE_S < SILENT_S


@pytest.mark.parametrize("has_both", [True, False])
def test_donor_listens_on_ipv4_and_ipv6_if_available(monkeypatch, has_both):
    asked, threads = [], []
    listener = SimpleNamespace(getsockname=lambda: ("", 4000), shutdown=lambda _: None, close=lambda: None)
    monkeypatch.setattr(direct_donor, "TransferClient", Transfers)
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: has_both)
    monkeypatch.setattr(socket, "create_server", lambda *args, **options: (asked.append((args, options)), listener)[1])
    monkeypatch.setattr(
        threading, "Thread", lambda **options: (threads.append(options), SimpleNamespace(start=lambda: None))[1]
    )
    donor = DirectDonor(BLOCK_BYTES, BLOCK_BYTES, protocol="tcp", secret="s", kv_format=KV_FORMAT)
    family = socket.AF_INET6 if has_both else socket.AF_INET
    assert asked == [((("", 0),), {"family": family, "dualstack_ipv6": has_both})]
    assert donor.port == 4000
    assert threads == [{"target": donor._listen, "name": "octavo-kv-direct", "daemon": True}]


def test_port_equals_listener_port(donor):
    assert donor.port == donor._listener.getsockname()[1]
